"""A model's own sharding constraints are left out, with one warning that names them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jscaler

PARAMS = {"a": jnp.eye(8) * 0.3, "b": jnp.ones((8, 8)) * 0.1}
X = jax.random.normal(jax.random.key(0), (8, 8))


def wish(x: jax.Array, *spec: str) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def plain(params: Any, batch: jax.Array) -> jax.Array:
    return wish(jnp.tanh(batch @ params["a"]), "data", "model") @ params["b"]


def layers(params: Any, batch: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return wish(jnp.tanh(h @ w), "data", "model"), None

    return jax.lax.scan(jax.checkpoint(layer), batch, jnp.stack([params["a"], params["b"]]))[0]


def branch(params: Any, batch: jax.Array) -> jax.Array:
    def step(i: jax.Array, h: jax.Array) -> jax.Array:
        return jax.lax.cond(i > 0, lambda h: wish(2 * h, "data"), lambda h: h, h)

    return jax.lax.stop_gradient(jax.lax.fori_loop(0, 3, step, batch @ params["a"])) * (batch @ params["b"])


def step_of(model: Callable[..., jax.Array], value_and_grad: Any) -> Any:
    def train(params: Any, batch: jax.Array) -> Any:
        loss, grads = value_and_grad(lambda p: jnp.mean(model(p, batch) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train


@pytest.mark.parametrize("plan", ["single()", "data_parallel()", "pipeline(2, 2)"])
@pytest.mark.parametrize("model", [plain, layers, branch])
def test_wishes_are_left_out(model: Callable[..., jax.Array], plan: str) -> None:
    want = jax.jit(step_of(model, jax.value_and_grad))(PARAMS, X)
    train = jscaler.parallelize(plan, devices=2)(step_of(model, jscaler.value_and_grad))
    with pytest.warns(
        jscaler.CaptureWarning, match=r"sharding constraints are left out.*P\('data'.* at .*test_wishes.py:\d+"
    ):
        got = train(PARAMS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
