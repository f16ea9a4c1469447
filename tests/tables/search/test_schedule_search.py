"""`search_schedule` against brute force, published schedules and an independent replay of memory."""

import builtins
import dataclasses
import random
from typing import Any

import pytest
from brute_force import least_makespan_by_trying
from random_problems import random_chain

from jscaler.errors import JscalerError, PlanError
from jscaler.tables import SCHEDULES, Table
from jscaler.tables.legal import chain_waits, in_order
from jscaler.tables.published import in_a_v
from jscaler.tables.search import Problem, StageCosts, chain_problem, search_schedule, tessel_problem, unit_costs
from jscaler.tables.search.incumbents import from_catalogue
from jscaler.tables.search.replay import check_table
from jscaler.tables.simulator import simulate_table


def peaks_by_hand(problem: Problem, table: Table) -> list[float]:
    """The most that each device holds; rows share no devices."""
    blocks, found = dict(problem.cells()), [0.0] * problem.devices
    for devices, row in zip(problem.rows, table.rows, strict=True):
        live = 0.0
        for cell in row:
            live += blocks[cell].held  # type: ignore[index]
            for device in devices:
                found[device] = max(found[device], live)
            live -= blocks[cell].freed  # type: ignore[index]
    return found


@pytest.mark.parametrize("seed", range(30))
def test_small_problems_against_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 3)
    problem = random_chain(draw, stages, draw.randint(1, 3), draw.randint(1, 3 if stages < 3 else 2))
    least = least_makespan_by_trying(problem)
    if least is None:
        with pytest.raises(PlanError, match=r"memory|may hold"):
            search_schedule(problem, 10)
        return
    found = search_schedule(problem, 10)
    assert found.seconds == found.bound == least
    assert found.proved
    check_table(problem, found.table)
    in_order(found.table.rows, chain_waits(found.table))
    assert list(found.peaks) == peaks_by_hand(problem, found.table)
    assert all(limit is None or peak <= limit for peak, limit in zip(found.peaks, problem.memory or (), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_bounds_with_hops_are_below_brute_force(seed: int) -> None:
    """Brute force takes hops as delays; links make a step longer at most."""
    draw = random.Random(100 + seed)
    problem = dataclasses.replace(random_chain(draw, 3, 3, 2, hop=draw.choice([0.5, 2.0])), memory=None)
    found = search_schedule(problem, 10)
    least = least_makespan_by_trying(problem)
    assert least is not None
    assert least <= found.seconds
    assert found.bound <= found.seconds


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_a_published_schedule(seed: int) -> None:
    """Of uneven stages whose seconds are multiples of no unit, with little time."""
    draw = random.Random(seed)
    costs = [
        StageCosts({"F": draw.uniform(1, 2), "I": draw.uniform(1, 2), "W": draw.uniform(0.5, 1)}, {"F": 1}, {"W": 1})
        for _ in range(4)
    ]
    lies = [*range(4)] if seed % 2 else in_a_v(2, 2)
    problem = chain_problem(costs, lies, 6, hop=0.01, memory=5)
    published = [one.found.seconds for one in from_catalogue(problem)]
    assert published
    found = search_schedule(problem, 0.5)
    assert found.bound <= found.seconds <= min(published)
    assert max(peaks_by_hand(problem, found.table)) <= 5


def test_the_step_time_is_the_simulator_s() -> None:
    problem = chain_problem([unit_costs()] * 4, range(4), 6, hop=0.25, memory=4)
    found = search_schedule(problem, 2)
    assert found.seconds == simulate_table(found.table, hop=0.25).makespan


@pytest.mark.parametrize(("devices", "microbatches", "seconds"), [(4, 8, 27), (4, 16, 51), (8, 16, 55)])
def test_one_chunk_on_each_device(devices: int, microbatches: int, seconds: float) -> None:
    found = search_schedule(chain_problem([unit_costs()] * devices, range(devices), microbatches, memory=devices), 5)
    assert (found.seconds, found.bound, found.proved, found.source) == (seconds, seconds, True, "zb_h1")


@pytest.mark.parametrize(("microbatches", "seconds"), [(4, 13.5), (8, 25.5)])
def test_two_chunks_in_a_v(microbatches: int, seconds: float) -> None:
    found = search_schedule(chain_problem([unit_costs(chunks=2)] * 8, in_a_v(4, 2), microbatches, memory=4), 10)
    assert (found.seconds, found.bound, found.proved) == (seconds, seconds, True)


def test_two_directions() -> None:
    """Not longer than Chimera; even and odd micro-batches lie on other devices."""
    problem = chain_problem([unit_costs(("F", "B"))] * 4, range(4), 4, turned=range(4)[::-1], memory=4)
    found = search_schedule(problem, 2)
    assert found.seconds <= simulate_table(SCHEDULES["chimera"].table(4, 4)).makespan == 16
    check_table(problem, found.table)


def test_rows_that_share_devices() -> None:
    problem = tessel_problem("M", 2, 4, memory=3)
    found = search_schedule(problem, 2)
    waits = chain_waits(found.table)
    assert problem.rows == ((0, 1), (0,), (1,))
    seconds = simulate_table_of(problem, found.table)
    assert found.seconds == seconds
    assert found.bound <= found.seconds
    assert len(waits) == len(list(problem.cells()))
    assert max(found.peaks) <= 3


def simulate_table_of(problem: Problem, table: Table) -> float:
    """By the simulator's own chain of stages, with the seconds of each block."""
    from jscaler.tables.simulator import turn_tasks, turns_of
    from jscaler.tables.tasks import times_of

    blocks = dict(problem.cells())
    tasks, _ = turn_tasks(
        turns_of(table, problem.rows), lambda cell: blocks[cell].seconds, lambda first, second: 0.0, problem.rows
    )
    return max(end for _, end in times_of(tasks))


def test_equal_inputs_give_equal_results() -> None:
    costs = [StageCosts({"F": 1.03, "I": 1.31, "W": 0.77}, {"F": 3}, {"W": 3}) for _ in range(3)]
    problem = chain_problem(costs, range(3), 5, memory=9)
    assert search_schedule(problem, 0.5, seed=3) == search_schedule(problem, 0.5, seed=3)


def test_a_given_incumbent_counts() -> None:
    problem = chain_problem([unit_costs()] * 2, range(2), 3, memory=2)
    own = search_schedule(problem, 2)
    again = search_schedule(problem, 2, incumbents=[own.table])
    assert (again.seconds, again.source) == (own.seconds, "incumbent 0")
    with pytest.raises(PlanError, match="row 0 of the table, that of devices 0, lacks"):
        search_schedule(problem, 2, incumbents=[Table.parse("0F0\n1F0")])


def test_memory_that_is_too_small() -> None:
    problem = chain_problem([unit_costs(chunks=2)] * 4, in_a_v(2, 2), 4, memory=[0.5, 2])
    with pytest.raises(PlanError, match=r"chain: device 0 may hold 0.5 \(0 B\), and one micro-batch at a time needs 1 "):
        search_schedule(problem)


def test_no_time_is_no_proof() -> None:
    costs = [StageCosts({"F": 1.0 + n / 7, "I": 1.3, "W": 0.6}, {"F": 2}, {"W": 2}) for n in range(4)]
    found = search_schedule(chain_problem(costs, range(4), 8, memory=5), 0.01)
    assert not found.proved
    assert found.gap == found.seconds / found.bound - 1 > 1e-3
    assert "above the least" in str(found)


def test_without_or_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(JscalerError, match=r'pip install "jscaler\[search\]"'):
        search_schedule(tessel_problem("V"))
