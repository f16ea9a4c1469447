"""Updates follow their parameters: the numbers of one device, state in the parameters' layout, only scalars joined."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from bench.parity_updates import OPTIMIZERS, PLANS, off_layout, parts_of, run, strays, update_step
from jscaler import plans
from jscaler.report.hlo import collectives
from jscaler.stages import Captured, StepPlan, lower, transform
from tests.plans.plan_steps import QUICK

TENSOR, MEGATRON = (next(p for p in reversed(PLANS) if p.startswith(name)) for name in ("tensor_parallel", "megatron"))


@functools.cache
def captured(name: str) -> Captured:
    made = update_step(name)
    return jscaler.parallelize("single", devices=1)(made.step).lower(made.state, made.batches[0]).captured


def planned(name: str, plan: str) -> StepPlan:
    known = captured(name)
    return lower(known, transform(known, plans.by_name(plan), PLANS[plan]))


@pytest.mark.parametrize("plan", [TENSOR, MEGATRON], ids=["tensor", "megatron"])
@pytest.mark.parametrize("name", OPTIMIZERS)
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
    ("MultiSteps(apply_if_finite(lamb), 2)", MEGATRON),
    ("adafactor", MEGATRON),
    ("novograd", TENSOR),
]


def quickly(plan: Any) -> Callable[..., Any]:
    """Decorate as ``plan`` says, and compile fast."""

    def decorate(step: Any) -> Any:
        @functools.cache
        def compiled() -> list[Any]:
            return []

        def call(state: Any, batch: Any) -> Any:
            if not compiled():
                lowered = plan(step).lower(state, batch)
                inner = getattr(lowered, "lowered", lowered).compile(compiler_options=QUICK)
                compiled().append(jscaler.Compiled(lowered, inner) if lowered is not inner and _ours(lowered) else inner)
            return compiled()[0](state, batch)

        call.compiled = compiled  # type: ignore[attr-defined]
        return call

    return decorate


def _ours(lowered: Any) -> bool:
    return isinstance(lowered, jscaler.api.Lowered)


@pytest.mark.parametrize(("name", "plan"), RUNS, ids=[name for name, _ in RUNS])
def test_several_steps_give_the_numbers_of_one_device(name: str, plan: str) -> None:
    """Among them one whose gradient is not finite, and those at which several steps' gradients are used."""
    with jax.enable_x64(True):
        want, _ = run(update_step(name, jax.value_and_grad), quickly(jax.jit))
        ours, decorated = run(update_step(name), quickly(jscaler.parallelize(plan, devices=PLANS[plan])))
        for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(want), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), path
            allowed = 1e-10 * max(np.abs(b).max(), 1e-2) if jnp.issubdtype(b.dtype, jnp.inexact) else 0
            assert np.abs(np.asarray(a, float) - np.asarray(b, float)).max() <= allowed, jax.tree_util.keystr(path)
        if "finite" in name:
            counts = {jax.tree_util.keystr(path): int(x) for path, x in jax.tree.leaves_with_path(ours) if x.ndim == 0}
            assert [n for path, n in counts.items() if path.endswith("total_notfinite")] == [1]
        assert off_layout(ours) == []
        whole, mine = zip(*(b for path, b in parts_of(ours).items() if path.endswith("'kernel']")), strict=True)
        assert sum(mine) <= sum(whole) / 2, "kernels and their moments"
        text = decorated.compiled()[0].as_text()
        if plan == TENSOR:
            assert {c.kind for c in collectives(text)} == {"all-reduce"}, "nothing is gathered"
