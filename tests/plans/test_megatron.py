"""Data × tensor parallelism: activations are reduced within rows of the grid, gradients within columns."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plan_steps import COLUMNS, activations, assert_same_numbers, collectives, gpt, made_once, mlp, planned

import jscaler
from jscaler.errors import PlanError, SplitError
from jscaler.plans import megatron


def test_activations_within_rows_and_gradients_within_columns() -> None:
    plan = planned(megatron(dp=2, tp=4, columns=COLUMNS), mlp(), 8)
    assert activations(plan) == {"all_reduce": 3}
    gradients = [t for _, t in collectives(plan) if t.shape and "state" in t.name]
    assert len(gradients) == 8  # each parameter's once
    axes = {len(step.axes) for adapt in plan.program.adapters for step in adapt.adapter.steps}
    assert axes == {1}


def test_with_the_sequence() -> None:
    plan = planned(megatron(dp=2, tp=4, sequence=True, vocab=False), gpt(), 8)
    assert activations(plan) == {"all_gather": 4, "reduce_scatter": 4}
    embedding = [t for _, t in collectives(plan) if "embed/embedding" in t.name]
    assert len(embedding) == 1  # its two gradients are joined before they are reduced


@pytest.mark.one_day_in(2)
def test_the_numbers_are_those_of_one_device() -> None:
    assert_same_numbers(megatron(dp=2, tp=4, vocab=False), gpt, 8)  # with sequence and vocabulary: test_vocab_parallel


def frozen_step(state: Any, batch: Any) -> Any:
    """Only the second layer is trained; the first comes back as it was."""

    def loss_fn(head: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ state["up"]) @ head) ** 2)

    loss, gradient = jscaler.value_and_grad(loss_fn)(state["down"])
    return {**state, "down": state["down"] - 0.1 * gradient}, loss


@made_once
def frozen() -> Any:
    return frozen_step, ({"up": jnp.ones((8, 16)) / 8, "down": jnp.ones((16, 8))}, {"x": jnp.ones((4, 8))})


def test_parameters_that_are_not_trained_are_split_like_others() -> None:
    plan = planned(megatron(dp=2, tp=2, columns={"*/up": 1}, vocab=False), frozen(), 4)
    layouts = {t.name: layout.cuts for t, layout in plan.completed.inputs.items()}
    assert layouts["state/up"][1] == layouts["state/down"][0] != ()


def test_what_is_not_given_is_what_is_left() -> None:
    rows_given = planned(megatron(dp=2, columns=COLUMNS), mlp(), 8)
    assert rows_given.digest == planned(megatron(tp=4, columns=COLUMNS), mlp(), 8).digest


def test_mistakes() -> None:
    with pytest.raises(PlanError, match=r"dp=2 × tp=2 is a grid of 4 devices, and 8 are given"):
        planned(megatron(dp=2, tp=2, columns=COLUMNS), mlp(), 8)
    with pytest.raises(PlanError, match=r"dp is a positive whole number, not 0"):
        planned(megatron(dp=0, columns=COLUMNS), mlp(), 8)
    with pytest.raises(SplitError, match=r"attn/key/kernel' cannot split factor 'dim 1' of size 4 into 8"):
        planned(megatron(tp=8, vocab=False), gpt(), 8)
