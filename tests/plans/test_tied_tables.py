"""A table that two stages read: where it and its gradient lie in parts, and the numbers of one device."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler import plans
from jscaler.errors import PlanFitError
from jscaler.estimate.memory import memory_by_devices
from jscaler.lower.step_plan import StepPlan
from jscaler.primitives import Shard

WORDS, WIDTH, LAYERS, STEPS = 12, 8, 4, 3
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def train_step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """Words in and out by one table, layers of two kernels between."""
    params, moments = state

    def loss_of(params: Any) -> jax.Array:
        with jax.named_scope("embed"):
            h = params["table"][batch["tokens"]]
        for i, (up, down) in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{i}"):
                h = h + jnp.tanh(h @ up) @ down
        with jax.named_scope("head"):
            losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["table"].T, batch["labels"])
            return losses.mean()

    loss, grads = value_and_grad(loss_of)(params)
    updates, moments = TX.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def make_state() -> Any:
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(WIDTH, 16)) / 4, rng.normal(size=(16, WIDTH)) / 4) for _ in range(LAYERS)]
    params = jax.tree.map(jnp.asarray, {"table": rng.normal(size=(WORDS, WIDTH)) / 4, "layers": layers})
    return params, TX.init(params)


def make_batch() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.integers(0, WORDS, (8, 3)), jnp.int32) for name in ("tokens", "labels")}


@functools.cache
def lowered(plan: str, devices: int) -> Any:
    return jscaler.parallelize(plans.by_name(plan), devices=devices)(train_step).lower(make_state(), make_batch())


SCHEDULES = ("'1f1b'", "'interleaved', chunks=2", "'zb_v'", "'chimera'")
INNER = {"single()": 1, "tensor_parallel()": 2, "zero1()": 2, "zero3()": 2}


@pytest.mark.parametrize(("schedule", "inner"), of_the_day(itertools.product(SCHEDULES, INNER), 5))
def test_the_numbers_are_those_of_one_device(schedule: str, inner: str) -> None:
    with jax.enable_x64(True):
        ours, theirs, batch = make_state(), make_state(), make_batch()
        devices = 2 * INNER[inner]
        plan = plans.by_name(f"pipeline(2, 4, {schedule}, plan={inner})")
        train = jscaler.parallelize(plan, devices=devices, donate_argnames="state")(train_step)
        plain = jax.jit(lambda *args: train_step(*args, value_and_grad=jax.value_and_grad))
        jscaler.verify(train.lower(ours, batch))
        for _ in range(STEPS):
            (ours, loss), (theirs, true) = train(ours, batch), plain(theirs, batch)
            assert abs(float(loss) - float(true)) < 1e-11
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), jax.device_get(ours), theirs)


def ends_of_the_table(step: StepPlan) -> list[tuple[int, ...]]:
    """The parts of it, of its moments and of its gradient that blocks take or leave."""
    layouts = [layout for block in step.blocks for layout in (*block.inputs, *block.outputs) if layout is not None]
    return [layout.local_shape for layout in layouts if layout.shape == (WORDS, WIDTH)]


@pytest.mark.parametrize(
    ("plan", "devices"),
    [
        ("pipeline(2, 4, plan=zero3())", 4),
        ("pipeline(2, 4, 'zb_h1', plan=zero3())", 4),
        ("pipeline(4, 4, plan=zero3())", 8),
        ("pipeline(2, 4, 'chimera', plan=zero3())", 4),  # on either group it is both at the front and at the end
    ],
)
def test_in_parts_it_goes_from_block_to_block_in_parts(plan: str, devices: int) -> None:
    """No block takes or leaves it whole, nor its gradient: each puts it together where it uses it."""
    step = lowered(plan, devices).plan
    ends = ends_of_the_table(step)
    assert len(ends) > 8
    assert set(ends) == {(WORDS // 2, WIDTH)}


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_it_is_sent_once_and_its_gradient_once_back(schedule: str) -> None:
    """Under Chimera either group has two sums of it, of both ends: those of one group cross as one."""
    step = lowered(f"pipeline(2, 4, '{schedule}', plan=zero3())", 4).plan
    sent = [t for t in step.sent if t.tensor.shape == (WORDS, WIDTH)]
    behind = "" if schedule == "1f1b" else "@behind"
    assert [t.tensor.name for t in sent] == ["state/0/table", f"d(state/0/table)@2-3{behind}"]
    assert step.spanning is not None
    assert all(t.phase not in step.spanning.phases and t.crossing.is_equal for t in sent)
    assert {t.crossing.sent for t in sent} == {WORDS * WIDTH}  # each device of a group a part of it


def test_its_update_is_where_it_is_stored() -> None:
    step = lowered("pipeline(2, 4, plan=zero3())", 4).plan
    updates = [op for op in step.graph.update() if "/table" in op.path]
    assert updates
    assert {step.completed.homes[op.path].group.devices for op in updates} == {(0, 1)}


def test_the_sum_of_its_gradient_is_scattered_on_both_stages_where_that_is_asked_for() -> None:
    """ZeRO-2 has it whole, and the sums of both stages in parts."""
    step = lowered("pipeline(2, 4, plan=zero2())", 4).plan
    assert step.spanning is not None
    carried = zip(step.spanning.loop.carries, step.completed.loops[step.spanning.loop.name].carries, strict=True)
    sums = [layout for carry, layout in carried if carry.inside.shape == (WORDS, WIDTH)]
    assert [layout.local_shape for layout in sums] == [(WORDS // 2, WIDTH)] * 2
    assert {layout.mesh.devices for layout in sums} == {(0, 1), (2, 3)}


def test_a_plan_says_on_which_stages_it_lies() -> None:
    plan = lowered("pipeline(4, 4, plan=zero3())", 8).plan.plan
    table = plan.shards["state/0/table"]
    assert (table.devices, table.elsewhere) == ((0, 1), ((6, 7),))
    assert "over [0 1] and [6 7], stored so" in str(table)
    assert all(not shard.elsewhere for leaf, shard in plan.shards.items() if leaf != "state/0/table")
    again = jscaler.Plan.from_json(plan.to_json())
    assert again.digest == plan.digest
    step = jscaler.parallelize(again, devices=8)(train_step).lower(make_state(), make_batch()).plan
    assert set(ends_of_the_table(step)) == {(WORDS // 2, WIDTH)}
    wrong = [dataclasses.replace(d, elsewhere=((5, 6),)) if d == table else d for d in plan.decisions]
    with pytest.raises(PlanFitError, match=r"sharded over devices \[0, 1\] and \[5, 6\]"):
        jscaler.parallelize(dataclasses.replace(plan, decisions=tuple(wrong)))(train_step).lower(make_state(), make_batch())


def test_the_last_stage_holds_halves_of_the_table_and_of_the_sum_of_its_gradient() -> None:
    """A plan that says nothing of that stage has both whole there: so did all plans, and their files are still taken."""
    step = lowered("pipeline(2, 4, plan=zero3())", 4).plan
    decisions = [dataclasses.replace(d, elsewhere=()) if isinstance(d, Shard) else d for d in step.plan.decisions]
    plan = dataclasses.replace(step.plan, decisions=tuple(decisions))
    whole = jscaler.parallelize(plan, devices=4)(train_step).lower(make_state(), make_batch()).plan
    peaks = [{one.devices: one.memory.peak for one in memory_by_devices(found)} for found in (whole, step)]
    half = WORDS * WIDTH * 4 // 2
    assert peaks[0][2, 3] - peaks[1][2, 3] == 2 * half
    assert peaks[0][0, 1] == peaks[1][0, 1]
