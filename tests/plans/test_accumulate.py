"""Accumulation over micro-batches: the numbers of the whole batch, alone and around other plans."""

import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from plans.plan_steps import TX, assert_same_numbers, collectives, gpt, made_once, mlp, planned, with_arguments

import jscaler
from jscaler import SplitError
from jscaler.plans import accumulate, data_parallel, spatial, zero1, zero2

STACKED = functools.partial(gpt, layers=2, stacked=True, remat=True)


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("conv_a", "conv_b"):
            x = nn.relu(nn.Conv(4, (3, 3), param_dtype=x.dtype, name=name)(x))
        return nn.Dense(3, param_dtype=x.dtype)(x.mean((1, 2)))


@made_once
def conv() -> Any:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(4, 8, 8, 3)).astype(jnp.zeros(()).dtype)
    return with_arguments(Conv(), TX, {"x": x, "labels": draws.integers(0, 3, 4)}, x)


@made_once
def masked() -> Any:
    """A loss over tokens that count, and a metric beside it."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(8, 4)).astype(jnp.zeros(()).dtype)
    batch = {"x": x, "mask": draws.integers(0, 2, 8), "labels": draws.integers(0, 3, 8)}
    params = {"w": draws.normal(size=(4, 3)).astype(x.dtype)}

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = batch["x"] @ params["w"]
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]) * batch["mask"]
            return each.sum() / batch["mask"].sum()

        loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, ({"params": params, "opt": TX.init(params)}, batch)


CASES: dict[str, tuple[Any, Any, int]] = {
    "alone": (accumulate(4), mlp, 1),
    "on one row each": (accumulate(8, data_parallel()), masked, 1),
    "data parallel": (accumulate(3, data_parallel()), mlp, 4),
    "zero1": (accumulate(2, zero1()), mlp, 4),
    "zero2": (accumulate(2, zero2()), mlp, 2),
    "halos": (accumulate(2, spatial(image="batch/x")), conv, 2),
    "masked": (accumulate(4), masked, 2),
    "stacked, with remat": (accumulate(2), STACKED, 1),
}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", of_the_day(CASES))
def test_numbers(name: str) -> None:
    assert_same_numbers(*CASES[name])


@pytest.mark.smoke
def test_gradients_are_reduced_once_behind_the_loop() -> None:
    plan = planned(accumulate(3, data_parallel()), mlp(), 4)
    shapes = sorted(t.shape for _, t in collectives(plan) if t.shape)
    parameters = sorted(t.shape for call in plan.graph.calls for t in call.wrt)
    assert shapes == parameters


def test_a_device_walks_its_own_block_of_the_batch() -> None:
    """Rows 0 to 5 of 24 are the first of four devices', whichever micro-batch they are in: nothing moves."""
    plan = planned(accumulate(3, data_parallel()), mlp(), 4)
    assert not [t.name for _, t in collectives(plan) if t.name.startswith("batch/")]
    (layout,) = (layout for t, layout in plan.completed.inputs.items() if t.name == "batch/x")
    assert [layout.mask(p).box[0][0] for p in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]  # of blocks of six rows


def test_micro_batches_that_do_not_divide() -> None:
    with pytest.raises(SplitError, match="24"):
        planned(accumulate(5), mlp(), 1)


def test_a_plan_file_keeps_the_time_axes(tmp_path: Path) -> None:
    step, arguments = mlp()
    file = tmp_path / "plan.json"
    made = planned(accumulate(3, data_parallel()), mlp(), 2)
    made.save(file)
    again = jscaler.parallelize(str(file))(step).lower(*arguments).plan
    assert again.graph.loops.keys() == made.graph.loops.keys()
    assert again.digest == made.digest
