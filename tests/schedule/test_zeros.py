"""What a sum over micro-batches starts from is made as the loop carries it: in parts, and for every holder of a share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler


def step(w: Any, x: jax.Array) -> Any:
    def loss_of(w: Any) -> jax.Array:
        with jax.named_scope("up"):
            h = jnp.tanh(x @ w["up"])
        with jax.named_scope("down"):
            return jnp.mean((h @ w["down"]) ** 2)

    loss, grads = jscaler.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


@pytest.mark.parametrize(
    ("plan", "devices", "shares"),
    [
        ("accumulate(2, megatron(dp=2, tp=2))", 4, True),
        ("megatron(dp=2, tp=2, pp=2, microbatches=2)", 8, True),
        ("accumulate(2, zero3())", 4, False),
    ],
)
def test_sums_start_from_zeros_as_they_lie(plan: str, devices: int, shares: bool) -> None:
    rng = np.random.default_rng(0)
    w = {name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in (("up", (8, 24)), ("down", (24, 8)))}
    x = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    train = jscaler.parallelize(plan, devices=devices)(step)
    lowered = train.lower(w, x)
    graph, completed = lowered.plan.graph, lowered.plan.completed
    carried = {
        carry.init: layout
        for name, loop in graph.loops.items()
        for carry, layout in zip(loop.carries, completed.loops[name].carries, strict=True)
    }
    starts = [op for op in graph.ops if op.anywhere == "zeros" and op.outputs[0].shape]
    assert starts
    for op in starts:
        (made,) = completed.ops[op.path].outputs
        assert made == carried[op.outputs[0]]
    assert any(completed.ops[op.path].outputs[0].local_shape != op.outputs[0].shape for op in starts)
    assert any(completed.ops[op.path].outputs[0].values for op in starts) == shares
    jscaler.verify(lowered)
    for ours, theirs in zip(
        jax.tree.leaves(train(w, x)), jax.tree.leaves(jax.jit(lambda w, x: step(w, x))(w, x)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
