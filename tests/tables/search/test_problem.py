"""What a problem refuses, its rows and ticks, and the tables of other kinds of blocks."""

import dataclasses
from fractions import Fraction

import pytest

from jscaler.errors import OrderError, PlanError, UnknownNameError
from jscaler.tables import Table, schedule_named
from jscaler.tables.search import Edge, Problem, SearchBlock, StageCosts, chain_problem, tessel_problem, unit_costs
from jscaler.tables.search.activities import model_of
from jscaler.tables.search.incumbents import in_kinds_of
from jscaler.tables.search.least_memory import least_memory_of
from jscaler.tables.search.replay import replay
from jscaler.tables.search.ticks import common_unit, in_ticks
from jscaler.tables.simulator import most_activations, simulate_table

F, B = SearchBlock(0, "F", (0,), 1.0, held=1), SearchBlock(0, "B", (0,), 2.0, freed=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": ()}, "ours has no blocks"),
        ({"microbatches": 0}, "ours: microbatches is a positive whole number, not 0"),
        ({"lanes": ((F, F),)}, "ours: lane 0 has block '0F' twice"),
        ({"lanes": ((F, B), (F,))}, "lane 1 has 1 blocks, and lane 0 has 2"),
        ({"lanes": ((F, B), (B, F))}, "lanes differ in devices only"),
        ({"edges": (Edge(0, 1), Edge(1, 0))}, "the edges form a circle"),
        ({"edges": (Edge(0, 2),)}, "an edge goes from block 0 to 2, and there are 2 blocks"),
        ({"edges": (Edge(0, 1, -1.0),)}, "the hop from block 0 to 1 is a number from 0, not -1.0"),
        ({"memory": (1, 2)}, "ours has 1 devices and 2 memory limits"),
        ({"lanes": ((dataclasses.replace(F, seconds=-1.0), B),)}, "seconds of block '0F' is a number from 0, not -1.0"),
        ({"lanes": ((dataclasses.replace(F, devices=()), B),)}, "the devices of block '0F' are different whole numbers"),
        ({"lanes": ((dataclasses.replace(F, kind="Z"), B),)}, "the kind of block '0Z' is one of F, R, B, I, W, not 'Z'"),
    ],
)
def test_what_is_no_problem(change: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(Problem("ours", ((F, B),), (Edge(0, 1),), 2), **change)


def test_what_is_freed_was_held() -> None:
    for change, message in (({"freed": 2}, "frees 2 bytes on device 0"), ({"freed": 0.5}, "0.5 bytes are never freed")):
        problem = Problem("ours", ((F, dataclasses.replace(B, **change)),), (Edge(0, 1),), 2)
        with pytest.raises(PlanError, match=message):
            model_of(problem)


def test_what_is_no_chain() -> None:
    with pytest.raises(PlanError, match="2 stages lie at"):
        chain_problem([unit_costs()] * 2, [0], 4)
    with pytest.raises(PlanError, match="stage 0 has F, and B or I and W"):
        chain_problem([StageCosts({"B": 1.0})], [0], 4)
    with pytest.raises(PlanError, match="an even number of devices, not 3"):
        tessel_problem("V", 3)
    with pytest.raises(UnknownNameError, match="shape"):
        tessel_problem("Y")


def test_rows_begin_with_their_first_stages() -> None:
    assert chain_problem([unit_costs()] * 4, [1, 0, 0, 1], 2).rows == ((1,), (0,))
    assert tessel_problem("mllm", 2).rows == ((0, 1), (0,), (1,))
    assert tessel_problem("X", 4).rows == ((0,), (1,), (2,), (3,))
    assert tessel_problem("K", 4).rows == ((0,), (1,), (2,), (3,), (0, 1, 2, 3))


def test_ticks() -> None:
    assert common_unit([0.1, 0.25], 100) == Fraction(1, 20)
    assert common_unit([], 100) == 1
    assert common_unit([1e-6, 1.0], 100) is None
    costs = [StageCosts({"F": 1.2345678901, "B": 2.718281828459045}, {"F": 1}, {"B": 1})]
    rounded = in_ticks(chain_problem(costs, [0], 2))
    assert not rounded.exact
    for block, seconds in zip(rounded.problem.lanes[0], costs[0].seconds.values(), strict=True):
        assert seconds * (1 - 1e-3) < rounded.seconds(block.seconds) <= seconds


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved", "zb_v", "dualpipe_v", "1f1b+R"])
def test_replays_are_the_simulator_s(name: str) -> None:
    """Seconds and activations of published tables, with hops, under the blocks that these have."""
    schedule = schedule_named(name)
    assert schedule is not None
    chunks = schedule.chunks or 2 if name != "interleaved" else 2
    table = schedule.table(4, 8, chunks)
    kinds = ("F", "I", "W") if name in ("zb_h1", "zb_h2", "zb_v", "dualpipe_v") else ("F", "B")
    problem = chain_problem([unit_costs(kinds)] * 4 * chunks, schedule.lies(4, chunks), 8, hop=0.5)
    if name.endswith("R"):
        with_r = StageCosts({"F": 1, "R": 1, "B": 2}, {"F": 1}, {"B": 1})
        problem = chain_problem([with_r] * 3 + [unit_costs(kinds)], range(4), 8, hop=0.5)
    own = in_kinds_of(problem, table)
    found = replay(problem, own)
    assert found.seconds == simulate_table(own, hop=0.5).makespan
    if "R" not in name:
        assert list(found.peaks) == [most_activations(row) for row in own.rows]


def test_a_replay_of_overlapped_entries() -> None:
    """They run as one: in their order, and for as long as both."""
    problem = chain_problem([unit_costs(("F", "B"))] * 2, range(2), 2)
    assert replay(problem, Table.parse("0F0 (0F1;0B0) 0B1\n1F0 1B0 1F1 1B1")).seconds == 12
    with pytest.raises(OrderError, match="in front of 1F0"):
        replay(problem, Table.parse("0F0 0F1 0B0 0B1\n(1B0;1F0) 1F1 1B1"))


def test_tables_in_the_kinds_of_a_problem() -> None:
    whole = chain_problem([unit_costs(("F", "B"))], [0], 2)
    assert str(in_kinds_of(whole, Table.parse("0F0 0R0 0I0 0F1 0I1 0W0 0W1"))) == "0F0 0B0 0F1 0B1"
    again = chain_problem([StageCosts({"F": 1, "R": 1, "I": 1, "W": 1})], [0], 1)
    assert str(in_kinds_of(again, Table.parse("0F0 0B0"))) == "0F0 0R0 0I0 0W0"
    assert str(in_kinds_of(again, Table.parse("0F0 0R0 0B0"))) == "0F0 0R0 0I0 0W0"


def test_the_least_memory_of_a_device() -> None:
    problem = tessel_problem("K", 4)
    assert [least_memory_of(problem, device) for device in range(4)] == [1, 1, 1, 1]
