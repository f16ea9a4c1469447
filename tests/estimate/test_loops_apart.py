"""Micro-batches that need several loops hold what these hand on: a plan says so, how much it is, and what needs it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler import PlanError, PlanWarning, plans

LAYERS, ROWS, WIDE = 4, 16, 8


def step(params: jax.Array, x: jax.Array) -> Any:
    """Each layer is held near a mean over all rows of one, which needs the rows of all micro-batches."""

    def layer(x: jax.Array, w: jax.Array) -> Any:
        h = jnp.tanh(x @ w)
        with jax.named_scope("mean"):
            mean = jnp.mean(h, 0)
        with jax.named_scope("penalty"):
            return h, jnp.mean((mean - 1) ** 2)

    def loss_of(params: jax.Array) -> jax.Array:
        y, penalties = jax.lax.scan(layer, x, params)
        return jnp.mean(y**2) + penalties.sum()

    return jscaler.value_and_grad(loss_of)(params)


def test_what_is_held_is_said_with_its_bytes_and_with_who_needs_it() -> None:
    shapes = jax.ShapeDtypeStruct((LAYERS, WIDE, WIDE), "float32"), jax.ShapeDtypeStruct((ROWS, WIDE), "float32")
    plan = plans.accumulate(4, batch="x")
    said = "memory is lost: micro-batches run in 5 loops, one behind the other, since 'penalty/reduce_sum'"
    with pytest.warns(PlanWarning, match=said) as warned:
        lowered = jscaler.parallelize(plan, devices=1)(step).lower(*shapes)
    assert said in lowered.plan.explain()
    message = str(warned[0].message)
    assert "needs 'mean/reduce_sum:0' of all micro-batches, which 'mean/reduce_sum' makes" in message
    kibibytes = float(re.search(r"([\d.]+) KiB more are held", lowered.plan.report.apart)[1])  # type: ignore[index]
    one_tensor = LAYERS * ROWS * WIDE * 4 * 3 / 4  # of all micro-batches but one
    assert kibibytes * 1024 == 2 * one_tensor  # a product and its tanh a layer
    with pytest.raises(PlanError, match="refused, since strict=True: memory is lost"):
        jscaler.parallelize(plan, devices=1, strict=True)(step).lower(*shapes)
    (found,) = re.findall(r"per_microbatch='(\w+)'", message)
    alone = plans.accumulate(4, batch="x", per_microbatch=found)
    assert not jscaler.parallelize(alone, devices=1)(step).lower(*shapes).plan.report.apart
