"""Stages cut over tables: the instance that Piper's authors have published, BERT-32 on A100s, and the optima of it.

A stage has ``t`` devices that share a layer and ``d`` such groups that take micro-batches in turn. Some of its layers are
computed again: those that this costs least, as many as memory asks for. What a stage sends and receives is a part of its
time. ``value`` is the relative distance from the optimum, or 1 where one of the two finds nothing.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Row, main
from jscaler.plan_search.stages.cutter import Chain, Choice

COLUMNS = ("memory_gib", "devices", "stages", "per_sample", "optimum", "value", "bound", "seconds")
FILE = Path(__file__).parent / "piper_bert32.json"
MICROBATCHES, BANDWIDTH, GIB = 1920, 25.0 * 2**30, 2.0**30
SHARING = (1, 2, 4, 8)  # devices that share a layer
NEAR = 1e-6


@dataclasses.dataclass(frozen=True)
class Optimum:
    """Seconds for a micro-batch and the number of stages; None where nothing fits."""

    gib: int
    devices: int
    seconds: float | None
    stages: int = 0

    def __str__(self) -> str:
        return f"{self.gib} GiB on {self.devices}"


OPTIMA = (
    Optimum(1, 8, None),
    Optimum(2, 32, 0.0665495, 20),
    Optimum(8, 32, 0.04151545, 14),
    Optimum(80, 128, 0.0080532429, 1),
)


@functools.cache
def instance() -> dict[str, Any]:
    """The layers: for each number of sharing devices, as it is and computed again, seconds, bytes of weights, bytes for
    each micro-batch under way, and other bytes; the edges: between which layers, bytes, and what sharing adds."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def ranges(rows: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(rows)])
    return sums[None, :] - sums[:, None]


def sent(sharing: int) -> np.ndarray:
    """Bytes that cross the ends of each range."""
    edges, count = instance()["edges"], len(instance()["layers"])
    start, stop = np.indices((count + 1, count + 1))
    total = np.zeros((count + 1, count + 1))
    for source, target, nbytes, forward, backward in edges:
        has_source, has_target = ((start <= node) & (node < stop) for node in (source, target))
        total += 2.0 * (nbytes + forward[sharing]) * (has_target & ~has_source)
        total += 2.0 * (nbytes + backward[sharing]) * (has_source & ~has_target)
    return total


def again(rows: np.ndarray, most: int) -> np.ndarray:
    """For 0 to ``most`` layers of each range that are computed again, those of least extra seconds: which these are."""
    count = len(rows)
    extra = rows[:, 1, 0] - rows[:, 0, 0]
    found = np.zeros((most + 1, count + 1, count + 1, count), bool)
    for start in range(count):
        for stop in range(start + 1, count + 1):
            own = [n for n in range(start, stop) if rows[n, 0, 2] > 2 * rows[n, 1, 2]]
            for taken, number in enumerate(sorted(own, key=lambda n: extra[n])):
                found[taken + 1 :, start, stop, number] = True
    return found


def bert(case: Optimum) -> Chain:
    """The instance on so many devices of so much memory."""
    table = np.array(instance()["layers"], float)  # layer, sharing, again, what
    choices = []
    for place, sharing in enumerate(SHARING):
        rows = table[:, place]
        seconds, weights, kept, held = (ranges(rows[:, 0, what]) for what in range(4))
        change = again(rows, len(rows)) @ (rows[:, 1] - rows[:, 0])  # how many, range, what
        for copies in (d for d in range(1, case.devices // sharing + 1) if MICROBATCHES % d == 0):
            once = 4 * (copies - 1) * weights / copies / MICROBATCHES / BANDWIDTH
            fixed = (sent(place) / BANDWIDTH + seconds) / copies + once
            none, last = np.zeros_like(fixed), fixed - 1.0
            for own in change:
                taken = fixed + own[..., 0] / copies
                if (taken != last).any():
                    held_by, kept_by = held + own[..., 3], kept + own[..., 2]
                    choices.append(Choice(sharing * copies, taken, none, none, held_by, kept_by, copies))
                last = taken
    under_way = range(1, case.devices + 1)
    return Chain(len(table), case.devices, choices, 2, under_way, {}, case.gib * GIB)


def rows(quick: bool) -> Iterator[Row]:
    for case in OPTIMA[: 3 if quick else None]:
        chain, begun = bert(case), time.perf_counter()
        found = chain.slowest_stage()
        taken = time.perf_counter() - begun
        same = (found is None) == (case.seconds is None)
        value = abs(found.seconds / case.seconds - 1) if found is not None and case.seconds is not None else float(not same)
        yield {
            "memory_gib": case.gib, "devices": case.devices, "stages": 0 if found is None else len(found.stages),
            "per_sample": math.inf if found is None else found.seconds, "optimum": case.seconds or math.inf,
            "value": value, "bound": NEAR, "seconds": taken,
        }  # fmt: skip


if __name__ == "__main__":
    main("piper", __doc__ or "", COLUMNS, rows)
