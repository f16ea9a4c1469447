"""A plan and its GSPMD twin compute the same, and are measured alike."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jscaler
from jscaler.compare import compare


@pytest.mark.smoke
def test_both_sides_agree_after_five_steps() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = {"w": jnp.ones((6, 4)), "b": jnp.zeros(4)}
    batch = {"x": jax.random.normal(jax.random.key(0), (16, 6)), "y": jnp.arange(16) % 4}

    @jscaler.parallelize("data_parallel", devices=8, donate_argnames="state")
    def step(state, batch):
        params, moments = state

        def loss(p):
            logits = batch["x"] @ p["w"] + p["b"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, grads = jscaler.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    result = compare(step, lambda i: ((params, optimizer.init(params)), batch), rounds=2)
    assert (result.plan, result.devices, result.steps) == ("data_parallel", 8, 5)
    for difference in (result.loss_difference, result.gradient_difference, result.parameter_difference):
        assert difference < 1e-6
    assert result.ours.collectives["all-reduce"].nbytes == (6 * 4 + 4 + 1) * 4
    assert result.ours.memory["argument"] == result.gspmd.memory["argument"]
    assert result.time_ratio > 0
    assert result.compile_ratio > 0
