"""A plan and its GSPMD twin compute the same, and are measured alike."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jscaler
from jscaler.compare import compare, comparison_table


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


def test_beside_a_pipeline_stands_what_its_stages_do() -> None:
    params = {f"layer_{i}": jax.random.normal(jax.random.key(i), (8, 8)) / 3 for i in range(4)}

    @jscaler.parallelize("pipeline(2, 2, plan=data_parallel())", devices=4, donate_argnames="params")
    def step(params, batch):
        def loss(p):
            x = batch
            for i in range(4):
                with jax.named_scope(f"layer_{i}"):
                    x = jnp.tanh(x @ p[f"layer_{i}"])
            return (x**2).mean()

        value, gradients = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    result = compare(step, lambda i: (params, jax.random.normal(jax.random.key(9 + i), (16, 8))), steps=2, rounds=1)
    assert (result.ours.plan, result.gspmd.plan) == ("pipeline", "data_parallel")
    for difference in (result.loss_difference, result.gradient_difference, result.parameter_difference):
        assert difference < 1e-6
    state = 4 * 8 * 8 * 4
    assert result.gspmd.memory["argument"] == state + 16 * 8 * 4 // 4
    assert result.ours.memory["argument"] < result.gspmd.memory["argument"]
    assert set(result.ours.peaks) == {"[0 1]", "[2 3]"}
    assert max(result.ours.peaks.values()) == result.ours.memory["peak"]
    sent = result.ours.collectives["send"]
    assert sent.count >= 2
    assert "split of data_parallel over all" in str(comparison_table(result).columns[2].header)
    other = step.without_stages()
    assert other.without_stages() is other
