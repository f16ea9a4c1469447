"""Time axes become loops: which ops stand in which loop, what the loops carry, cut and stack."""

from collections.abc import Iterable
from typing import Any

import pytest
from plans.plan_steps import gpt, gpt_nnx, planned

from jscaler import TimeSplit
from jscaler.ir import Graph
from jscaler.plans import accumulate, co_shard

ATTENTION = "block_0/attn/query/dot", "block_0/attn/exp", "block_0/attn/out/dot"
MLP = "block_0/mlp/up/dot", "block_0/mlp/tanh", "block_0/mlp/down/dot"
LOSS = "embed.attend/dot", "loss/gather", "loss/div"


def backward(paths: Iterable[str]) -> list[str]:
    return [f"{path}@backward" for path in paths]


def axes_around(graph: Graph, path: str) -> list[str]:
    """The loops around an op, outermost first: of time axes their names, of layers ``layers``."""
    found, name = [], graph[path].loop
    while name is not None:
        found.insert(0, name.split("@")[0] if "@" in name and not name.startswith("scan") else "layers")
        name = graph.loops[name].parent
    return found


def same_loop(graph: Graph, paths: Iterable[str]) -> bool:
    return len({graph[path].loop for path in paths}) == 1


@pytest.mark.smoke
def test_a_micro_batch_runs_forward_and_backward_in_one_loop() -> None:
    graph = planned(accumulate(2), gpt(), 1).graph
    everything = [*ATTENTION, *MLP, *LOSS]
    (loop,) = graph.loops.values()
    assert same_loop(graph, [*everything, *backward(ATTENTION), *backward(MLP)])
    assert (loop.length, loop.ys) == (2, ())  # nothing is stacked up: gradients and the loss are sums
    assert {c.is_sum for c in loop.carries} == {True}
    parameters = {t for call in graph.calls for t in call.wrt}
    assert len(loop.carries) == len(parameters) + 1
    assert all(op.loop is None for op in graph.ops if op.kind == "update")


def test_the_parts_of_heads_units_and_tokens_are_loops_of_their_own() -> None:
    graph = planned(co_shard(2), gpt(), 1).graph
    for paths in (ATTENTION, MLP, [*LOSS, *backward(LOSS[:2])]):
        assert same_loop(graph, paths)
    assert {axes_around(graph, path)[0] for path in (*ATTENTION, *MLP)} == {"co_shard"}
    assert axes_around(graph, LOSS[0]) == ["tokens"]
    assert len({graph[group[0]].loop for group in (ATTENTION, MLP, LOSS)}) == 3
    for paths in (ATTENTION, MLP):  # once more in the iteration of the backward pass
        assert same_loop(graph, [*(f"{p}@again" for p in paths[:2]), *backward(paths)])
    assert axes_around(graph, "block_0/add") == []
    forward = graph.loops[str(graph[ATTENTION[0]].loop)]
    assert [(len(forward.carries), forward.ys)] == [(1, ())]  # the sum over the parts, and no part's scores


def test_without_recompute_the_parts_are_stacked_for_the_backward() -> None:
    graph = planned(co_shard(2, recompute=False, loss=False), gpt(), 1).graph
    assert not [op.path for op in graph.ops if op.again is not None]
    assert graph.loops[str(graph[ATTENTION[0]].loop)].ys
    assert same_loop(graph, backward(ATTENTION))
    assert axes_around(graph, LOSS[0]) == []


def test_co_shard_stands_in_the_loop_of_a_micro_batch() -> None:
    graph = planned(accumulate(2, co_shard(2)), gpt(), 1).graph
    for path in (*ATTENTION, *MLP, *backward(ATTENTION), *backward(MLP)):
        assert axes_around(graph, path) == ["microbatch", "co_shard"], path
    assert axes_around(graph, LOSS[0]) == ["microbatch", "tokens"]
    assert axes_around(graph, "block_0/add") == ["microbatch"]


@pytest.mark.one_day_in(2)
def test_co_shard_stands_in_the_loop_over_layers_and_that_in_a_micro_batch() -> None:
    graph = planned(accumulate(2, co_shard(2)), gpt(layers=2, stacked=True), 1).graph
    (scores,) = (op.path for op in graph.ops if op.path.endswith("attn/exp"))
    for path in (scores, f"{scores}@backward"):
        assert axes_around(graph, path) == ["microbatch", "layers", "co_shard"]


def test_a_model_in_nnx_has_the_same_loops() -> None:
    graph = planned(accumulate(2, co_shard(2)), gpt_nnx(), 1).graph
    chains = {tuple(axes_around(graph, op.path)) for op in graph.ops}
    assert chains == {(), ("microbatch",), ("microbatch", "co_shard"), ("microbatch", "tokens")}


def test_the_axis_that_the_plan_names_first_is_outermost() -> None:
    def policy(graph: Any, _: Any) -> None:
        rows, columns = graph.factor_of("batch/tokens", 0), graph.factor_of("batch/tokens", 1)
        for path in MLP:
            op = graph[path]
            graph.op_trans(op, TimeSplit(columns[op], 2, "columns"), TimeSplit(rows[op], 2, "rows"))

    graph = planned(policy, gpt(), 1).graph
    for path in MLP:
        assert axes_around(graph, path) == ["columns", "rows"]
    assert same_loop(graph, MLP)


def test_loops_over_layers_run_part_by_part_as_a_whole_or_not_at_all() -> None:
    """A loop whose backward needs it whole is not taken apart either."""

    def policy(graph: Any, _: Any) -> None:
        rows = graph.factor_of("batch/tokens", 0)
        for op in graph.ops:
            if op.kind == "forward" and op in rows and op.path.endswith(("mlp/up/dot", "mlp/tanh")):
                graph.op_trans(op, TimeSplit(rows[op], 2, "rows"))

    graph = planned(policy, gpt(layers=2, stacked=True), 1).graph
    for op in graph.ops:
        if op.path.endswith(("mlp/up/dot", "mlp/tanh")):
            assert axes_around(graph, op.path) == ["layers", "rows"]
