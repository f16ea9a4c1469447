"""Do the tests notice a fault? One-line faults are planted one after another in a copy, and the tests run on it.

``bench/mutants/mutants.toml`` has the faults: a text that stands in a file exactly once, and what takes its place. The
tests of the touched file run, then those of its package, then the whole suite, until one fails. Nothing but the tests' own
pass or fail decides; the test that fails must pass without the fault, or it is no catch. ``--old REV`` plants what survives
in an earlier revision too, which must not catch it with its own tests.

Rows go to ``--out`` as they are measured: a run that was stopped goes on where it was.
"""

import ast
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Row, main

COLUMNS = ("mutant", "what", "caught_by", "test", "seconds", "old")
ROOT = Path(__file__).parents[1]
TABLE = ROOT / "bench/mutants/mutants.toml"
OWN_TEST = "tests/bench/test_mutants.py"  # it reads the very texts that are replaced
# Records are tested by the rules that are made of them, the passes by what they leave of a step.
MORE_TESTS = {"lax_primitives": ("rules",), "lower": ("flat_passes",), "flat_passes": ("lower",)}
NOTHING, NO_TEXT = "NOTHING", "no such text"
SURVIVORS = 0.05  # the share that may go unnoticed
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        what: is wrong, in words.
        old, new: part of a line of ``file``, and what takes its place.
    """

    file: str
    what: str
    old: str
    new: str
    quick: bool = False

    @property
    def package(self) -> str:
        return self.file.split("/")[1]

    @property
    def name(self) -> str:
        return self.file.removeprefix("jscaler/").removesuffix(".py")

    def planted(self, text: str) -> str:
        """``text`` with the fault; raises ValueError where what is replaced does not stand there exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: '{self.old}' stands there {count} times, not once ({self.what}); mend {TABLE}")
        mutated = text.replace(self.old, self.new)
        ast.parse(mutated)
        return mutated


