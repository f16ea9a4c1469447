"""Stacks of layers run part by part as a whole, though they add up parts of what they close over, or sums that cost more
than a join: all layers, forward and backward, stand in the one loop over micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jscaler
from jscaler import plans

LAYERS, ROWS, WIDTH = 3, 8, 4
Params = dict[str, Any]


def over_memory(params: Params, x: jax.Array) -> jax.Array:
    """A decoder: each layer looks at what an encoder's layers have made, whose gradient their loop adds up."""
    memory = layers(params["encoder"], x, lambda w, y: jnp.tanh(y @ w))
    return layers(params["decoder"], x, lambda w, y: jnp.tanh(y @ w) * memory)


def with_a_table(params: Params, x: jax.Array) -> jax.Array:
    """Each layer takes rows of a table, the same for all of the batch."""
    offsets = jnp.array([1, 0, 1, 2])
    x = layers(params["encoder"], x, lambda w, y: jnp.tanh(y @ w + w[offsets, 0]))
    return layers(params["decoder"], x, lambda w, y: jnp.tanh(y @ w) + w[offsets, 1])


def layers(stack: jax.Array, x: jax.Array, layer: Callable[..., jax.Array]) -> jax.Array:
    return lax.scan(lambda y, w: (layer(w, y), None), x, stack)[0]


@pytest.mark.parametrize("model", [over_memory, with_a_table])
def test_layers_stand_in_the_one_loop_over_micro_batches(model: Callable[..., jax.Array]) -> None:
    def step(state: Params, batch: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> tuple[Params, jax.Array]:
        loss, grads = value_and_grad(lambda params: jnp.mean(model(params, batch) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    rng = np.random.default_rng(0)
    state = {name: jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)), jnp.float32) for name in ("encoder", "decoder")}
    batch = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    planned = jscaler.parallelize(plans.accumulate(4), devices=1)(step)
    lowered = planned.lower(state, batch)
    jscaler.verify(lowered)
    loops = lowered.graph.loops
    assert [name.split("@")[0] for name, loop in loops.items() if loop.parent is None] == ["microbatch"]
    assert len(loops) == 5  # two stacks, forward and backward, in it
    graph = lowered.plan.graph
    read = {*graph.consumers, *graph.flow.linked}
    filled = [t.shape for op in graph.ops if not op.inputs for t in op.outputs if t in read]
    assert (ROWS, WIDTH) not in filled  # gradients of what layers close over begin as zeros of a micro-batch's size
    assert ((ROWS // 4, WIDTH) in filled) == (model is over_memory)
    (after, loss), (expected, its) = planned(state, batch), step(state, batch, jax.value_and_grad)
    np.testing.assert_allclose(loss, its, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after, expected)
