"""A backward op whose sum over micro-batches is cast behind it runs part by part but for the cast."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler import plans


def step(params: Any, x: jax.Array) -> Any:
    """Parameters in 32 bits, read by a norm of 16 bits through casts of their own."""

    def loss_of(params: Any) -> jax.Array:
        h = x.astype(jnp.bfloat16)
        for i, layer in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                with jax.named_scope("cast"):
                    scale, bias, w = (p.astype(jnp.bfloat16) for p in (layer["scale"], layer["bias"], layer["w"]))
                wide = h.astype(jnp.float32)
                with jax.named_scope("norm"):
                    wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
                with jax.named_scope("scale"):
                    wide = wide * scale
                with jax.named_scope("bias"):
                    wide = wide + bias
                h = h + jnp.tanh(wide.astype(jnp.bfloat16) @ w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, grads = jscaler.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, grads


def test_mixed_precision_accumulates_in_one_loop() -> None:
    rng = np.random.default_rng(0)
    shapes = {"scale": (8,), "bias": (8,), "w": (8, 8)}
    params = [{n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()} for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    wanted = jscaler.parallelize("single", devices=1)(step)(params, x)
    for plan, devices in ((plans.accumulate(4, batch="x"), 1), (plans.pipeline(2, 4, batch="x"), 2)):
        train = jscaler.parallelize(plan, devices=devices)(step)
        lowered = train.lower(params, x)
        assert len([loop for loop in lowered.graph.loops.values() if loop.time]) == 1
        jscaler.verify(lowered)
        for ours, theirs in zip(jax.tree.leaves(train(params, x)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-3)