def mutants() -> list[Mutant]:
    """All faults, in the order of the table."""
    return [Mutant(**entry) for entry in tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]]


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to: the first that failed, or that it hung; "" where all passed."""

    failed: str
    seconds: float


@dataclass(frozen=True)
class Copy:
    """A copy of the project in a folder of its own, in which tests run.

    Attributes:
        limit: seconds after which tests count as hung.
    """

    root: Path
    workers: int
    limit: float

    def run(self, tests: Sequence[str]) -> Outcome:
        """Run ``tests`` until one fails; those of a few files in one process."""
        workers = 0 if all(".py" in test for test in tests) else self.workers
        words = ["-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"-n{workers}", *tests]
        env = {**os.environ, "PYTHONPATH": str(self.root), "COLUMNS": "400"}
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=self.root, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome(f"hung: no end in {self.limit:.0f} s", time.monotonic() - started)
        except BaseException:  # stopped by hand: no tests stay behind
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds = time.monotonic() - started
        if process.returncode in (4, 5):
            raise RuntimeError(f"no tests ran of {tests}:\n{said[-2000:]}")
        failed = _FAILED.search(said)
        why = failed[1] if failed is not None else f"pytest ended with {process.returncode}"
        return Outcome(why if process.returncode else "", seconds)

    def stages(self, mutant: Mutant, everything: bool) -> dict[str, list[str]]:
        """The tests to run, stage by stage: of the touched file, if it has some, of its package, and all."""
        own = sorted(self.root.glob(f"tests/{mutant.name.replace('/', '/test_', 1)}*.py"))
        folders = [f"tests/{package}" for package in (mutant.package, *MORE_TESTS.get(mutant.package, ()))]
        found = {"file": [str(path.relative_to(self.root)) for path in own]} if own else {}
        return found | {"package": folders} | ({"all": ["tests"]} if everything else {})

    def with_fault(self, mutant: Mutant, file: str, tests: Sequence[str]) -> Outcome:
        """What ``tests`` come to while ``file`` has the fault."""
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutant.planted(text), encoding="utf-8")
        try:
            return self.run(tests)
        finally:
            path.write_text(text, encoding="utf-8")

    def place(self, mutant: Mutant) -> str:
        """The file that a fault fits into, its own first: in an earlier revision it may be another; "" if there is none."""
        files = [self.root / mutant.file, *sorted(self.root.glob("jscaler/**/*.py"))]
        fits = [f for f in files if f.exists() and f.read_text(encoding="utf-8").count(mutant.old) == 1]
        return str(fits[0].relative_to(self.root)) if fits else ""


def copied(folder: Path) -> Path:
    """The files that git tracks, as they are now, in ``folder``."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if name != OWN_TEST and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def revision(rev: str, folder: Path) -> Path:
    """The files of revision ``rev`` in ``folder``."""
    packed = subprocess.run(["git", "archive", rev], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    (folder / OWN_TEST).unlink(missing_ok=True)
    return folder


class Sound:
    """Knows which tests pass before anything is planted."""

    def __init__(self) -> None:
        self.known: set[tuple[Path, str]] = set()

    def check(self, copy: Copy, failed: str, tests: Sequence[str]) -> None:
        """Raises RuntimeError where what failed of ``tests`` fails on ``copy`` as it is, too."""
        one = [failed.split("[")[0]] if ".py" in failed else tests
        key = (copy.root, " ".join(one))
        if key not in self.known and (found := copy.run(one)).failed:
            raise RuntimeError(f"{found.failed} fails before anything is planted: no fault could be told from it")
        self.known.add(key)


def measured(mutant: Mutant, row: Row, copy: Copy, old: Copy | None, everything: bool, sound: Sound) -> Row:
    """The row of a fault; ``row`` is what is known of it."""
    for stage, tests in copy.stages(mutant, everything).items():
        if row["caught_by"] or stage in row["ran"]:
            continue
        found = copy.with_fault(mutant, mutant.file, tests)
        row = {**row, "ran": [*row["ran"], stage], "seconds": round(row["seconds"] + found.seconds, 1)}
        if found.failed:
            sound.check(copy, found.failed, tests)
            row |= {"caught_by": stage, "test": found.failed}
    if old is not None and not row["caught_by"] and not row["old"]:
        row = {**row, "old": _noticed_before(mutant, old, sound)}
    return row


def _noticed_before(mutant: Mutant, old: Copy, sound: Sound) -> str:
    """The test of an earlier revision that notices the fault; or that none does, or that it has no such text."""
    place = old.place(mutant)
    if not place:
        return NO_TEXT
    found = old.with_fault(mutant, place, ["tests"])
    if found.failed:
        sound.check(old, found.failed, ["tests"])
    return found.failed or NOTHING


def rows(quick: bool, only: str, no_all: bool, old: str, out: str, workers: int, limit: float) -> Iterator[Row]:
    """A row for each fault; the last one's ``value`` is the share that nothing noticed."""
    chosen = [m for m in mutants() if only in f"{m.file} {m.what}" and (m.quick or not quick)]
    kept = Path(out) if out else None
    known = _known(kept) if kept is not None else {}
    everything = not no_all and not quick
    found: list[Row] = []
    sound = Sound()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(copied(Path(folder) / "now"), workers, limit)
        for mutant in chosen:
            mutant.planted((copy.root / mutant.file).read_text(encoding="utf-8"))  # before hours are spent
        before = Copy(revision(old, Path(folder) / "old"), workers, limit) if old else None
        for mutant in chosen:
            start = known.get(_key(mutant), {"caught_by": "", "test": "", "seconds": 0.0, "old": "", "ran": []})
            start |= {"mutant": mutant.name, "what": mutant.what}
            row = measured(mutant, start, copy, before, everything, sound)
            if kept is not None and row != start:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, "fault": dataclasses.asdict(mutant)}) + "\n")
            found.append(row)
            yield {**row, "caught_by": row["caught_by"] or NOTHING}
    survived = [row for row in found if not row["caught_by"]]
    share = len(survived) / max(1, len(found))
    total: Row = {"mutant": f"{len(found) - len(survived)} of {len(found)} caught", "value": share}
    if everything:  # else what has survived its package's tests may yet be caught
        total |= {"bound": SURVIVORS}
    noticed = [row for row in survived if row["old"] not in ("", NOTHING, NO_TEXT)]
    yield {**total, "noticed_before": len(noticed), "bounds": {"noticed_before": 0}}


def _key(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.old, mutant.new


def _known(kept: Path) -> dict[tuple[str, str, str], Row]:
    """Rows that were measured before, by their fault; the last of each."""
    lines = map(json.loads, kept.read_text(encoding="utf-8").splitlines()) if kept.exists() else ()
    return {_key(Mutant(**row.pop("fault"))): row for row in lines}


OPTIONS: dict[str, dict[str, Any]] = {
    "only": {"default": "", "metavar": "TEXT", "help": "only faults whose file, or what is wrong, holds this"},
    "no-all": {"action": "store_true", "help": "run the tests of the touched package alone"},
    "old": {"default": "", "metavar": "REV", "help": "plant what survives in this revision, and run its own tests"},
    "out": {"default": "", "metavar": "FILE", "help": "keep each row there, and go on with what is there"},
    "workers": {"type": int, "default": 2, "help": "processes of a run of tests"},
    "limit": {"type": float, "default": 1800.0, "metavar": "SECONDS", "help": "after which tests count as hung"},
}

if __name__ == "__main__":
    main("mutants", __doc__ or "", COLUMNS, rows, options=OPTIONS)
