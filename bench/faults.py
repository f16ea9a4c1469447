"""Faults of real processes: what kills, signals, full disks and damaged files leave of a run, and how soon it ends.

A run of ``STEPS`` steps under a pipeline over two processes saves its state every ``EVERY`` steps. ``right``: after
``--restarts`` or ``--resume`` its state is that of an undisturbed run, within ``worst`` of it; where a run has to end, it
has said why. ``lost``: complete states that were there at the fault, and are not at the end. ``seconds``: of the slowest
run; none may take longer than ``limit``: two undisturbed runs, the time a silent process has, and half a minute.

``kill -9`` comes at seeded moments of the whole run, of process 0 (the coordinator, and the first stage) and the last
stage's; and while a state is being written, of process 0, which writes what all share. Two hosts are network namespaces,
which root alone may make. Needs the extras ``checkpoint`` and ``data``.
"""

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.harness import Row, main
from bench.two_hosts import ADDRESSES, cable, on_host, two_hosts
from jscaler.errors import JscalerError
from jscaler.runtime.watch import HUNG

COLUMNS = ("fault", "moments", "right", "worst", "lost", "seconds", "limit", "told")
STEPS, EVERY, HANG = 60, 10, 8
MOMENTS = 20
JOB = Path(__file__).with_name("fault_job.py")
PLAN = "pipeline(2, 4)"
BOUND = 1e-6  # of float32 states, whatever their scale: those of one plan are equal to the bit
PORT = 29500  # of the coordinator on a host of its own
Fault = Callable[["Run"], Any]


