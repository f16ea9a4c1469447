"""The job of `bench.faults`: a small network with dropout under Adam, its batches made of their numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler

ADAM = optax.adam(1e-2)


def make_state(key: Any) -> Any:
    keys = jax.random.split(key, 4)
    params = {f"layer_{i}": jax.random.normal(k, (16, 16)) / 4 for i, k in enumerate(keys)}
    return {"params": params, "moments": ADAM.init(params), "key": jax.random.key(5)}


def step(state: Any, batch: Any) -> Any:
    key, mask = jax.random.split(state["key"])

    def loss_fn(params: Any) -> Any:
        x = batch * jax.random.bernoulli(mask, 0.8, batch.shape)
        for name in sorted(params):
            x = x + jnp.tanh(x @ params[name])
        return ((x - batch) ** 2).mean()

    loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
    updates, moments = ADAM.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments, "key": key}, loss


def job(seed: int = 0) -> jscaler.Job:
    class Examples:
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, i: int) -> np.ndarray:
            return np.random.default_rng((seed, int(i))).normal(size=16).astype(np.float32)

    data = jscaler.Batches(Examples(), rows=16, seed=3, ahead=2, threads=1)
    return jscaler.Job(make_state, step, data, "fault job")  # whatever its data
