"""What holes leave open, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler.errors import PlanError, SplitError, UnknownNameError
from jscaler.ir import Graph
from jscaler.primitives import Replicate, Split, TimeSplit
from jscaler.spaces import Allowed, alpa, any_split, free, maybe, one_of, space_of
from tests.plans.plan_steps import gpt


def pair() -> Graph:
    """Two kernels, 12 rows."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"]) ** 2)

        value, grads = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {"up": jnp.zeros((8, 16)), "down": jnp.zeros((16, 8))}
    return jscaler.parallelize("single", devices=1)(step).graph(params, {"x": jnp.zeros((12, 8))})


GRAPH = pair()
DOT, DOWN = (op.path for op in GRAPH.forward() if "dot" in op.path)


def of(policy: Any, mesh: tuple[int, ...] = (2, 4), graph: Graph = GRAPH) -> Allowed:
    found = space_of(policy, graph, mesh)
    assert found is not None
    return found


def test_what_is_open() -> None:
    """Rows of the batch on one axis; on the other what divides, and is no row."""

    def policy(graph: Any, devices: Any) -> None:
        assert devices.shape == (2, 4)
        graph.op_trans(DOT, any_split(0, "batch", copies="needed"), any_split(1, never="batch"))
        graph.op_trans(DOWN, Split("a", 2), one_of(Split("b", 4), Replicate(4)))
        graph.shard("*/up", one_of(None, "zero3"))
        graph.recompute(DOT, maybe())

    space, rule = of(policy), GRAPH.rule(GRAPH[DOT])
    rows = GRAPH.factor_of("batch/x", 0)[GRAPH[DOT]]
    assert space.splits[DOT] == (frozenset({rows}), frozenset({None, *rule.factors} - {rows}))
    assert space.splits[DOWN] == (frozenset({"a"}), frozenset({"b", None}))
    assert space.zeros == {"params/up": frozenset({0, 3})}
    assert space.modes(["params/down"]) == {0}
    assert space.may_run_again([DOT])
    assert not space.may_run_again([DOT, DOWN])


def test_built_in_spaces() -> None:
    everything, of_alpa = of(free), of(alpa)
    assert everything.splits == of_alpa.splits
    assert everything.again == {op.path for op in GRAPH.forward()}
    assert not of_alpa.again
    assert everything.zeros["params/up"] == {0, 1, 2, 3}
    assert of_alpa.zeros["params/up"] == {0, 1}


def test_dims_are_found_in_the_dataflow() -> None:
    step, arguments = gpt(layers=2)
    graph = jscaler.parallelize("single", devices=1)(step).graph(*arguments)

    def named(dim: str) -> set[str]:
        def policy(planner: Any, devices: Any) -> None:
            for op in planner.forward():
                planner.op_trans(op, any_split(dims=dim))

        splits = of(policy, (2,), graph).splits
        return {graph.factor_names(graph[path]).get(f, "") for path, (own,) in splits.items() for f in own if f}

    assert named("batch") == {"tokens[0]"}
    assert named("sequence") == {"tokens[1]"}
    assert any("query" in name for name in named("heads"))
    assert any("up" in name for name in named("units"))
    assert not named("units") & named("heads")
    assert any("embedding" in name for name in named("words"))


REFUSED = {
    "12 into 8": (any_split(1, "batch", copies="never"), (2, 8), r"leaves nothing on axis 1.*into 1, 2, 3, 4, 6, 12"),
    "no heads": (any_split(dims="experts"), (2, 4), "the model has no experts"),
    "a third axis": (any_split(axes=2), (2, 4), r"names axis 2, and a mesh of \(2, 4\) has 2"),
    "another size": (Split("a", 3), (2, 4), r"is split \[3\] ways from axis 0.*legal: 2, 8"),
    "time": (TimeSplit("a", 2), (2, 4), "micro-batches are an argument of a search"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    hole, mesh, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        of(lambda graph, devices: graph.op_trans(DOT, hole), mesh)


def test_what_leaves_nothing_in_common() -> None:
    def twice(graph: Any, devices: Any) -> None:
        graph.op_trans(DOT, Split("a", 2))
        graph.op_trans(DOT, Split("b", 2))

    with pytest.raises(PlanError, match="holes leave nothing in common on axis 0"):
        of(twice, (2,))
    with pytest.raises(SplitError):
        of(lambda graph, devices: graph.op_trans(DOT, Split("a", 8)), (8,))
    with pytest.raises(UnknownNameError, match="no parameter"):
        of(lambda graph, devices: graph.shard("nothing/*", one_of(None)))
    with pytest.raises(UnknownNameError, match="ZeRO mode"):
        of(lambda graph, devices: graph.shard("*", one_of("zero4")))
    with pytest.raises(UnknownNameError, match="dim"):
        any_split(dims="head")
