"""Master weights: what is added in 32 bits, what is gathered in 16, and the numbers of one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler import Split, plans
from jscaler.lower.program import Adapt
from jscaler.lower.step_plan import StepPlan
from models.master import MasterState, make_master_state, master_step
from models.mlp import MLP

FORMS = ["cast", "master"]
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def made(of: Any, dtype: Any, scale: float | None = None) -> tuple[Any, MasterState, dict[str, Any]]:
    draws = np.random.default_rng(0)
    batch = {"x": draws.normal(size=(16, 12)).astype(dtype), "labels": draws.integers(0, 8, 16)}
    state = make_master_state(MLP(hidden=32, layers=2, out=8), jnp.zeros((1, 12)), TX, scale)
    return functools.partial(master_step, dtype=dtype, of=of), state, batch


def planned(policy: Any, of: str) -> StepPlan:
    step, state, batch = made(of, jnp.bfloat16)
    lowered = jscaler.parallelize(policy, devices=4, donate_argnames="state")(step).lower(state, batch)
    jscaler.verify(lowered)
    return lowered.plan


def sent(plan: StepPlan) -> dict[str, float]:
    """Kind of collective -> bytes that a device sends, single numbers left out."""
    found: dict[str, float] = {}
    for exchange in plan.flat.exchanges:
        if isinstance(exchange.adapt, Adapt) and exchange.adapt.tensor.shape:
            for kind, nbytes in exchange.adapt.sent(exchange.input.aval.dtype.itemsize):  # type: ignore[union-attr]
                found[kind] = found.get(kind, 0.0) + nbytes
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def elements(plan: StepPlan) -> int:
    return sum(int(np.prod(t.shape)) for t in plan.graph.inputs if t.name.startswith("state/params"))


def split_casts(graph: Any, devices: np.ndarray) -> None:
    """Data parallelism, and every parameter cast in parts: it lies in parts, and is put together for the loss."""
    plans.data_parallel()(graph, devices)
    for op in graph.ops:
        if "convert_element_type" in op.path and op.kind != "backward" and op.inputs[0].name.startswith("state/params"):
            graph.op_assign(graph.op_trans(op, Split((op.inputs[0].name, 0), devices.size)), devices)


@pytest.mark.parametrize("of", FORMS)
def test_gradients_are_added_in_the_masters_bits_unless_fewer_are_asked_for(of: str) -> None:
    plain, asked = planned("data_parallel", of), planned('data_parallel(reduce_dtype="bfloat16")', of)
    whole = elements(plain)
    assert sent(plain) == {"all_reduce": 2 * 3 / 4 * whole * 4}
    assert sent(asked) == {"all_reduce": 2 * 3 / 4 * whole * 2}


@pytest.mark.parametrize("of", FORMS)
def test_parameters_are_gathered_after_the_cast(of: str) -> None:
    plan = planned(split_casts, of)
    assert sent(plan)["all_gather"] == 3 / 4 * elements(plan) * 2
    state = {t.name: layout for t, layout in plan.completed.inputs.items() if t.name.startswith("state/") and t.shape}
    assert all(any(layout.cuts) for layout in state.values()), "master and moments lie in parts"


@pytest.mark.parametrize("of", of_the_day(FORMS, 2))
def test_zero_gathers_16_bits_and_scatters_32_unless_fewer_are_asked_for(of: str) -> None:
    first, third, asked = (planned(plan, of) for plan in ("zero1", "zero3", 'zero3(reduce_dtype="bfloat16")'))
    whole = elements(first)
    assert sent(first) == {"reduce_scatter": 3 / 4 * whole * 4, "all_gather": 3 / 4 * whole * 4}  # masters lie whole
    gathered = 3 / 4 * (whole + 32 * 8) * 2  # forward, and for the backward the kernel of the second layer again
    assert sent(third) == {"all_gather": gathered, "reduce_scatter": 3 / 4 * whole * 4}
    assert sent(asked) == {"all_gather": gathered, "reduce_scatter": 3 / 4 * whole * 2}


def beside_step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """Parameters in 16 bits; the masters that they are made of are the optimizer's."""

    def loss_fn(params: Any) -> jax.Array:
        logits = jnp.asarray(MLP(hidden=32, layers=2, out=8, dtype=jnp.bfloat16).apply({"params": params}, batch["x"]))
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["labels"]).mean()

    loss, grads = value_and_grad(loss_fn)(state["params"])
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, opt = TX.update(wide, state["opt"], state["masters"])
    masters = optax.apply_updates(state["masters"], updates)
    return {"params": jax.tree.map(lambda p: p.astype(jnp.bfloat16), masters), "masters": masters, "opt": opt}, loss


def test_masters_beside_16_bit_parameters_lie_in_parts_and_are_gathered_after_the_cast() -> None:
    _, master, batch = made("cast", jnp.bfloat16)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master.params)
    state = {"params": params, "masters": master.params, "opt": TX.init(master.params)}
    lowered = jscaler.parallelize("zero1", devices=4, donate_argnames="state")(beside_step).lower(state, batch)
    whole = elements(lowered.plan)
    assert sent(lowered.plan) == {"reduce_scatter": 3 / 4 * whole * 4, "all_gather": 3 / 4 * whole * 2}
    lies = {
        t.name: layout for t, layout in lowered.plan.completed.inputs.items() if t.name.startswith("state/") and t.shape
    }
    assert {any(layout.cuts) for name, layout in lies.items() if "/params/" in name} == {False}
    assert {any(layout.cuts) for name, layout in lies.items() if "/params/" not in name} == {True}
    jitted = functools.partial(beside_step, value_and_grad=jax.value_and_grad)
    ours, theirs = both("zero1", beside_step, jitted, state, batch)
    for mine, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == want.dtype
        np.testing.assert_allclose(mine.astype(np.float32), want.astype(np.float32), atol=5e-3)


@pytest.mark.parametrize(
    "plan", ["data_parallel", 'tensor_parallel({"*/layer_0/kernel": 1})', "zero1", "zero3", "zero3(dp=2)"]
)
@pytest.mark.parametrize("of", of_the_day(FORMS))
def test_state_stays_in_32_bits(of: str, plan: str) -> None:
    step, state, batch = made(of, jnp.bfloat16)
    ours, theirs = both(plan, step, functools.partial(step, value_and_grad=jax.value_and_grad), state, batch)
    for mine, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == want.dtype
        np.testing.assert_allclose(mine, want, atol=2e-3)  # bfloat16 has 8 bits; the learning rate is 0.1


def test_a_loss_that_overflows_in_float16_halves_its_scale_and_changes_nothing_else() -> None:
    step, state, batch = made("cast", jnp.float16, scale=1e6)  # the largest float16 is 65504
    unscaled = functools.partial(step, value_and_grad=jax.value_and_grad)
    ours, theirs = both("data_parallel", step, unscaled, state, batch, steps=8)
    assert ours.scale.scale == theirs.scale.scale < 1e6
    assert 0 < ours.scale.fin_steps == theirs.scale.fin_steps < 8
    for mine, want in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(mine, want, atol=1e-3)


def both(plan: str, step: Any, jitted: Any, state: Any, batch: Any, steps: int = 3) -> tuple[Any, Any]:
    """The states after some steps under ``plan`` and under ``jax.jit``."""
    lowered = jscaler.parallelize(plan, devices=4)(step).lower(state, batch)
    ours = lowered.compile()
    theirs = jax.jit(jitted).lower(state, batch).compile()
    mine = want = state
    for _ in range(steps):
        (mine, _), (want, _) = ours(mine, batch), theirs(want, batch)
    return mine, want
