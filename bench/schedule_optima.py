"""Optima of the schedule search beside their golden values: rows of `bench.schedules`.

Nothing of a published schedule goes in: the solver finds and proves each value by itself. Tessel's shapes have forward 1,
backward 3 and blocks of all devices 1; memory is in activations. (Lin et al., Tessel, HPCA 2024.) Steps have F = I = W = 1,
divided by the chunks of a device, and as many activations as devices; their golden values are the busiest one's work, with
the least before its first block and behind its last.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.harness import Row
from jscaler.tables.published import in_a_v, one_each
from jscaler.tables.search import chain_problem, tessel_problem, unit_costs
from jscaler.tables.search.activities import Model, model_of
from jscaler.tables.search.finite import solve_finite
from jscaler.tables.search.lower_bound import least_makespan
from jscaler.tables.search.neighbourhood import improve, makespan_of
from jscaler.tables.search.period import Periodic, least_latency, least_memory, least_period
from jscaler.tables.search.starts import repeated
from jscaler.tables.search.ticks import InTicks, in_ticks

LIMIT = 120.0  # deterministic seconds of a row


@dataclass(frozen=True)
class Shape:
    """The least period of one of Tessel's shapes, the least memory at that, and the least latency at both."""

    shape: str
    devices: int
    period: int
    memory: int
    latency: int
    quick: bool = False


@dataclass(frozen=True)
class Step:
    """The least makespan of a step, by the exact model or by windows of a periodic schedule."""

    method: str
    devices: int
    microbatches: int
    chunks: int
    makespan: float
    quick: bool = False


SHAPES = [
    Shape("V", 4, 4, 4, 16, quick=True),
    Shape("X", 4, 8, 4, 20, quick=True),
    Shape("M", 4, 6, 5, 36, quick=True),
    Shape("NN", 4, 8, 6, 46, quick=True),
    Shape("K", 4, 6, 3, 16, quick=True),
    Shape("mllm", 4, 8, 6, 46, quick=True),
    Shape("V", 8, 4, 8, 32),
    Shape("X", 8, 8, 6, 40),
    Shape("M", 8, 6, 11, 72),
    Shape("NN", 8, 8, 12, 94),
    Shape("K", 8, 6, 6, 34),
    Shape("mllm", 8, 8, 12, 94),
]
STEPS = [
    Step("exact", 4, 8, 1, 27, quick=True),
    Step("exact", 4, 16, 1, 51, quick=True),
    Step("exact", 8, 16, 1, 55),
    Step("exact", 4, 4, 2, 13.5, quick=True),
    Step("exact", 4, 8, 2, 25.5),
    Step("exact", 4, 16, 2, 49.5),
    Step("exact", 8, 16, 2, 51.5),
    Step("windows", 4, 8, 1, 27, quick=True),
    Step("windows", 8, 16, 1, 55),
    Step("windows", 4, 8, 2, 25.5),
    Step("windows", 4, 16, 2, 49.5),
    Step("windows", 8, 16, 2, 51.5),
]


def optima_rows(quick: bool) -> Iterator[Row]:
    """A row for each value that is searched."""
    for shape in SHAPES:
        if shape.quick or not quick:
            yield from shape_rows(shape)
    for step in STEPS:
        if step.quick or not quick:
            yield step_row(step)


def shape_rows(shape: Shape) -> Iterator[Row]:
    """Period, memory and latency, each with its proof; the solver's values, not the golden ones, are the next limits."""
    model = model_of(in_ticks(tessel_problem(shape.shape, shape.devices)).problem)
    began = time.perf_counter()
    period = least_period(model, LIMIT)
    yield _shape_row(shape, "period", period, shape.period, began)
    began = time.perf_counter()
    memory = least_memory(model, period.period, LIMIT) if period else None
    yield _shape_row(shape, "least memory", memory, shape.memory, began)
    began = time.perf_counter()
    latency = least_latency(model, memory.period, memory.value, LIMIT) if memory else None
    yield _shape_row(shape, "least latency", latency, shape.latency, began)


def _shape_row(shape: Shape, measure: str, found: Periodic | None, golden: int, began: float) -> Row:
    value, proved = (found.value, found.proved) if found else (None, False)
    return _row(f"searched {shape.shape}", shape.devices, None, None, measure, value, golden, proved, began)


def step_row(step: Step) -> Row:
    """A step's makespan; it is proved where it is the lower bound."""
    lies = (one_each if step.chunks == 1 else in_a_v)(step.devices, step.chunks)
    costs = [unit_costs(chunks=step.chunks)] * len(lies)
    ticks = in_ticks(chain_problem(costs, lies, step.microbatches, memory=step.devices))
    began = time.perf_counter()
    model = model_of(ticks.problem)
    bound = least_makespan(model)
    value = exact(model, bound, ticks) if step.method == "exact" else windows(model, bound, ticks)
    proved = value == ticks.seconds(bound)
    name = f"searched, {step.method}"
    return _row(name, step.devices, step.microbatches, step.chunks, "makespan", value, step.makespan, proved, began)


def exact(model: Model, bound: int, ticks: InTicks) -> float | None:
    """By one model of all blocks, which may take no longer than the bound."""
    found = solve_finite(model, bound, bound, LIMIT)
    return ticks.seconds(makespan_of(model, found.starts)) if found.starts else None


def windows(model: Model, bound: int, ticks: InTicks) -> float | None:
    """From the periodic schedule, window by window."""
    period = least_period(model, LIMIT)
    starts, _ = improve(model, repeated(model, period), bound, LIMIT) if period else (None, 0.0)
    return ticks.seconds(makespan_of(model, starts)) if starts else None


def _row(
    name: str,
    stages: int,
    microbatches: int | None,
    chunks: int | None,
    measure: str,
    value: float | None,
    golden: float,
    proved: bool,
    began: float,
) -> Row:
    right = value == golden and proved
    return {
        "schedule": name, "stages": stages, "microbatches": microbatches or "", "chunks": chunks or "", "measure": measure,
        "makespan": value, "golden": golden, "proved": proved, "took": round(time.perf_counter() - began, 2),
        "right": right,
        "wrong": int(not right), "bounds": {"wrong": 0},
    }  # fmt: skip
