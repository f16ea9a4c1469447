"""A plan and its GSPMD twin compute the same, and are measured alike."""

import doctest
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jscaler
from jscaler import CaptureError, compare
from jscaler.comparison import compare_calls, comparison_table


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

    state = params, optimizer.init(params)
    result = compare(step, state, batch, rounds=2)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the caller's state is not donated"
    assert (result.plan, result.devices, result.steps) == ("data_parallel", 8, 5)
    differences = result.loss_difference, result.gradient_difference, result.parameter_difference, result.result_difference
    assert max(differences) < 1e-6
    assert result.ours.collectives["all-reduce"].nbytes == (6 * 4 + 4 + 1) * 4
    assert result.ours.memory["argument"] == result.gspmd.memory["argument"]
    assert result.time_ratio > 0
    assert result.compile_ratio > 0
    assert "plan data_parallel on 8 devices, 5 steps" in str(result)
    assert json.loads(json.dumps(result.as_json()))["devices"] == 8


@pytest.mark.one_day_in(2)
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

    result = compare_calls(step, [(params, jax.random.normal(jax.random.key(9 + i), (16, 8))) for i in range(2)], rounds=1)
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


def test_a_forward_without_a_gradient_is_compared_by_its_results() -> None:
    step = jscaler.parallelize("data_parallel", devices=2)(lambda w, batch: jnp.tanh(batch @ w))
    args = jnp.ones((8, 4)) / 8, jax.random.normal(jax.random.key(0), (16, 8))
    result = compare(step, *args, steps=1, rounds=1)
    assert result.result_difference < 1e-6
    assert (result.loss_difference, result.parameter_difference) == (0, 0)


def test_a_step_without_a_plan_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"compare takes a step that jscaler.parallelize has made.*not a function"):
        compare(lambda w, batch: batch @ w, jnp.ones((8, 4)), jnp.ones((16, 8)))  # type: ignore[arg-type]


def test_the_docstring_s_example_runs() -> None:
    (example,) = doctest.DocTestFinder().find(compare, "compare", globs={"jscaler": jscaler})
    assert doctest.DocTestRunner().run(example) == (0, 4)
