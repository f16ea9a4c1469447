"""Data parallelism: the batch is split wherever it reaches, and each gradient is reduced once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.lower.program import Adapt
from jscaler.plans import by_name, data_parallel


def step(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
    def loss(s: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ s["w"])
        return ((hidden @ s["w"].T - batch["y"]) ** 2).mean()  # w is used twice: its gradients are joined

    value, grads = jscaler.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    x = jax.random.normal(jax.random.key(0), (16, 6))
    return {"w": jax.random.normal(jax.random.key(1), (6, 4))}, {"x": x, "y": x[::-1]}


@pytest.mark.smoke
@pytest.mark.parametrize("devices", [2, 8])
def test_a_gradient_that_is_joined_is_reduced_once(devices: int) -> None:
    compiled = jscaler.parallelize(data_parallel(), devices=devices)(step).lower(*arguments()).compile()
    reduced = [t for t in compiled.plan.program.tasks if isinstance(t, Adapt)]
    assert sorted(t.tensor.shape for t in reduced) == [(), (6, 4)]
    for ours, theirs in zip(
        jax.tree.leaves(compiled(*arguments())), jax.tree.leaves(jax.jit(step)(*arguments())), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_batch_may_have_another_name() -> None:
    renamed = lambda params, data: step(params, data)  # noqa: E731
    ours = jscaler.parallelize(data_parallel(batch="data"), devices=4)(renamed)(*arguments())
    np.testing.assert_allclose(ours[1], jax.jit(step)(*arguments())[1], rtol=1e-6)


def test_a_batch_that_is_sorted_is_gathered_and_still_right() -> None:
    def ranked(batch: jax.Array) -> jax.Array:
        return jnp.cumsum(jnp.sort(batch, axis=0), axis=0).sum()

    batch = jax.random.normal(jax.random.key(0), (8, 3))
    np.testing.assert_allclose(jscaler.parallelize("data_parallel", devices=8)(ranked)(batch), ranked(batch), rtol=1e-6)


def test_plans_by_name() -> None:
    assert by_name("single").__name__ == "single"
    assert by_name("docs/split_one_mlp.py:split_one_mlp").__name__ == "split_one_mlp"
