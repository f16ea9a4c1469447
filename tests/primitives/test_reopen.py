"""A factor that an inner reduction blocks: ``op_trans`` cuts the op there; the policy and its backward need not know."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing

import jscaler
from jscaler import Split
from jscaler.primitives.planner import Planner
from tests.lower.steps import (
    ADAMW,
    assert_same_numbers,
    collectives,
    make_batch,
    make_state,
    make_step,
    planned,
    tied_loss,
)


def split_the_inner(path: str, factor: str) -> Callable[[Any, np.ndarray], None]:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.op_assign(graph.op_trans(graph[path], Split(factor, devices.size)), devices)

    policy.__name__ = f"split_{factor}"
    return policy


def batch_and_channels(graph: Any, devices: np.ndarray) -> None:
    """The normalisation on a grid: rows by the batch, columns by the channels that it reduces over."""
    op = graph["norm/rsqrt"]
    cells = graph.op_trans(op, Split("a", 2), Split("b", 2))
    graph.op_assign(cells[0], devices[:2])  # cells may be assigned one by one, groups or not
    graph.op_assign(cells[1], devices[2:])


@pytest.mark.parametrize("policy", [batch_and_channels, split_the_inner("norm/rsqrt", "b")])
def test_same_numbers(policy: Callable[..., None]) -> None:
    assert_same_numbers(policy, 4, tied_loss, ADAMW)


def test_the_channels_are_never_gathered() -> None:
    plan = planned(split_the_inner("norm/rsqrt", "b"), 4, tied_loss)
    assert plan.source["norm/rsqrt"].outputs == plan.graph["norm/rsqrt/rsqrt"].outputs
    assert not [s for s in collectives(plan) if s.startswith("all_gather")]


def test_the_handle_stays_valid_and_names_its_pieces() -> None:
    step = jscaler.parallelize("single", devices=1)(make_step(tied_loss, ADAMW))
    graph = step.graph(make_state(ADAMW), make_batch())
    planner = Planner(graph, 8)
    op = graph["norm/rsqrt"]
    assert graph.rule(op).factors["b"].reopens
    grid = planner.op_trans(op, Split("b", 4))
    assert grid.op is op
    assert grid.pieces == ("reduce_sum", "reduce_sum", "rsqrt")
    assert str(grid[1]) == "Grid(norm/rsqrt = reduce_sum, reduce_sum, rsqrt [b:4] at ((1, 2),))"
    grid = planner.op_trans(grid, Split("a", 2))
    assert grid.shape == (4, 2)
    planner.op_assign(grid, np.arange(8).reshape(4, 2))
    assert planner.op_trans("up/dot", Split("a", 2)).pieces == ()


def test_order_holds_for_all_pieces() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        split_the_inner("norm/rsqrt", "b")(graph, devices)
        graph.op_order("norm/rsqrt", "back/dot")

    assert_same_numbers(policy, 2, tied_loss)


def test_sums_of_the_backward_s_recomputation_are_made_once() -> None:
    plan = planned(split_the_inner("norm/rsqrt", "b"), 4, tied_loss)
    kinds = [e.adapt.tensor.name for e in plan.flat.exchanges if e.adapt.tensor.name.startswith("norm/rsqrt")]
    again = [name for name in kinds if "@backward/reduce_sum:0" in name]
    assert len(kinds) < len([a for a in plan.program.adapters if a.tensor.name.startswith("norm/rsqrt")])
    assert not again, kinds


def heads_loss(params: Any, batch: Any) -> Any:
    """A norm over the batch, then a softmax inside each of four heads: the norm's pieces do not tell the heads apart."""
    with jax.named_scope("up"):
        x = batch["x"] @ params["up"]["kernel"]
    with jax.named_scope("mix"):
        x = x * jax.lax.rsqrt((x * x).mean(0, keepdims=True) + 1e-2)
        x = jax.nn.softmax(x.reshape(16, 4, 4), axis=-1).reshape(16, 16)
    return jnp.mean((x @ params["down"]["kernel"] - batch["y"]) ** 2)


def batch_and_heads(graph: Any, devices: np.ndarray) -> None:
    op = graph["mix/exp"]
    rows, heads, inner = graph.rule(op).factors
    cells = graph.op_trans(op, Split(rows, 2), Split(heads, 2), Split(inner, 2))
    graph.op_assign(cells, devices.reshape(2, 2, 2))


@losing
def test_pieces_keep_names_of_sub_dims_that_they_do_not_tell_apart() -> None:
    assert_same_numbers(batch_and_heads, 8, heads_loss)
    plan = planned(batch_and_heads, 8, heads_loss)
    first = plan.graph["mix/exp/reduce_sum"]
    assert plan.completed.ops[first.path].placement.parts == {"a": 2, "b": 2, "c": 2}
    assert plan.completed.ops[first.path].inputs[0].subdims == ((16,), (4, 4))
