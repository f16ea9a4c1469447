"""A small train step, a stack of layers with its optimizer, for what is tried very often."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jscaler

LAYERS, WIDE = 6, 64
OPTIMIZER = optax.adam(1e-3)


def train_step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """One step of the optimizer; ``jax.value_and_grad`` in place of the other is for ``jax.jit``."""

    def loss(params: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return ((jax.lax.scan(layer, batch["x"], params)[0] - batch["y"]) ** 2).mean()

    value, gradients = value_and_grad(loss)(state["params"])
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


def arguments(rows: int = 16, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """A state, and a batch of ``rows``."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDE, 4 * WIDE), dtype) / 8,
        "down": jax.random.normal(keys[1], (LAYERS, 4 * WIDE, WIDE), dtype) / 16,
    }
    x, y = (jax.random.normal(key, (rows, WIDE), dtype) for key in keys[2:])
    return {"params": params, "moments": OPTIMIZER.init(params)}, {"x": x, "y": y}