@dataclass
class Run:
    """A command under way, and the folder of its states."""

    launcher: "subprocess.Popen[str]"
    folder: Path
    began: float
    struck: bool = False  # whether a signal was sent

    def child(self, number: int) -> int | None:
        """The process of this number; None while, or where, there is none."""
        return child_pids(self.launcher.pid).get(number)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something, or for the end of the run."""
        while self.launcher.poll() is None and not true():
            time.sleep(0.001)

    def after(self, seconds: float) -> None:
        self.until(lambda: time.monotonic() >= self.began + seconds)

    def writes(self) -> bool:
        return any("tmp" in path.name for path in self.folder.glob("*")) if self.folder.exists() else False

    def signal(self, what: int, number: int | None = None) -> None:
        """To a process of the run, or to the command itself; where it is not there yet, once it is."""
        if number is not None:
            self.until(lambda: self.child(number) is not None)
        pid = self.launcher.pid if number is None else self.child(number)
        if pid is not None and self.launcher.poll() is None:
            os.kill(pid, what)
            self.struck = True


@dataclass(frozen=True)
class Ended:
    """What a run has come to."""

    code: int
    said: str
    seconds: float
    lost: int
    struck: bool = False


def rows(quick: bool) -> Iterator[Row]:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as root:
        undisturbed = Path(root) / "undisturbed"
        alone = run(undisturbed, "--local-processes", "2")
        assert alone.code == 0, alone.said
        bench = _Bench(Path(root), _state(undisturbed), alone.seconds)
        count = 1 if quick else MOMENTS
        for role, number in (("coordinator, first stage", 0), ("last stage", 1)):
            killed = (_killed(number, rng.uniform(0.0, alone.seconds)) for _ in itertools.count())
            yield bench.restarted(f"kill -9 of the {role}", killed, count)
        saves = (_killed_in_a_save(rng.randrange(1, STEPS // EVERY + 1), rng.uniform(0.0, 0.05)) for _ in itertools.count())
        yield bench.restarted("kill -9 of the writer of a state", saves, count)
        yield bench.restarted("SIGSTOP of one process", map(_stopped, (1,) if quick else (0, 1)), 1 if quick else 2)
        yield bench.resumed("SIGTERM while it compiles", _terminated(lambda run: run.after(0.6 * alone.seconds / 2)))
        if not quick:
            in_a_step = _terminated(lambda run: run.until(lambda: len(_complete(run.folder)) >= 2))
            yield bench.resumed("SIGTERM in a step", in_a_step)
            yield bench.resumed("SIGTERM in a save", _terminated(lambda run: run.until(run.writes)))
            yield bench.full_disk()
            with two_hosts(Path(root)) as hosts:
                yield bench.apart(
                    "SIGSTOP on one of two hosts", hosts, lambda second: second.send_signal(signal.SIGSTOP), [0]
                )
                yield bench.apart("a cable between two hosts is pulled out", hosts, lambda second: cable(up=False), [0, 1])
        yield bench.damaged(rng, 1 if quick else None)
        yield bench.differing("another plan on one process", "plan", (("--plan", PLAN), ("--plan", "pipeline(2, 2)")))
        if not quick:
            yield bench.differing("other data on one process", "first batch", (("--job", "job"), ("--job", "job(seed=1)")))


@dataclass
class _Bench:
    root: Path
    exact: list[np.ndarray]
    alone: float
    number: int = 0

    @property
    def limit(self) -> float:
        return 2 * self.alone + HANG + 30

    def folder(self) -> Path:
        self.number += 1
        return self.root / str(self.number)

    def row(self, fault: str, ended: Sequence[Ended], rights: Sequence[bool], worst: float, told: str = "") -> Row:
        seconds = max((one.seconds for one in ended), default=0.0)
        struck = sum(one.struck for one in ended)
        found: Row = {"fault": fault, "moments": struck or len(rights), "right": all(rights), "worst": worst}
        found |= {"lost": sum(one.lost for one in ended), "seconds": round(seconds, 1), "limit": round(self.limit, 1)}
        found |= {"told": told, "wrong": sum(not right for right in rights)}
        return found | {"bounds": {"worst": BOUND, "lost": 0, "seconds": self.limit, "wrong": 0}}

    def restarted(self, fault: str, faults: Iterator[Fault], count: int) -> Row:
        """Runs that go on by themselves, until so many faults have struck one: some come when it has ended."""
        ended: list[Ended] = []
        worst, told = 0.0, ""
        for one in itertools.islice(faults, 2 * count):
            if sum(one.struck for one in ended) == count:
                break
            folder = self.folder()
            found = run(folder, "--local-processes", "2", "--restarts", "1", fault=one)
            if found.code:
                print(found.said, file=sys.stderr)
            else:
                worst = max(worst, self.distance(folder))
            told = next((line for line in found.said.splitlines() if "restart 1 of 1" in line), told)
            ended.append(found)
            shutil.rmtree(folder, ignore_errors=True)
        return self.row(fault, ended, [one.code == 0 for one in ended], worst, told)

    def resumed(self, fault: str, one: Fault) -> Row:
        """A run that ends as it was told, and is gone on with."""
        folder = self.folder()
        first = run(folder, "--local-processes", "2", fault=one)
        more = ["--resume"] if _complete(folder) else []
        early = STEPS not in _complete(folder)
        second = run(folder, "--local-processes", "2", *more)
        right = early and first.code in (128 + signal.SIGTERM, -signal.SIGTERM) and second.code == 0
        told = next((line for line in first.said.splitlines() if "interrupted" in line), "")
        return self.row(fault, [first, second], [right], self.distance(folder), told)

    def full_disk(self) -> Row:
        """A file system that has room for a few states alone."""
        disk, size = self.folder(), sum(path.stat().st_size for path in _files(self.root / "undisturbed", STEPS))
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={int(3.5 * size)}", "tmpfs", str(disk)], capture_output=True, check=False
        )
        if mounted.returncode:
            return {"fault": "full disk", "told": "no file system may be mounted here"}
        try:
            ended = run(disk / "states", "--local-processes", "2")
            left = _complete(disk / "states")
            told = next((line for line in ended.said.splitlines() if "cannot write the checkpoint" in line), "")
            readable = bool(left) and len(_state(disk / "states", left[-1])) == len(self.exact)
            return self.row("full disk", [ended], [ended.code == 1 and bool(told) and readable], 0.0, told)
        finally:
            subprocess.run(["umount", str(disk)], check=False)

    def damaged(self, rng: random.Random, count: int | None) -> Row:
        """Files of the last state, so many or all, that are cut short, or gone: it is named, or it reads as before without
        them."""
        ended, rights, worst, named = [], [], 0.0, 0
        files = [path for path in _files(self.root / "undisturbed", STEPS) if path.stat().st_size]
        chosen = rng.sample(files, len(files) if count is None else count)
        for number, file in enumerate(chosen):
            folder = self.folder()
            shutil.copytree(self.root / "undisturbed", folder)
            victim = folder / file.relative_to(self.root / "undisturbed")
            if number % 2:
                victim.unlink()
            else:
                os.truncate(victim, victim.stat().st_size // 2)
            needed = not self.reads(folder)
            found = run(folder, "--local-processes", "2", "--resume", counted=False)
            said = "CheckpointWarning" in found.said
            named += said
            rights.append(found.code == 0 and said is needed)
            worst = max(worst, self.distance(folder) if found.code == 0 else 0.0)
            ended.append(found)
        told = f"{named} of {len(chosen)} are named; the state reads as before without the others"
        return self.row("a damaged file of the last state", ended, rights, worst, told)

    def differing(self, fault: str, what: str, own: Sequence[Sequence[str]]) -> Row:
        """Two processes of which one has been told something else."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        began, folder = time.monotonic(), self.folder()
        place = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process"]
        every = [_started(folder, *words, *place, str(i)) for i, words in enumerate(own)]
        try:
            said = [" ".join(one.communicate(timeout=self.limit)[0].split()) for one in every]
        except subprocess.TimeoutExpired:
            said = ["they wait for one another"]
        finally:
            for one in every:
                one.kill()
        right = all("ProcessError" in one and f"another {what}" in one for one in said)
        told = said[0][said[0].find("ProcessError") :][:120]
        return self.row(fault, [Ended(1, "", time.monotonic() - began, 0)], [right], 0.0, told)

    def apart(
        self, fault: str, hosts: Path | None, strike: Callable[["subprocess.Popen[str]"], None], witnesses: Sequence[int]
    ) -> Row:
        """A process on each of two hosts: those that see the fault name the other and end, and both go on together.

        Args:
            strike: is given the second process, once a state is saved.
            witnesses: who sees it; the others are killed then.
        """
        if hosts is None:
            return {"fault": fault, "told": "no network namespaces may be made here"}
        folder, began = self.folder(), time.monotonic()
        both = _on_both(folder, hosts)
        Run(both[0], folder, began).until(lambda: len(_complete(folder)) >= 1)
        there = _complete(folder)
        strike(both[1])
        said = {number: _communicated(both[number], self.limit) for number in witnesses}
        seconds = time.monotonic() - began
        for one in both:
            one.kill()
            one.wait()
        cable(up=True)
        again = _on_both(folder, hosts, "--resume")
        more = [_communicated(one, self.limit) for one in again]
        told = {n: next((line for line in text.splitlines() if "ProcessError" in line), "") for n, text in said.items()}
        right = all(both[n].returncode == HUNG and f"process {1 - n}" in line for n, line in told.items())
        right = right and not any(one.returncode for one in again)
        if not right:
            print(*said.values(), *more, sep="\n", file=sys.stderr)
        ended = [Ended(HUNG, "", seconds, len(set(there) - set(_complete(folder))), struck=True)]
        return self.row(fault, ended, [right], self.distance(folder) if right else np.inf, told[0])

    def reads(self, folder: Path) -> bool:
        """Whether the last state is what it was."""
        try:
            return self.distance(folder) == 0.0
        except JscalerError:
            return False

    def distance(self, folder: Path) -> float:
        return max(float(np.abs(a - b).max()) for a, b in zip(_state(folder), self.exact, strict=True))


