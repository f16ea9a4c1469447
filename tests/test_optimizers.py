"""Updates follow their parameters: the numbers of one device, state in the parameters' layout, only scalars joined."""

import functools

import jax
import pytest
from of_the_day import of_the_day

import jscaler
from bench.parity_updates import OPTIMIZERS, PLANS, far, off_layout, parts_of, strays, update_step
from jscaler import plans
from jscaler.lower.step_plan import StepPlan
from jscaler.report.hlo import collectives
from jscaler.stages import Captured, lower, transform

TENSOR, MEGATRON = (next(p for p in reversed(PLANS) if p.startswith(name)) for name in ("tensor_parallel", "megatron"))


@functools.cache
def captured(name: str) -> Captured:
    made = update_step(name)
    return jscaler.parallelize("single", devices=1)(made.step).lower(made.state, made.batches[0]).captured


def planned(name: str, plan: str) -> StepPlan:
    known = captured(name)
    return lower(known, transform(known, plans.by_name(plan), PLANS[plan]))


@pytest.mark.parametrize("plan", [TENSOR, MEGATRON], ids=["tensor", "megatron"])
@pytest.mark.parametrize("name", of_the_day(OPTIMIZERS))
def test_state_lies_like_its_parameter_and_only_gradients_are_moved(name: str, plan: str) -> None:
    done = planned(name, plan)
    layouts = {t.name: done.completed.inputs[t] for t in done.graph.inputs}
    split = 0
    for path, layout in layouts.items():
        parameter = next((p for p in layouts if p.startswith("state/params") and _twins(path, p)), None)
        if path.startswith("state/opt") and parameter is not None and layouts[parameter].shape == layout.shape:
            assert layout == layouts[parameter], path
            split += any(layout.cuts)
    assert split or name == "adafactor", "moments of split parameters are split"
    assert strays(done) == {}


def _twins(state: str, parameter: str) -> bool:
    return state.split("/")[-2:] == parameter.split("/")[-2:]


RUNS = [
    ("apply_if_finite(clip+adamw)", TENSOR),
    ("MultiSteps(adam, 2), skipping what is not finite", MEGATRON),
    ("adafactor", MEGATRON),
    ("novograd", TENSOR),
]


@pytest.mark.parametrize(("name", "plan"), of_the_day(RUNS, 2))
def test_several_steps_give_the_numbers_of_one_device(name: str, plan: str) -> None:
    """Among them one whose gradient is not finite, and those at which the gradients of several steps are used."""
    with jax.enable_x64(True):
        made, theirs = update_step(name), update_step(name, jax.value_and_grad)
        lowered = jscaler.parallelize(plan, devices=PLANS[plan])(made.step).lower(made.state, made.batches[0])
        ours = lowered.compile()
        jit = jax.jit(theirs.step).lower(theirs.state, theirs.batches[0]).compile()
        state, want = made.state, theirs.state
        for batch in made.batches:
            (state, _), (want, _) = ours(state, batch), jit(want, batch)
        assert far(state, want) == []
        skipped = [
            int(x) for path, x in jax.tree.leaves_with_path(state) if "total_notfinite" in jax.tree_util.keystr(path)
        ]
        assert skipped == ([1] if name.startswith("apply_if_finite") else [])
        assert off_layout(state) == []
        sizes = [b for path, b in parts_of(state).items() if path.endswith("['kernel']")]
        assert sum(mine for _, mine in sizes) <= sum(whole for whole, _ in sizes) / 2, "kernels and their moments"
        if plan == TENSOR:
            kinds = {c.kind for c in collectives(ours.as_text())}
            assert kinds == {"all-reduce"}, "nothing is gathered"
