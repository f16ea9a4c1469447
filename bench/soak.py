"""A long run over two processes, some of which are killed: are its losses right, and does memory stay?

``STEPS`` steps of GPT nano (or ``--model llama``, in nnx) under ZeRO-3 with a state saved every 100; ``kill -9`` of a
process at seeded moments, and as many ``--restarts``. ``losses``: the largest difference of a step's loss from an
undisturbed run's, in whose place there must be none. ``missing``: steps that the log lacks. ``memory``: how much more (or
less) a process holds in the last third of its life than in the first (medians, the worst of both runs); 2 % at most. Its
first ``WARM`` seconds are left out, in which it compiles and writes its first states, and so are processes that live for
less than ``LONG`` seconds more.
"""

import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.faults import Run, child_pids, started_command
from bench.harness import Row, main

COLUMNS = ("model", "steps", "kills", "restarts", "losses", "missing", "memory", "seconds")
STEPS, EVERY, KILLS = 2000, 100, 5
QUICK = (60, 20, 1)
WARM, LONG = 100.0, 60.0  # seconds
MEMORY = 0.02


def rows(quick: bool, model: str) -> Iterator[Row]:
    steps, every, kills = QUICK if quick else (STEPS, EVERY, KILLS)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as root:
        plain, seconds, held = _run(Path(root) / "plain", model, steps, every, [])
        moments = sorted((rng.uniform(0.2, 1.0) * seconds, rng.randrange(2)) for _ in range(kills))
        killed, longer, more = _run(Path(root) / "killed", model, steps, every, moments)
    losses = max(abs(killed[step] - plain[step]) for step in killed.keys() & plain.keys())
    drift = [abs(one) for one in map(_drift, (*held, *more)) if one is not None]
    row: Row = {"model": model, "steps": steps, "kills": kills, "restarts": len(more) // 2 - 1, "losses": losses}
    row |= {"missing": 2 * steps - len(plain) - len(killed), "seconds": round(longer, 1)}
    row |= {"memory": round(max(drift, default=0.0), 4)}
    yield row | {"bounds": {"losses": 0.0, "missing": 0, **({} if quick else {"memory": MEMORY})}}


def _run(
    folder: Path, model: str, steps: int, every: int, kills: list[tuple[float, int]]
) -> tuple[dict[int, float], float, list[list[tuple[float, int]]]]:
    """The losses by step, the seconds of the run, and by process what it held, and when."""
    log = folder / "log.jsonl"
    words = ["--model", model, "--size", "nano", "--plan", "zero3", "--devices", "4", "--platform", "cpu", "--batch", "8"]
    words += ["--seq", "32", "--stacked", "--steps", str(steps), "--save-every", str(every), "--keep", "2"]
    words += [
        "--checkpoint",
        str(folder / "states"),
        "--log",
        str(log),
        "--local-processes",
        "2",
        "--restarts",
        str(len(kills)),
    ]
    began = time.monotonic()
    run = Run(started_command(words), folder / "states", began)
    held: dict[int, list[tuple[float, int]]] = {}
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(run, held, ended))
    watch.start()
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(run.launcher.stdout.read() if run.launcher.stdout else ""))
    reader.start()
    try:
        for at, number in kills:
            run.after(at)
            run.until(lambda number=number: run.child(number) is not None)
            run.signal(9, number)
        code = run.launcher.wait(3600)
    finally:
        run.launcher.kill()
        ended.set()
        watch.join()
        reader.join()
    assert code == 0, said
    found = {row["step"]: row["loss"] for row in map(json.loads, log.read_text().splitlines())}
    return found, time.monotonic() - began, list(held.values())


def _watch(run: Run, held: dict[int, list[tuple[float, int]]], ended: threading.Event) -> None:
    """What the run's processes hold of memory that is no file's, twice a second."""
    while not ended.wait(0.5):
        for pid in child_pids(run.launcher.pid).values():
            try:
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:
                continue
            sizes = [int(line.split()[1]) for line in status if line.startswith("RssAnon")]
            held.setdefault(pid, []).extend((time.monotonic(), size) for size in sizes)


def _drift(held: list[tuple[float, int]]) -> float | None:
    """The growth from the first third of a life to its last; None of one too short to say."""
    first, last = held[0][0] + WARM, held[-1][0]
    if last - first < LONG:
        return None

    def median(begin: float, end: float) -> float:
        return statistics.median(size for at, size in held if begin <= (at - first) / (last - first) <= end)

    return median(2 / 3, 1.0) / median(0.0, 1 / 3) - 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    known = {"default": "gpt", "choices": ["gpt", "llama"], "help": "whose nano size is trained"}
    main("soak", __doc__ or "", COLUMNS, rows, devices=1, options={"model": known})