def _killed(number: int, at: float) -> Fault:
    def fault(run: Run) -> None:
        run.after(at)
        run.signal(signal.SIGKILL, number)

    return fault


def _killed_in_a_save(save: int, later: float) -> Fault:
    def fault(run: Run) -> None:
        run.until(lambda: len(_complete(run.folder)) >= save - 1 and run.writes())
        time.sleep(later)
        run.signal(signal.SIGKILL, 0)

    return fault


def _stopped(number: int) -> Fault:
    def fault(run: Run) -> None:
        run.until(lambda: len(_complete(run.folder)) >= 1)
        run.signal(signal.SIGSTOP, number)

    return fault


def _terminated(when: Callable[[Run], None]) -> Fault:
    def fault(run: Run) -> None:
        when(run)
        run.signal(signal.SIGTERM)

    return fault


def _on_both(folder: Path, hosts: Path, *more: str) -> list["subprocess.Popen[str]"]:
    place = ["--coordinator", f"{ADDRESSES[0]}:{PORT}", "--processes", "2", "--process"]
    return [_started(folder, *more, *place, str(i), under=on_host(i, hosts, [])) for i in (0, 1)]


def _communicated(one: "subprocess.Popen[str]", limit: float) -> str:
    try:
        return one.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        one.kill()
        return one.communicate()[0]


