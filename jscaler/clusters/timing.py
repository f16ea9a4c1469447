"""Fair timing on a noisy machine: things are run in turn, and compared by the median of their ratios."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def seconds_of(fun: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call, its arrays ready."""
    start = time.perf_counter()
    jax.block_until_ready(fun())
    return time.perf_counter() - start


def interleaved(funs: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of each function in each round; the order alternates from round to round."""
    for fun in funs:
        jax.block_until_ready(fun())
    times: list[list[float]] = [[] for _ in funs]
    for round_ in range(rounds):
        order = range(len(funs)) if round_ % 2 == 0 else reversed(range(len(funs)))
        for i in order:
            times[i].append(seconds_of(funs[i]))
    return times


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The ratio of the medians of two interleaved series."""
    return statistics.median(numerator) / statistics.median(denominator)
