"""The interlaced pipeline: words over all devices, layers in stages; one device's numbers, and what is sent for the words."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import losing
from of_the_day import of_the_day
from plan_steps import assert_same_numbers, gpt, made_once, mlp

import jscaler
from bench.schedules import out_of_order
from jscaler import plans
from jscaler.errors import PlanError, SplitError
from jscaler.lower.step_plan import StepPlan
from jscaler.plans import data_parallel, interlaced, megatron, pipeline
from jscaler.primitives import OnDevices
from jscaler.tables import SCHEDULES
from models.mbart import MBart, MBartConfig

HIDDEN, WORDS, TOKENS, ROWS = 16, 32, 8, 8
TX = optax.sgd(0.1, momentum=0.9)


class Translator(nn.Module):
    """Nobody's: words of source and target in tables of their own, an untied head, and the target's look-up in the middle."""

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        kinds = {"dtype": jnp.zeros(()).dtype, "param_dtype": jnp.zeros(()).dtype}

        def layer(x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
            for y in (x, memory) if memory is not None else (x,):
                x = x + nn.MultiHeadDotProductAttention(2, **kinds)(nn.LayerNorm(**kinds)(x), y)
            return x + nn.Dense(HIDDEN, **kinds)(nn.relu(nn.Dense(24, **kinds)(x)))

        x = nn.Embed(WORDS, HIDDEN, **kinds)(source) * 4 + self.param("where", nn.initializers.ones, (TOKENS, HIDDEN), float)
        memory = nn.LayerNorm(**kinds)(layer(layer(x)))
        shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        y = nn.LayerNorm(**kinds)(nn.Embed(WORDS, HIDDEN, **kinds)(shifted))
        return nn.Dense(WORDS, **kinds)(layer(layer(y, memory), memory))


def translating(model: nn.Module, **rngs: Any) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A step on pairs of texts, of whose tokens a quarter does not count."""
    tokens = np.random.default_rng(0).integers(0, WORDS, (ROWS, TOKENS + 1), np.int32)
    batch = {"source": tokens[:, ::-1][:, :-1], "tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    params = jax.eval_shape(model.init, jax.random.key(0), batch["source"], batch["tokens"])["params"]
    draws = np.random.default_rng(1)
    params = jax.tree.map(lambda p: jnp.asarray(draws.normal(size=p.shape) * 0.3, p.dtype), params)

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, batch["source"], batch["tokens"], **rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            counts = batch["labels"] % 4 != 0
            return jnp.sum(losses * counts) / jnp.sum(counts)

        loss, grads = jscaler.value_and_grad(loss_of)(state["params"])
        updates, moments = TX.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return step, ({"params": params, "moments": TX.init(params)}, batch)


@made_once
def mbart(stacked: bool = False) -> Any:
    config = MBartConfig(HIDDEN, 2, 4, TOKENS, WORDS, param_dtype=jnp.zeros(()).dtype, stacked=stacked)
    return translating(MBart(config), train=True, rngs={"dropout": jax.random.key(7)})


@made_once
def translator() -> Any:
    return translating(Translator())


stacked_mbart = functools.partial(mbart, stacked=True)
long_gpt, stacked_gpt = functools.partial(gpt, layers=2), functools.partial(gpt, layers=2, stacked=True)
CASES = {
    "mbart": (interlaced(2, 4), mbart, 2),
    "mbart, dp": (interlaced(2, 4, data_parallel()), mbart, 4),
    "mbart, tp": (interlaced(2, 4, megatron(tp=2)), mbart, 4),
    "mbart, dp and tp": (interlaced(2, 4, megatron(dp=2, tp=2), recompute=True), mbart, 8),
    "mbart on 4": (interlaced(4, 4), mbart, 4),
    "stacked mbart, tp": (interlaced(2, 4, megatron(tp=2)), stacked_mbart, 4),
    "stacked mbart on 4": (interlaced(4, 4, recompute=True), stacked_mbart, 4),
    "mbart, megatron's own": (megatron(tp=2, pp=2, microbatches=4, schedule="interlaced"), mbart, 4),
    "gpt": (interlaced(2, 4, recompute=True), long_gpt, 2),
    "gpt, dp": (interlaced(2, 2, data_parallel()), long_gpt, 4),
    "stacked gpt": (interlaced(2, 4), stacked_gpt, 2),
    "stacked gpt, dp and tp": (interlaced(2, 2, megatron(dp=2, tp=2)), stacked_gpt, 8),
    "translator": (interlaced(2, 4), translator, 2),
    "translator, tp": (interlaced(2, 4, megatron(tp=2)), translator, 4),
    "translator on 4": (interlaced(4, 4), translator, 4),
}


@pytest.mark.parametrize("case", of_the_day(CASES, 4))
def test_the_numbers_are_those_of_one_device(case: str) -> None:
    assert_same_numbers(*CASES[case])


def lowered(policy: Any, make: Callable[..., Any], devices: int) -> StepPlan:
    step, arguments = make()
    found = jscaler.parallelize(policy, devices=devices)(step).lower(*arguments)
    jscaler.verify(found)
    return found.plan


@pytest.mark.parametrize(("make", "stages"), [(mbart, 4), (translator, 4), (stacked_gpt, 2)])
def test_the_published_order_runs_with_words_in_parts_on_all_devices(make: Callable[..., Any], stages: int) -> None:
    """No device has a copy of a table, of its moments or of logits; each stage between has layers."""
    plan = lowered(interlaced(stages, 4), make, stages)
    assert plan.instructions.table == SCHEDULES["interlaced"].table(stages, 4)
    assert out_of_order(plan) == []
    words = [layout for t, layout in plan.completed.inputs.items() if WORDS in t.shape and t.name.startswith("state/")]
    assert words
    assert all(np.prod(y.local_shape) * stages == np.prod(y.sizes) for y in words)
    between = [d for d in plan.plan.decisions if isinstance(d, OnDevices)][1:-1]
    assert [d.devices for d in between] == [(n,) for n in range(stages)]
    assert all(any(op.endswith(("/dot", "/dot[0:1]", "/dot[1:2]")) for op in d.ops) for d in between)


def sent(plan: StepPlan) -> list[tuple[str, tuple[int, ...], int]]:
    """Kind, shape and times of what goes between all devices and others, or is reduced by all, for each micro-batch."""
    from jscaler.lower.program import Adapt

    everywhere = tuple(range(plan.plan.num_devices))
    found = []
    for program in plan.programs:
        pass
    return found


def test_what_is_sent_for_words() -> None:
    """Of each look-up its parts; of logits their input, its gradient, a maximum and two sums per token."""
    plan = lowered(interlaced(2, 4), mbart, 2)
    activations = ROWS // 4 * TOKENS * HIDDEN * 4
    crossing = [(row.tensor.partition("@")[0], row.source, row.target, row.times) for row in plan.report.crossings]
    crossing = [row for row in crossing if row[3] == 4]
    print(crossing, plan.report.total, activations)
