"""Virtual CPU devices in the place of described GPUs: XLA accounts for memory and collectives in the same way for both."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler.runtime import target as target_module


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """From here on, compiling for a target compiles for as many virtual CPU devices."""
    patch.setattr(target_module, "described_as", lambda cluster, kind: jax.devices()[: cluster.num_devices])
    patch.setattr(target_module, "WITHOUT_GPU", {"xla_backend_optimization_level": 0})  # nothing runs


LAYERS, WIDTH, ROWS = 3, 32, 512


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """A stack of layers, and a head."""

    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("layer"):
            return jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    with jax.named_scope("head"):
        return ((x @ params["head"]) ** 2).mean()


def step(state: Any, batch: Any) -> Any:
    """Momentum: a parameter, its gradient and a moment for each."""
    loss, gradients = jscaler.value_and_grad(loss_fn)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, loss


def arguments() -> tuple[Any, Any]:
    """Shapes of a state and a batch."""
    params = {
        "layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"),
        "head": jax.ShapeDtypeStruct((WIDTH, 8), "float32"),
    }
    return {"params": params, "moments": params}, {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")}
