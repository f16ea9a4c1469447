"""What a search says of a constraint, an argument or a decision is what a search without it finds."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import jscaler
from bench.search_reasons import checked
from bench.small_step import arguments, train_step
from jscaler import spaces as s
from jscaler.clusters import find_cluster
from jscaler.plan_search.engine import search_graph
from jscaler.plan_search.found import Reason

CLUSTER = find_cluster("4xV100-32GB")
MEGATRON = s.Space("megatron", tp=s.divisors_of_devices(most=1), dp=s.rest_of_devices("tp"), zero=s.in_order(1, 3))


def rows(graph: Any, devices: Any) -> None:
    """The batch over all devices; anything may run again."""
    for op in graph.forward():
        graph.op_trans(op, s.any_split(dims="batch", copies="needed"))
        graph.recompute(op, s.maybe())


def unlike(graph: Any, devices: Any) -> None:
    """No axis splits the units of both products."""
    s.per_op(graph, devices)
    graph.op_assign("params/dot*", s.apart("units"))


APART = "op_assign('params/dot', 'params/dot.1', apart(dims=('units',)))"
LIMIT = "tp=divisors_of_devices(most=1)"
SPACES: dict[str, tuple[list[Any], float | None, set[str]]] = {  # a space, a part of the memory, what reasons are of
    "a program": ([s.OpenSpace(s.per_op, mesh=(2, 2), microbatches=[1])], 0.9, {"memory", "ZeRO", "'params/dot'"}),
    "what runs again": ([s.OpenSpace(rows, mesh=(4,), microbatches=[1])], 0.85, {"memory", "computed again"}),
    "between ops": (
        [s.OpenSpace(unlike, mesh=(2, 2), microbatches=[1])],
        0.8,
        {APART, "memory"},
    ),
    "arguments": (
        [MEGATRON, s.Space("recompute_layers", plan=MEGATRON)],
        None,
        {LIMIT, "zero="},
    ),
}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("case", SPACES)
def test_reasons_are_what_another_search_finds(case: str) -> None:
    spaces, part, wanted = SPACES[case]
    rows_of_batch, memory = 4096 if case == "what runs again" else 16, None
    graph = jscaler.parallelize("single", devices=1)(train_step).graph(*arguments(rows_of_batch))
    if part is not None:
        free = search_graph(graph, CLUSTER, [spaces])
        assert free.chosen is not None
        memory = part * free.chosen.peak
    found = search_graph(graph, CLUSTER, [spaces], seconds=300.0, memory=memory)
    told = [reason.what for reason in found.why]
    assert all(any(one in what for what in told) for one in wanted), told
    assert all(reason.by == "cost" for reason in found.why)
    for reason, said, seconds in itertools.islice(checked(graph, CLUSTER, spaces, memory, found), 4):
        assert said == pytest.approx(seconds, rel=0.01), reason


def test_a_reason_in_words() -> None:
    def said(*reasons: Reason) -> Sequence[str]:
        return [*map(str, reasons)]

    assert said(
        Reason("units of 'mlp/up' over x1", "batch", 1.2e-3, 2**30), Reason("tp=4", "zero1", 1.0, 2**30, "tables"),
        Reason("'attention' computed again", "", float("inf"), 2**30), Reason("memory=1.0 GiB", "zero1", -1.0, 2**31),
    ) == [
        "units of 'mlp/up' over x1: 1.2 ms less than batch, which has 1.0 GiB",
        "tp=4: 1 s less than zero1, which has 1.0 GiB, by tables",
        "'attention' computed again: nothing else fits",
        "memory=1.0 GiB binds: without it zero1 takes 1 s less, with 2.0 GiB",
    ]  # fmt: skip
    assert Reason("x", "", float("inf"), 1.0).as_json()["seconds"] is None
