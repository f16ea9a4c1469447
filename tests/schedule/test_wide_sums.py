"""Gradients in few bits, added up over micro-batches in more: nearer to the run in float64."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jscaler
from jscaler import plans
from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate
from jscaler.schedule.wide_sums import add_wide
from models.master import make_master_state, master_step

PARTS = 16


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, param_dtype=x.dtype, dtype=x.dtype)(jnp.tanh(nn.Dense(8, param_dtype=x.dtype, dtype=x.dtype)(x)))


def data(kind: Any) -> dict[str, Any]:
    draws = np.random.default_rng(0)
    return {"x": jnp.asarray(draws.normal(size=(4 * PARTS, 8)), kind), "labels": draws.integers(0, 4, 4 * PARTS)}


def run(step: Any, state: Any, batch: Any, plan: Any, devices: int = 1) -> tuple[Any, Any]:
    lowered = jscaler.parallelize(plan, devices=devices)(step).lower(state, batch)
    jscaler.verify(lowered)
    return lowered, lowered.compile()(state, batch)[0]


def loss_of(logits: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gap(params: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(exact), strict=True)
    return float(np.sqrt(sum(np.sum((np.asarray(a, np.float64) - np.asarray(b)) ** 2) for a, b in pairs)))


def sums(lowered: Any) -> set[str]:
    carries = [c for loop in lowered.plan.graph.loops.values() for c in loop.carries]
    return {c.final.dtype.name for c in carries if c.is_sum and c.final.role == "gradient"}


def test_a_part_is_added_in_the_bits_of_the_sum() -> None:
    """Equation by equation: XLA may keep more bits than it is asked for."""
    sofar, part = jnp.float32(1), jnp.bfloat16(2**-9)
    (total,) = evaluate(add_wide(BodyTable(), jax.typeof(sofar), jax.typeof(part)).jaxpr, [sofar, part])
    assert (float(total), total.dtype) == (1 + 2**-9, jnp.float32)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_master_reads_the_wide_sum_unrounded(devices: int) -> None:
    state = make_master_state(Net(), jnp.zeros((1, 8)), optax.sgd(1.0))
    inner = plans.data_parallel() if devices > 1 else None
    with jax.enable_x64(True):
        far = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float64), state.params)
        whole = {k: v.astype(jnp.float64) if k == "x" else v for k, v in data(jnp.bfloat16).items()}
        exact = jax.grad(lambda p: loss_of(Net().apply({"params": p}, whole["x"]), whole["labels"]))(far)
    batch = data(jnp.bfloat16)
    found = {}
    for kind in (None, "float32"):
        lowered, after = run(master_step, state, batch, plans.accumulate(PARTS, inner, accumulate_dtype=kind), devices)
        assert sums(lowered) == {kind or "bfloat16"}
        assert not [op.path for op in lowered.plan.graph.ops if op.path.endswith("@cast")], "nobody reads the rounded sum"
        gradient = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), state.params, after.params)
        found[kind] = gap(gradient, exact)
    assert found["float32"] < 0.8 * found[None], found


def test_who_keeps_the_gradients_dtype_reads_the_rounded_sum() -> None:
    """Parameters in bfloat16, updated in bfloat16: the sum is rounded once, not each time."""
    batch = data(jnp.bfloat16)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), jax.jit(Net().init)(jax.random.key(0), batch["x"])["params"])

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return loss_of(jnp.asarray(Net().apply({"params": params}, batch["x"])).astype(jnp.float32), batch["labels"])

        _, grads = jscaler.value_and_grad(loss_fn)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, grads

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: p.astype(jnp.float64), params)
        exact = jax.grad(lambda p: loss_of(Net().apply({"params": p}, batch["x"].astype(jnp.float64)), batch["labels"]))(
            wide
        )
    found = {}
    for kind in (None, "float32"):
        lowered = jscaler.parallelize(plans.accumulate(PARTS, accumulate_dtype=kind), devices=1)(step)
        lowered = lowered.lower({"params": params}, batch)
        assert sums(lowered) == {kind or "bfloat16"}
        _, grads = lowered.compile()({"params": params}, batch)
        assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"bfloat16"}
        found[kind] = gap(grads, exact)
    assert found["float32"] < found[None], found
