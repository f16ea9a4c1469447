"""The interlaced pipeline: words over all devices, layers in stages; one device's numbers, and what is sent for words."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from plan_steps import assert_same_numbers, gpt, made_once, mlp

import jscaler
from bench.schedules import out_of_order
from jscaler.errors import PlanError
from jscaler.lower.step_plan import StepPlan
from jscaler.plans import data_parallel, interlaced, megatron, pipeline, recompute_layers
from jscaler.primitives import OnDevices
from jscaler.tables import SCHEDULES, schedule_named
from jscaler.tables.simulator import UNITS, simulate_table
from models.mbart import MBart, MBartConfig

HIDDEN, WORDS, TOKENS, ROWS = 16, 32, 8, 8
TX = optax.sgd(0.1, momentum=0.9)


class Translator(nn.Module):
    """Nobody's: source and target have words of their own, the head is untied, and the target's look-up in the middle."""

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        kinds = {"dtype": jnp.zeros(()).dtype, "param_dtype": jnp.zeros(()).dtype}

        def layer(x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
            for y in (x, memory) if memory is not None else (x,):
                x = x + nn.MultiHeadDotProductAttention(2, **kinds)(nn.LayerNorm(**kinds)(x), y)
            return x + nn.Dense(HIDDEN, **kinds)(nn.relu(nn.Dense(24, **kinds)(x)))

        position = self.param("position", nn.initializers.ones, (TOKENS, HIDDEN), float)
        x = nn.Embed(WORDS, HIDDEN, **kinds)(source) * 4 + position
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
    "gpt, interlaced blocks": (interlaced(2, 4, recompute_layers()), long_gpt, 2),
    "gpt, dp": (interlaced(2, 2, data_parallel()), long_gpt, 4),
    "stacked gpt": (interlaced(2, 4), stacked_gpt, 2),
    "stacked gpt, dp and tp": (interlaced(2, 2, megatron(dp=2, tp=2)), stacked_gpt, 8),
    "odd words": (interlaced(4, 4), functools.partial(long_gpt, vocabulary=33), 4),
    "translator": (interlaced(2, 4), translator, 2),
    "translator, tp": (interlaced(2, 4, megatron(tp=2)), translator, 4),
    "translator on 4": (interlaced(4, 4), translator, 4),
}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("case", of_the_day(CASES, 8))
def test_the_numbers_are_those_of_one_device(case: str) -> None:
    assert_same_numbers(*CASES[case])


def lowered(policy: Any, make: Callable[..., Any], devices: int) -> StepPlan:
    step, arguments = make()
    found = jscaler.parallelize(policy, devices=devices)(step).lower(*arguments)
    jscaler.verify(found)
    return found.plan


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(("make", "stages", "mark"), [(mbart, 4, "+R"), (translator, 4, ""), (stacked_gpt, 2, "+R")])
def test_the_published_order_runs_with_words_in_parts_on_all_devices(
    make: Callable[..., Any], stages: int, mark: str
) -> None:
    """No device has a copy of a table, of its moments or of logits; each stage between has layers."""
    plan = lowered(interlaced(stages, 4, recompute=mark == "+R"), make, stages)
    schedule = schedule_named(f"interlaced{mark}")
    assert schedule is not None
    assert plan.instructions.table == schedule.table(stages, 4)
    assert out_of_order(plan) == []
    words = [layout for t, layout in plan.completed.inputs.items() if WORDS in t.shape and t.name.startswith("state/")]
    assert words
    assert all(np.prod(y.local_shape) * stages == np.prod(y.sizes) for y in words)
    between = [d for d in plan.plan.decisions if isinstance(d, OnDevices)][1:-1]
    assert [d.devices for d in between] == [(n,) for n in range(stages)]
    assert all(any(op.endswith(("/dot", "/dot[0:1]", "/dot[1:2]")) for op in d.ops) for d in between)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("make", "look_ups", "sides"), [(mbart, 1, 2), (translator, 2, 2), (long_gpt, 1, 1)])
def test_what_is_sent_for_words(make: Callable[..., Any], look_ups: int, sides: int) -> None:
    """Of four devices all-reduces of a micro-batch: for each look-up its parts, and backward what goes to all; the logits'
    input to all, and its gradient; and for each token a maximum and two sums. Nothing has the size of a table."""
    plan = lowered(interlaced(4, 4), make, 4)
    tokens = ROWS // 4 * TOKENS * 4  # bytes of a number for each, of one side
    moved = 2 * 3 / 4 * ((2 * sides + 2) * HIDDEN + 3) * tokens  # by a device
    assert plan.report.total == {"all_reduce": (4 * (2 * look_ups + 2 + 3), 4 * moved)}
    assert all(row.nbytes <= 4 * tokens * HIDDEN for row in plan.report.crossings)


@pytest.mark.one_day_in(2)
def test_a_tied_table_has_a_sum_for_each_end() -> None:
    """Between a micro-batch's logits and look-ups its gradient goes through all stages: none of the table's waits there."""
    plan = lowered(interlaced(4, 4), mbart, 4)
    left = [pair for b in plan.blocks for pair in zip(b.exports, b.flat.outputs[len(b.results) :], strict=True)]
    words = {number for number, value in left if value.aval.shape == (WORDS // 4, HIDDEN)}
    assert plan.spanning is not None
    assert len(words) == 2 + 2  # that of either end, at the start too
    assert words <= {number for carry in plan.spanning.carries for number in (carry.init, carry.out)}


@pytest.mark.one_day_in(3)
def test_ends_are_found_by_pipeline_and_megatron_too() -> None:
    """The same stages, and with parts of the batch the same words on each device."""
    first, second = (
        [d for d in lowered(policy, long_gpt, 2).plan.decisions if isinstance(d, OnDevices)]
        for policy in (pipeline(2, 4, "interlaced"), interlaced(2, 4, at=["block_1"]))
    )
    assert first == second
    plan = lowered(megatron(dp=1, tp=2, pp=2, microbatches=4, schedule="interlaced"), stacked_gpt, 4)
    (table,) = (y for t, y in plan.completed.inputs.items() if t.name == "state/params/embed/embedding")
    assert table.local_shape == (WORDS // 4, HIDDEN)


def test_a_model_without_words_has_no_ends() -> None:
    with pytest.raises(PlanError, match=r"has no such ends \(tables of words: none\): say with vocabulary"):
        lowered(interlaced(2, 4), mlp, 2)


def test_blocks_of_all_devices_wait_once_for_those_of_groups() -> None:
    """With four groups, eight micro-batches and one unit for each F, I and W; maybe all compute again in B."""
    devices = [range(4), *([n] for n in range(4))]
    table = SCHEDULES["interlaced"].table(4, 8)
    spans = [simulate_table(table, {**UNITS, "B": b}, devices=[*map(list, devices)]).makespan for b in (2, 3)]
    assert spans == [82, 110]  # of which a device works 72 and 96: here the ends' backward takes as long as a layer's


def test_stages_of_a_stack_run_in_the_order_of_the_table() -> None:
    """A micro-batch takes a forward and a backward of a stage, also where ends of stages are blocks beside their layers."""
    microbatches, stages = 8, 4
    deep = functools.partial(gpt, layers=4, stacked=True)
    plan = lowered(interlaced(stages, microbatches), deep, stages)
    names = plan.instructions.names
    taken = {"F": 1.0, "B": 2.0}
    seconds = [
        0.0 if n in plan.instructions.ends or len(block.group.devices) > 1 else sum(taken[k] for _, k in names.get(n, ()))
        for n, block in enumerate(plan.blocks)
    ]
    assert plan.instructions.ends
    found = jscaler.simulate(plan, seconds=seconds)
    assert 3 * microbatches < found.makespan <= 3 * (microbatches + stages + 1)