def _started(folder: Path, *more: str, under: Sequence[str] = ()) -> "subprocess.Popen[str]":
    words = list(more)
    job = words.pop(words.index("--job") + 1) if "--job" in words else "job"
    words = [word for word in words if word != "--job"] + ([] if "--plan" in words else ["--plan", PLAN])
    words += ["--job", f"{JOB}:{job}", "--devices", "4", "--platform", "cpu", "--steps", str(STEPS)]
    words += ["--checkpoint", str(folder), "--save-every", str(EVERY), "--hang-after", str(HANG)]
    return started_command(words, under)


def started_command(words: Sequence[str], under: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """``jscaler train`` with these words, as a user starts it; ``under`` is what takes a command as its last words."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.Popen(
        [*under, sys.executable, "-m", "jscaler", "train", *words], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def child_pids(launcher: int) -> dict[int, int]:
    """The processes that a command has started, by their numbers in the job."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == launcher and b"--process" in words:
            found[int(words[words.index(b"--process") + 1])] = int(entry.name)
    return found


def run(folder: Path, *more: str, fault: Fault | None = None, counted: bool = True) -> Ended:
    """A whole command, which a fault may come over.

    Args:
        counted: whether states that are gone at the end count as lost.
    """
    began = time.monotonic()
    one = Run(_started(folder, *more), folder, began)
    try:
        if fault is not None:
            fault(one)
        there = _complete(folder)
        said = one.launcher.communicate(timeout=300)[0]
    finally:
        one.launcher.kill()
    lost = len(set(there) - set(_complete(folder))) if counted else 0
    return Ended(one.launcher.returncode, said, time.monotonic() - began, lost, one.struck)


def _complete(folder: Path) -> list[int]:
    """The steps whose states are whole."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal()) if folder.exists() else []


def _files(folder: Path, step: int) -> list[Path]:
    return sorted(path for path in (folder / str(step)).rglob("*") if path.is_file())


def _state(folder: Path, step: int = STEPS) -> list[np.ndarray]:
    """The leaves of a state, on one device."""
    from bench.fault_job import make_state
    from jscaler.runtime.checkpoint import restore

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs: Any = jax.eval_shape(make_state, jax.random.key(0))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), structs)
    found = jax.tree.leaves(restore(folder, step, target))
    keys = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in found)
    return [np.asarray(x, np.float64) for x in keys]


if __name__ == "__main__":
    main("faults", __doc__ or "", COLUMNS, rows, devices=1)
