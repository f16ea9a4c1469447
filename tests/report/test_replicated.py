"""Leaves that a sharded plan leaves whole: alike ones on one line, with what they take together."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jscaler

TX = optax.adam(1e-2)


def step(state: Any, batch: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        h = batch
        for layer in params.values():
            h = jnp.tanh(h @ layer["kernel"] + layer["bias"])
        return jnp.mean(h**2)

    loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def test_layers_and_moments_share_a_line() -> None:
    params = {f"layer_{i}": {"kernel": jnp.ones((8, 6)), "bias": jnp.ones(6)} for i in range(3)}
    params = {name: layer | ({"kernel": jnp.ones((6, 6))} if name != "layer_0" else {}) for name, layer in params.items()}
    lowered = jscaler.parallelize("zero1", devices=4)(step).lower(
        {"params": params, "opt": TX.init(params)}, jnp.ones((4, 8))
    )
    first, *lines = lowered.plan.report.not_sharded
    assert first == "replicated over the 4 devices that shards are split over: 15 leaves and 1 scalar"
    assert sorted(line.strip() for line in lines) == [
        "└ state/opt/*/{mu,nu}/layer_*/bias f32[6] ×6, 144 bytes: nothing divides",
        "└ state/opt/*/{mu,nu}/layer_*/kernel f32[6,6] ×4, 576 bytes: nothing divides",
        "└ state/params/layer_*/bias f32[6] ×3, 72 bytes: nothing divides",
        "└ state/params/layer_*/kernel f32[6,6] ×2, 288 bytes: nothing divides",
    ]
