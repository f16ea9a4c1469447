"""Planning works on distinct ops: what equal layers share is worked out once, for any number of devices. By counts."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler import stages
from jscaler.capture import bodies
from jscaler.materialize.filling import Filling
from jscaler.materialize.mesh import DeviceMesh
from jscaler.primitives import Assign
from jscaler.rules import rule_book
from jscaler.rules.localize import Localizer
from models.gpt import GPT, GPTConfig
from models.training import TrainState, make_optimizer, train_step

CONFIG = GPTConfig(hidden=16, layers=2, heads=8, sequence=8, vocabulary=32)


def lowered(layers: int, rows: int, stacked: bool = False, pp: int = 1) -> Any:
    """A GPT's train step for ``rows`` × 8 devices in each stage, which need not be there."""
    model, optimizer = GPT(dataclasses.replace(CONFIG, layers=layers, stacked=stacked)), make_optimizer()

    def make_state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, key=jax.random.key(1))

    tokens = jax.ShapeDtypeStruct((128, 8), jnp.int32)
    plan = jscaler.plans.megatron(dp=rows, tp=8, pp=pp, microbatches=4 if pp > 1 else None)
    step = jscaler.parallelize(plan, devices=8 * rows * pp, donate_argnames="state")(train_step)
    return step.lower(jax.eval_shape(make_state), {"tokens": tokens, "labels": tokens})


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the expensive parts of planning run."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(rule_book, "analyse")
    count(rule_book, "derive_rule")
    count(rule_book, "trace_flat")
    count(bodies, "trace_flat")
    count(Localizer, "run")
    count(Filling, "of")
    count(DeviceMesh, "coordinate")  # of one device
    return counts


@pytest.mark.one_day_in(2)
def test_layers_of_a_python_loop_are_planned_once(work: Counter[str]) -> None:
    lowered(1, 1)
    few = dict(work)
    work.clear()
    lowered(3, 1)
    assert dict(work) == few
    assert min(few.values()) > 0


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("stacked", [False, True])
def test_more_devices_are_no_more_work(work: Counter[str], stacked: bool) -> None:
    few = lowered(2, 2, stacked)
    work.pop("coordinate", None)  # in small groups, exchanges from device to device compete
    before = dict(work)
    work.clear()
    many = lowered(2, 128, stacked)
    assert dict(work) == before
    kinds = [[kind for kind, _ in itertools.groupby(made.plan.flat.items, key=type)] for made in (few, many)]
    assert kinds[0] == kinds[1]


@pytest.mark.one_day_in(3)
def test_more_stages_of_a_stack_are_no_more_work(work: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced, flattened and cut is that of the first stage, of one in the middle, and of the last."""
    for name in ("flatten", "cut"):
        real = getattr(stages, name)
        monkeypatch.setattr(stages, name, lambda *a, real=real, name=name: work.update([name]) or real(*a))
    counts = []
    for number in (4, 6):
        work.clear()
        lowered(2 * number, 1, True, number)
        counts.append({name: work[name] for name in ("trace_flat", "run", "flatten", "cut")})
    assert counts[0] == counts[1]
    assert counts[0]["flatten"] == counts[0]["cut"] == 9  # in front of the loop over micro-batches, in it and behind it


def test_equal_arrays_of_devices_are_one_object() -> None:
    plan = lowered(2, 128).plan.plan
    assigned = [d for d in plan.decisions if isinstance(d, Assign)]
    assert len(assigned) > 50
    assert len({id(d.places) for d in assigned}) == 1
