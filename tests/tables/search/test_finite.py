"""The exact model, windows and lower bounds, without published schedules to set out from."""

import pytest

from jscaler.tables.published import in_a_v
from jscaler.tables.search import Problem, chain_problem, unit_costs
from jscaler.tables.search.activities import Model, model_of
from jscaler.tables.search.finite import solve_finite
from jscaler.tables.search.lower_bound import least_makespan
from jscaler.tables.search.neighbourhood import improve, makespan_of
from jscaler.tables.search.period import least_period
from jscaler.tables.search.replay import fits, replay
from jscaler.tables.search.starts import repeated, sorted_starts, starts_of, table_of
from jscaler.tables.search.ticks import in_ticks


def one_chunk(devices: int, microbatches: int, memory: float) -> Problem:
    return chain_problem([unit_costs()] * devices, range(devices), microbatches, memory=memory)


def v(devices: int, microbatches: int) -> Problem:
    return chain_problem([unit_costs(chunks=2)] * 2 * devices, in_a_v(devices, 2), microbatches, memory=devices)


def solver_s(problem: Problem) -> Model:
    return model_of(in_ticks(problem).problem)


@pytest.mark.parametrize(
    ("problem", "ticks"), [(one_chunk(4, 8, 4), 27), (one_chunk(4, 16, 4), 51), (v(4, 4), 27)], ids=["4x8", "4x16", "V"]
)
def test_the_exact_model_reaches_the_bound(problem: Problem, ticks: int) -> None:
    model = solver_s(problem)
    bound = least_makespan(model)
    found = solve_finite(model, bound, bound, 20)
    assert bound == ticks
    assert found.starts is not None
    ran = replay(in_ticks(problem).problem, table_of(problem, found.starts))
    assert ran.seconds == ticks
    assert fits(problem, ran)


def test_a_makespan_above_the_bound_is_proved() -> None:
    """Two micro-batches at once on two devices: one of two waits for memory."""
    model = solver_s(one_chunk(2, 4, 1))
    found = solve_finite(model, 100, least_makespan(model), 10)
    assert found.starts is not None
    assert makespan_of(model, found.starts) == found.bound
    assert solve_finite(model, found.bound - 1, least_makespan(model), 10).bound == found.bound


def test_windows_lead_from_a_period_to_the_optimum() -> None:
    model = solver_s(one_chunk(4, 12, 4))
    period = least_period(model, 5)
    assert period is not None
    first = repeated(model, period)
    starts, _ = improve(model, first, least_makespan(model), 5)
    assert makespan_of(model, starts) == least_makespan(model) == 39 < makespan_of(model, first)


def test_starts_and_tables_are_the_same() -> None:
    problem = chain_problem([unit_costs()] * 3, range(3), 5, hop=1.0, memory=3)
    model = solver_s(problem)
    found = solve_finite(model, 100, least_makespan(model), 1)
    assert found.starts is not None
    table = table_of(problem, found.starts)
    again = starts_of(problem, model, replay(problem, table))
    assert table_of(problem, again) == table
    assert again == sorted_starts(model, again)
    assert len(again) == len(found.starts)
