"""3F1B: passes are found in the dataflow, each over the same stages; the numbers are those of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from axial_steps import evoformer
from of_the_day import of_the_day
from plan_steps import assert_same_numbers, made_once

import jscaler
from jscaler.errors import PlanError
from jscaler.lower.step_plan import StepPlan
from jscaler.plans import dap, three_f_one_b
from jscaler.primitives import OnDevices
from jscaler.tables import SCHEDULES


@made_once
def recycling(passes: int = 3, layers: int = 4, tied: bool = False) -> tuple[Any, tuple[Any, Any]]:
    """Dense layers that go over their own output; ``tied`` ones make the output by the embedding."""
    keys = jax.random.split(jax.random.key(0), layers + 2)
    kernels = {f"layer_{i}": 0.5 * jax.random.normal(keys[i], (8, 8), float) for i in range(layers)}
    params = {"embed": jax.random.normal(keys[-1], (4, 8), float), **kernels}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.zeros((len(x), 8), float)
        for _ in range(passes):
            h = jnp.tanh(x @ params["embed"] + jax.lax.stop_gradient(h))
            for i in range(layers):
                h = h + jnp.tanh(h @ params[f"layer_{i}"])
        return jnp.mean((h @ params["embed"].T if tied else h) ** 2)

    def step(state: Any, batch: Any) -> Any:
        value, grads = jscaler.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step, (params, jax.random.normal(keys[-2], (8, 4), float))


def planned(policy: Any, made: Any, devices: int = 2) -> StepPlan:
    step, arguments = made
    return jscaler.parallelize(policy, devices=devices)(step).lower(*arguments).plan


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("tied", [False, True])
def test_the_numbers_are_those_of_one_device(tied: bool) -> None:
    assert_same_numbers(three_f_one_b(2, 4), lambda: recycling(tied=tied), 2)


@pytest.mark.parametrize("passes", [2, 3])
def test_passes_are_found(passes: int) -> None:
    plan = planned(three_f_one_b(2, 4), recycling(passes))
    assert plan.instructions.table == SCHEDULES["3f1b"].table(2, 4, passes)


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("stacked", of_the_day([False, True], 2))
def test_an_evoformer_recycles_over_two_stages(stacked: bool) -> None:
    """Each pass has one block of two in each stage, though its embedding needs nothing of the pass before."""
    plan = planned(three_f_one_b(2, 2), evoformer(rows=2, layers=2, recycles=1, stacked=stacked))
    assert plan.instructions.table == SCHEDULES["3f1b"].table(2, 2, 2)
    sizes = [len(d.ops) for d in plan.plan.decisions if isinstance(d, OnDevices)]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.one_day_in(3)
@pytest.mark.filterwarnings("ignore::jscaler.errors.PlanWarning")  # pairs are added to their transposes
def test_axial_parallelism_in_stages() -> None:
    """Also in passes without a gradient, and behind ops that take stacks of parameters apart."""
    plan = planned(three_f_one_b(2, 2, plan=dap()), evoformer(rows=2, layers=2, recycles=1, stacked=True), 4)
    split = {op: set(names) for op, names in plan.plan.split_factors.items() if "attn/dot" in op and "dot." not in op}
    assert len(split) == 4 * 2 * 2
    assert all(names & {"b"} for names in split.values())


def test_mistakes() -> None:
    with pytest.raises(PlanError, match=r"the model has 3 passes over its own output, and the schedule 2; give chunks=3"):
        planned(three_f_one_b(2, 4, passes=2), recycling())
    with pytest.raises(PlanError, match=r"reads its parameters once: pipeline\(2, 4\) is for others"):
        planned(three_f_one_b(2, 4), recycling(1))
    with pytest.raises(PlanError, match="three_f_one_b: passes"):
        three_f_one_b(2, 4, passes=0)
