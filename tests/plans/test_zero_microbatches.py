"""ZeRO over micro-batches: what is reduced once and what each time, and where parameters are whole."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from of_the_day import of_the_day
from plan_steps import COLUMNS, assert_same_numbers, gpt, made_once, mlp, planned

import jscaler
from jscaler.capture.accumulating import accumulating_loops
from jscaler.lower.program import Adapt, Repeat, Task
from jscaler.lower.step_plan import StepPlan
from jscaler.plans import accumulate, co_shard, data_parallel, megatron, zero1, zero2, zero3
from jscaler.report.targets import described_devices
from models import make_model
from models.recipes import RECIPES
from models.training import make_optimizer


@made_once
def layers() -> Any:
    """A GPT whose layers are a Python loop."""
    return gpt()


@made_once
def again() -> Any:
    """A stack of layers that are computed again."""
    return gpt(layers=2, heads=8, stacked=True, remat=True)


def kinds(tasks: Iterable[Task]) -> Counter[str]:
    """The collectives among ``tasks``, without those of loops in them; scalars too."""
    adapters = (task.adapter for task in tasks if isinstance(task, Adapt))
    steps = (step.kind for adapter in adapters for step in adapter.steps)
    return Counter(kind for kind in steps if kind not in ("slice", "value_mask"))


def loop_of(plan: StepPlan) -> Repeat:
    (loop,) = (task for task in plan.program.tasks if isinstance(task, Repeat))
    return loop


PARAMETERS = 8  # of the MLP; the loss is one all-reduce


@pytest.mark.parametrize(
    ("inner", "inside", "outside"),
    [
        (data_parallel(), {}, {"all_reduce": PARAMETERS + 1}),
        (zero1(), {}, {"reduce_scatter": PARAMETERS, "all_gather": PARAMETERS, "all_reduce": 1}),
        (zero2(), {"reduce_scatter": PARAMETERS}, {"all_gather": PARAMETERS, "all_reduce": 1}),
        # forward all parameters; backward again the kernels of all layers but the first
        (zero3(), {"reduce_scatter": PARAMETERS, "all_gather": PARAMETERS + 3}, {"all_reduce": 1}),
        (zero3(gather_once=True), {"reduce_scatter": PARAMETERS}, {"all_gather": PARAMETERS, "all_reduce": 1}),
    ],
)
def test_what_is_sent_each_time_and_what_once(inner: Any, inside: dict[str, int], outside: dict[str, int]) -> None:
    plan = planned(accumulate(2, inner), mlp(), 4)
    assert kinds(loop_of(plan).tasks) == inside
    assert kinds(plan.program.tasks) == outside
    if not inside:  # the whole batch sends the same
        assert kinds(planned(inner, mlp(), 4).program.tasks) == outside


@pytest.mark.parametrize(("kernels", "biases"), [(None, None), (True, False), (False, True), (True, True)])
def test_each_parameter_may_be_reduced_each_time_or_once(kernels: bool | None, biases: bool | None) -> None:
    """ZeRO's second stage for some parameters, and its first for others, in one plan."""
    said = {"kernel": kernels, "bias": biases}

    def policy(graph: Any, devices: Any) -> None:
        for tensor in graph.graph.inputs:
            if "params" in tensor.name:
                graph.shard(tensor, 0, devices, each_time=said[tensor.name.rpartition("/")[2]])
        data_parallel()(graph, devices)

    plan = planned(accumulate(2, plan=policy), mlp(), 4)
    often = PARAMETERS // 2 * (bool(kernels) + bool(biases))
    assert kinds(loop_of(plan).tasks)["reduce_scatter"] == often
    assert kinds(plan.program.tasks)["reduce_scatter"] == PARAMETERS - often


@pytest.mark.parametrize("inner", [zero2(), zero3()])
def test_sums_are_held_in_parts(inner: Any) -> None:
    plan = planned(accumulate(2, inner), mlp(), 4)
    (loop,) = plan.graph.loops.values()
    carried = zip(loop.carries, plan.completed.loops[loop.name].carries, strict=True)
    sums = [layout for carry, layout in carried if carry.inside.shape]
    assert len(sums) == PARAMETERS
    for layout in sums:
        assert not layout.values
        assert sum(layout.local_shape) < sum(layout.shape)


def test_of_a_stack_of_layers_a_slice_is_scattered_in_its_own_iteration() -> None:
    plan = planned(accumulate(2, zero3()), again(), 4)
    outer = loop_of(plan)
    forward, backward = (task for task in outer.tasks if isinstance(task, Repeat))
    assert kinds(forward.tasks) == {"all_gather": 16}
    assert kinds(backward.tasks)["reduce_scatter"] == 16
    assert kinds(outer.tasks)["reduce_scatter"] == 3  # the tied table, the last norm
    # positions are looked up once, for all; the loss
    assert kinds(plan.program.tasks) == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


def test_a_stack_is_gathered_once_if_that_is_asked_for() -> None:
    plan = planned(accumulate(2, zero3(gather_once=True)), again(), 4)
    outer = loop_of(plan)
    inner = [task for task in outer.tasks if isinstance(task, Repeat)]
    assert all("all_gather" not in kinds(tasks) for tasks in (outer.tasks, *(loop.tasks for loop in inner)))
    assert kinds(inner[-1].tasks)["reduce_scatter"] == 16
    assert kinds(plan.program.tasks)["all_gather"] == 16 + 3 + 1  # layers; the tied table and the last norm; positions
    stored = [t for t in plan.graph.inputs if t.name.startswith("state/params") and "kernel" in t.name]
    assert all(any(plan.completed.inputs[t].cuts) for t in stored)


