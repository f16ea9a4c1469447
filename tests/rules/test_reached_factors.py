"""``graph.factor_of``: which factor of each op a dim of an input reaches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import PlanError, UnknownNameError
from jscaler.ir import Graph

BATCH, LENGTH, WIDTH = 4, 3, 6


def graph_of(step: Any, *args: Any) -> Graph:
    return jscaler.parallelize("single", devices=1)(step).graph(*args)


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        with jax.named_scope("embed"):
            h = p["table"][batch["tokens"]]
        with jax.named_scope("up"):
            h = jnp.tanh(h @ p["up"])
        with jax.named_scope("loss"):
            return (h**2).mean()

    value, grads = jscaler.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


@pytest.fixture
def graph() -> Graph:
    params = {"table": np.ones((8, WIDTH), np.float32), "up": np.ones((WIDTH, 2), np.float32)}
    return graph_of(step, params, {"tokens": np.zeros((BATCH, LENGTH), np.int32)})


@pytest.mark.smoke
def test_the_batch_reaches_every_forward_op(graph: Graph) -> None:
    reached = graph.factor_of("batch/tokens", 0)
    ops = [op for op in graph.forward() if any(t.shape for t in op.inputs)]
    for op in ops:
        factor = graph.rule(op).factors[reached[op]]
        assert (factor.size, factor.kind) in {(BATCH, "parallel"), (BATCH, "reduction")}, op.path


def test_it_is_the_same_factor_in_forward_and_backward(graph: Graph) -> None:
    reached = graph.factor_of("batch/tokens", 0)
    pairs = [(op, op.backward) for op in graph.forward() if op.backward in reached]
    assert pairs
    assert all(reached[forward] == reached[backward] for forward, backward in pairs)


def test_it_does_not_reach_what_only_reads_parameters(graph: Graph) -> None:
    reached = graph.factor_of("batch/tokens", 0)
    assert not [op.path for op in graph.update() if op in reached]


def test_another_dim_reaches_another_factor(graph: Graph) -> None:
    by_dim = [graph.factor_of("batch/tokens", dim) for dim in (0, 1)]
    (embed,) = graph.select("embed/*")
    assert by_dim[0][embed] != by_dim[1][embed]


def test_a_parameter_dim_reaches_its_update_and_not_the_loss(graph: Graph) -> None:
    reached = graph.factor_of("params/up", 1)
    assert {op.kind for op in reached} == {"forward", "backward", "update"}
    assert all(graph.rule(op).factors[name].size == 2 for op, name in reached.items())


def test_a_refined_dim_is_followed_on_its_major_part() -> None:
    def heads(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("project"):
            y = x @ w
        with jax.named_scope("heads"):
            return jnp.tanh(y.reshape(2, 3, 2))

    graph = graph_of(heads, np.ones((2, 4), np.float32), np.ones((4, 6), np.float32))
    reached = graph.factor_of("w", 1)
    for op, name in reached.items():
        assert graph.rule(op).factors[name].size in (3, 6), op.path
    assert len(reached) == len(graph.ops)


def test_a_refined_dim_that_is_taken_apart_is_followed_on_its_first_part_that_can_be_split() -> None:
    def attention(x: jax.Array, w: jax.Array) -> jax.Array:  # b d, d (3 h k) -> h h
        with jax.named_scope("project"):
            y = x @ w
        with jax.named_scope("heads"):
            q, k, v = (part.reshape(2, 2, 5) for part in jnp.split(y, 3, axis=1))
            return jnp.tanh(q) * k + v

    graph = graph_of(attention, np.ones((2, 4), np.float32), np.ones((4, 30), np.float32))
    reached = {op.path: graph.rule(op).factors[name] for op, name in graph.factor_of("w", 1).items()}
    assert {path: (f.size, f.kind) for path, f in reached.items()} == {
        "project/dot": (30, "parallel"),
        "heads/tanh": (2, "parallel"),
    }


def test_a_dim_that_is_not_there(graph: Graph) -> None:
    with pytest.raises(PlanError, match=r"'batch/tokens' of shape \(4, 3\) has no dim 2"):
        graph.factor_of("batch/tokens", 2)


def test_an_input_that_is_not_there(graph: Graph) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'batch/tokens'"):
        graph.factor_of("batch/token", 0)
