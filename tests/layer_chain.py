"""A chain of layers, and a step that trains it: what tests of pipelines share."""

from typing import Any

import jax
import jax.numpy as jnp

import jscaler


def step(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """``layer_0``, ``layer_1``, …: a product each, and a tanh."""

    def loss_of(params: Any) -> jax.Array:
        h = x
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    loss, grads = value_and_grad(loss_of)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss
