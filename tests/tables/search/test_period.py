"""Periods, memory and latency of periodic schedules, against Tessel's values and by unrolling."""

import itertools

import pytest

from jscaler.tables.search import tessel_problem
from jscaler.tables.search.activities import Model, model_of
from jscaler.tables.search.period import Periodic, least_latency, least_memory, least_period
from jscaler.tables.search.replay import replay
from jscaler.tables.search.starts import repeated, table_of
from jscaler.tables.search.ticks import in_ticks

GOLDEN = {"V": (4, 4, 16), "X": (8, 4, 20), "M": (6, 5, 36), "NN": (8, 6, 46), "K": (6, 3, 16), "mllm": (8, 6, 46)}


def model(shape: str, devices: int, memory: float | None = None) -> Model:
    return model_of(in_ticks(tessel_problem(shape, devices, memory=memory)).problem)


@pytest.mark.parametrize("shape", GOLDEN)
def test_golden_values_on_four_devices(shape: str) -> None:
    period, memory, latency = GOLDEN[shape]
    found = least_period(model(shape, 4), 10)
    assert found is not None
    assert (found.value, found.bound) == (period, period)
    fullest = least_memory(model(shape, 4), period, 10)
    assert fullest is not None
    assert (fullest.value, fullest.bound) == (memory, memory)
    shortest = least_latency(model(shape, 4), period, memory, 10)
    assert shortest is not None
    assert (shortest.value, shortest.bound) == (latency, latency)
    check(model(shape, 4), shortest, memory)


@pytest.mark.parametrize("shape", GOLDEN)
def test_zero_bubble_on_eight_devices(shape: str) -> None:
    found = least_period(model(shape, 8), 10)
    assert found is not None
    assert found.proved
    assert found.value == GOLDEN[shape][0]


@pytest.mark.parametrize("memory", [4, 3, 2, 1])
def test_less_memory_takes_a_longer_period(memory: int) -> None:
    found = least_period(model("V", 4, memory), 10)
    period = next(period for period in itertools.count(4) if v_exists(period, memory))
    assert found is not None
    assert (found.value, found.bound) == (period, period)
    check(model("V", 4), found, memory)


def v_exists(period: int, memory: int) -> bool:
    """Whether V on four devices has a periodic schedule: by trying how long each block waits for its turn.

    The first forward waits for nothing, and its backward ends before the memory is needed again.
    """
    seconds = [1, 1, 1, 1, 3, 3, 3, 3]
    for delays in itertools.product(range(memory * period - 16 + 1), repeat=7):
        if sum(delays) > memory * period - 16:
            continue
        starts = [sum(seconds[:n]) + sum(delays[:n]) for n in range(8)]
        pairs = [(starts[device], starts[7 - device]) for device in range(4)]
        apart = all((backward - forward) % period in range(1, period - 2) for forward, backward in pairs)
        if apart and all(-(-(backward + 3 - forward) // period) <= memory for forward, backward in pairs):
            return True
    return False


def test_no_memory_has_no_period() -> None:
    assert least_period(model("V", 4, 0.5), 10) is None


def check(model: Model, found: Periodic, memory: int) -> None:
    """Unrolled, a device runs one activity at a time, each behind those that it waits for, and holds no more."""
    rounds = 12
    runs = [
        (start + j * found.period, lane.activities[n], number, n)
        for j in range(rounds)
        for number, (lane, starts) in enumerate(zip(model.lanes, found.starts, strict=True))
        for n, start in enumerate(starts)
    ]
    for lane, starts in zip(model.lanes, found.starts, strict=True):
        assert all(starts[i] + lane.activities[i].ticks <= starts[j] for i, j in lane.edges)
    for device in range(len(model.limits)):
        own = sorted((run for run in runs if device in run[1].resources), key=lambda run: run[0])
        assert all(one[0] + one[1].ticks <= other[0] for one, other in itertools.pairwise(own))
        live = most = 0
        for _, _, lane, n in own:
            live += sum(one.units for one in model.lanes[lane].lifetimes if one.device == device and one.first == n)
            most = max(most, live)
            live -= sum(one.units for one in model.lanes[lane].lifetimes if one.device == device and one.last == n)
        assert most <= memory


def test_a_repeated_schedule_as_a_table() -> None:
    problem = tessel_problem("V", 4, 10)
    found = least_period(model_of(problem), 5)
    assert found is not None
    ran = replay(problem, table_of(problem, repeated(model_of(problem), found)))
    assert ran.seconds <= 9 * 4 + max(starts[n] + 3 for starts in found.starts for n in range(8))