def test_casts_are_gathered_in_few_bits_inside_of_the_loop() -> None:
    plan = planned(accumulate(2, zero3()), gpt(dtype=jnp.bfloat16), 4)
    found = [e for e in plan.flat.exchanges if isinstance(e.adapt, Adapt) and "kernel@" in e.adapt.tensor.name]
    gathers = [e for e in found if e.adapt.adapter.steps[0].kind == "all_gather"]  # type: ignore[union-attr]
    assert {e.input.aval.dtype.name for e in gathers} == {"bfloat16"}  # type: ignore[attr-defined]
    assert len(gathers) == 2 * 6


@pytest.mark.one_day_in(2)
def test_only_loops_over_the_batch_accumulate() -> None:
    """The parts of a layer hand their gradients on to the layer before: what they read is made whole in front of them."""
    nested = planned(accumulate(2, co_shard(2, plan=zero3(), loss=False)), gpt(), 2)
    assert {loop.time for loop in nested.graph.loops.values()} == {"microbatch", "co_shard"}
    found = accumulating_loops(nested.graph)
    assert {nested.graph.loops[name].time for name in found} == {"microbatch"}
    assert kinds(nested.program.tasks)["all_gather"] == 1  # positions
    alone = planned(co_shard(2, plan=zero3()), gpt(), 2)
    assert not accumulating_loops(alone.graph)
    tokens = next(t for t in alone.program.tasks if isinstance(t, Repeat) and t.loop.time == "tokens")
    assert not kinds(tokens.tasks)


def test_parts_of_a_backward_fetch_again() -> None:
    """Without recompute, too: what the forward parts have gathered is not kept for those of the backward pass."""
    plan = planned(co_shard(2, plan=zero3(), recompute=False), gpt(), 4)
    fences = [op for op in plan.graph.ops if op.path.startswith("co_shard@") and op.path.endswith("@refetch")]
    assert [op.loop for op in fences] == [None, None]  # of the heads, and of the hidden units
    assert all("kernel" in t.name for op in fences for t in op.inputs if t.role != "gradient" and len(t.shape) > 1)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("plan", "make"),
    of_the_day(
        [
            (accumulate(3, zero2()), mlp),
            (accumulate(2, megatron(dp=2, tp=2, columns=COLUMNS, zero=2)), mlp),
            (accumulate(2, zero3()), layers),
            (accumulate(2, zero3(gather_once=True)), again),
            (accumulate(2, megatron(dp=2, tp=2, zero=3)), again),
        ]
    ),
)
def test_the_numbers_are_those_of_one_device(plan: Any, make: Any) -> None:
    assert_same_numbers(plan, make, 4)


@pytest.mark.one_day_in(2)
def test_co_shard_in_micro_batches_with_parameters_in_parts() -> None:
    assert_same_numbers(accumulate(2, co_shard(2, plan=zero3(), loss=False)), layers, 2)


@pytest.mark.aot
def test_sums_of_a_stack_take_less_memory_in_parts() -> None:
    sizes: dict[str, Any] = {"hidden": 128, "layers": 12, "heads": 8, "sequence": 16, "stacked": True, "remat": True}
    step, (state, batch) = gpt(optax.adam(1e-3), **sizes)
    batch = jax.tree.map(lambda x: jnp.concatenate([x] * 2), batch)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))
    devices = described_devices("8xH100-80GB")
    peaks = {}
    for plan in (zero1(), zero2(), zero3()):
        lowered = jscaler.parallelize(accumulate(2, plan), devices=devices, donate_argnames="state")(step)
        memory = lowered.lower(state, batch).compile().memory_analysis()
        peaks[plan.__name__] = memory.temp_size_in_bytes
    assert peaks["zero3"] < parameters / 2, (peaks, parameters)
    assert peaks["zero1"] < 1.5 * parameters, (peaks, parameters)  # the sums; what is added to them is of one layer
    assert peaks["zero2"] < peaks["zero1"] - parameters / 2, (peaks, parameters)  # the sums lie in parts


@pytest.mark.parametrize("inner", [zero2(), zero3()])
def test_a_cast_behind_the_sum_over_parts_does_not_go_on(inner: Any) -> None:
    """What is left of a norm's backward behind the loop casts the gradient of its scale."""
    model, config = make_model("llama", "nano", layers=2, dtype=jnp.bfloat16)
    recipe = RECIPES["llama"]
    state = recipe.make_state(model, config, make_optimizer(), jax.random.key(0))
    words = jax.random.randint(jax.random.key(1), (8, config.sequence), 0, config.vocabulary)
    lowered = jscaler.parallelize(accumulate(2, inner), devices=4)(recipe.step).lower(
        state, {"tokens": words, "labels": words}
    )
    (loop,) = lowered.plan.graph.loops.values()
    assert accumulating_loops(lowered.plan.graph) == {loop.name}
    carried = zip(loop.carries, lowered.plan.completed.loops[loop.name].carries, strict=True)
    gradients = {gradient for call in lowered.plan.graph.calls for gradient in call.gradients}
    sums = [layout for carry, layout in carried if carry.final in gradients]
    assert sums
    assert all(any(layout.cuts) and not layout.values for layout in sums)
