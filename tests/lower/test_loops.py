"""Stacks of layers under plans: one device's numbers, each loop one ``lax.scan``, collectives where they belong."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from losing import losing
from lower.layers import (
    LAYERS,
    PROGRAMS,
    barely_loops,
    batch,
    batch_and_hidden,
    columns_then_rows,
    net_batch,
    net_state,
    net_step,
    params,
    step_of,
)
from lower.steps import with_segment
from of_the_day import of_the_day

import jscaler
from jscaler import Chunk, Replicate, Split
from jscaler.capture.jaxprs import shape
from jscaler.comparison import twin
from jscaler.errors import OrderError, SplitError, VerificationError
from jscaler.lower.flat_program import FlatLoop
from jscaler.lower.program import Adapt, Repeat
from jscaler.lower.step_plan import StepPlan

STEPS = 5


@functools.cache
def expected() -> tuple[Any, list[Any]]:
    """State and losses of ``jax.jit`` in float64."""
    fun, state, losses = jax.jit(net_step(False)), net_state(), []
    for _ in range(STEPS):
        state, loss = fun(state, net_batch())
        losses.append(loss)
    return state, losses


def lowered(policy: Any, devices: int, remat: bool = False) -> Any:
    return jscaler.parallelize(policy, devices=devices)(net_step(remat)).lower(net_state(), net_batch())


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("policy", "devices", "remat"),
    of_the_day([("data_parallel", 4, False), (columns_then_rows, 2, True), (batch_and_hidden, 4, False)], 2),
)
def test_five_steps_are_those_of_one_device(policy: Any, devices: int, remat: bool) -> None:
    with jax.enable_x64(True):
        final, losses = expected()
        step = lowered(policy, devices, remat)
        jscaler.verify(step)
        compiled, state = step.compile(), net_state()
        for want in losses:
            state, loss = compiled(state, net_batch())
            np.testing.assert_allclose(loss, want, rtol=0, atol=1e-11)
        for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(final), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def dealt(graph: Any, devices: np.ndarray) -> None:
    """Every third op that can be, split along one of its factors: layouts that fit nowhere."""
    for index, op in enumerate(graph.ops):
        factors = [f for f in graph.rule(op).factors.values() if f.kind != "blocked" and f.size % devices.size == 0]
        if index % 3 == 0 and factors and (op.kind != "backward" or index % 2):
            graph.op_assign(graph.op_trans(op, Split(factors[index % len(factors)].name, devices.size)), devices)


@losing
@pytest.mark.parametrize("loss_fn", of_the_day([*PROGRAMS[::6], *PROGRAMS[1::2], barely_loops]), ids=lambda f: f.__name__)
def test_all_kinds_of_loops_under_a_plan(loss_fn: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        step = jscaler.parallelize(dealt, devices=2)(step_of(loss_fn)).lower(params(), batch())
        jscaler.verify(step)
        wanted = jax.jit(step_of(loss_fn))(params(), batch())
        for ours, theirs in zip(jax.tree.leaves(step.compile()(params(), batch())), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11)


def test_one_checkpointed_layer_is_computed_again() -> None:
    """XLA makes no loop of one iteration: nothing but the fence keeps it from merging forward and clones."""

    def step(layer: Callable[..., Any], p: Any, b: Any) -> Any:
        return jscaler.value_and_grad(lambda p: lax.scan(lambda x, w: (layer(x, w), None), b["x"], p["w"][:1])[0].sum())(p)

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    kept, again = (
        jscaler.parallelize("single", devices=1)(functools.partial(step, one)).lower(params(), batch()).compile().as_text()
        for one in (layer, jax.checkpoint(layer))
    )
    assert again.count(" tanh(") > kept.count(" tanh(")


def repeats(plan: StepPlan) -> list[Repeat]:
    return [task for task in plan.program.tasks if isinstance(task, Repeat)]


def test_gradients_of_layers_are_reduced_once_after_the_loop() -> None:
    plan = lowered("data_parallel", 4).plan
    assert [loop.loop.name for loop in repeats(plan)] == ["scan", "scan@backward"]
    assert not any(isinstance(task, Adapt) for loop in repeats(plan) for task in loop.tasks)
    stacks = {y.stack for y in repeats(plan)[1].loop.ys}
    reduced = {t.tensor for t in plan.program.tasks if isinstance(t, Adapt)}
    assert stacks <= reduced


def test_what_every_layer_reads_is_gathered_once_before_the_loop() -> None:
    def split_shared(graph: Any, devices: np.ndarray) -> None:
        for op in graph.update():
            if "p/s" in op.path:
                factor = graph.rule(op).results[0][0][0]
                graph.op_assign(graph.op_trans(op, Split(factor, devices.size)), devices)
                return

    plan = jscaler.parallelize(split_shared, devices=2)(step_of(PROGRAMS[0])).lower(params(), batch()).plan
    assert not any(isinstance(t, Adapt) and t.tensor.name == "p/s" for r in repeats(plan) for t in r.tasks)


def sum_of_gradients(*algorithms: Any) -> Callable[..., None]:
    """Rows of the batch dealt out, and the sum of ``p/s``'s gradients over the layers placed so."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        for op, rows in graph.factor_of("b/x", 0).items():
            if op.kind == "forward" and graph.rule(op).factors[rows].kind != "blocked":
                graph.op_assign(graph.op_trans(op, Split(rows, devices.size)), devices)
        (added,) = graph.select("p/s@sum@*", "backward")
        graph.op_assign(graph.op_trans(added, *algorithms), devices)

    return policy


@pytest.mark.parametrize(
    ("algorithm", "kind", "text"),
    [
        (Split("a", 2), "reduce_scatter", "D(2,1)"),
        (Split("b", sizes=(3, 1)), "point_to_point", "D(1,3+1)"),
        (Replicate(2), "all_reduce", "R2 V1 D(1,1)"),
    ],
    ids=["rows", "uneven columns", "copies"],
)
def test_a_policy_may_place_the_sum_of_a_loops_gradients(algorithm: Any, kind: str, text: str) -> None:
    step = jscaler.parallelize(sum_of_gradients(algorithm), devices=2)(step_of(PROGRAMS[0])).lower(params(), batch())
    jscaler.verify(step)
    inside = [t for t in repeats(step.plan)[1].tasks if isinstance(t, Adapt)]
    assert [(a.tensor.shape, [s.kind for s in a.adapter.steps]) for a in inside] == [((4, 4), [kind])]
    assert text in str(inside[0].adapter.target)


def test_the_sum_of_a_loops_gradients_is_not_chunked() -> None:
    with pytest.raises(SplitError, match=r"'p/s@sum@.*it only adds up what other ops make; split those"):
        jscaler.parallelize(sum_of_gradients(Chunk("a", 2)), devices=2)(step_of(PROGRAMS[0])).lower(params(), batch())


def test_tensor_parallel_layers_reduce_in_the_loop_and_explain_counts_them() -> None:
    plan = lowered(columns_then_rows, 2).plan
    for loop in repeats(plan):
        kinds = [step.kind for task in loop.tasks if isinstance(task, Adapt) for step in task.adapter.steps]
        assert kinds == ["all_reduce"]
    lines = {line.split()[1]: line for line in plan.explain().splitlines() if line.startswith("forward")}
    assert f" {LAYERS}  " in lines["layers/mlp/up/dot"]
    assert f"{LAYERS}× all_reduce" in lines["layers/mlp/down/add"]


@pytest.mark.one_day_in(2)
def test_the_stack_of_parameters_and_its_optimizer_state_lie_as_the_slices_do() -> None:
    plan = lowered(columns_then_rows, 2).plan
    specs = {t.name: plan.completed.inputs[t].partition_spec() for t in plan.graph.inputs if "mlp/up/kernel" in t.name}
    assert len(specs) == 3
    assert set(specs.values()) == {jax.sharding.PartitionSpec(None, None, plan.program.group.names[0])}


@pytest.mark.one_day_in(2)
def test_the_twin_has_the_same_numbers() -> None:
    step = lowered(batch_and_hidden, 4, remat=True)
    leaves = jax.tree.leaves((net_state(), net_batch()))
    placed = [jax.device_put(x, s) for x, s in zip(leaves, step.executable.in_shardings, strict=True)]
    wanted = jax.tree.leaves(jax.jit(net_step(False))(net_state(), net_batch()))
    for ours, theirs in zip(twin(step)(*placed), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_order_in_loops_and_around_them() -> None:
    def after(graph: Any, devices: np.ndarray) -> None:
        graph.op_order("layers/mlp/up/dot", "loss/reduce_sum")
        graph.op_order("layers/norm/rsqrt", "layers/Dropout_0/random_bits")

    lowered(after, 1)

    def backwards(graph: Any, devices: np.ndarray) -> None:
        graph.op_order("head/dot", "layers/mlp/up/dot")

    with pytest.raises(OrderError, match=r"head/dot.*scan|scan.*head/dot"):
        lowered(backwards, 1)


def changed(plan: StepPlan, index: int, **changes: Any) -> StepPlan:
    """The plan with its ``index``-th emitted loop changed."""
    loops = [i for i, item in enumerate(plan.flat.items) if isinstance(item, FlatLoop)]
    at, items = loops[index], list(plan.flat.items)
    items[at] = dataclasses.replace(items[at], **changes)  # type: ignore[type-var]
    return with_segment(plan, flat=dataclasses.replace(plan.flat, items=tuple(items)))


def test_the_verifier_finds_what_is_wrong_with_a_loop() -> None:
    step = jscaler.parallelize("single", devices=1)(step_of(PROGRAMS[1])).lower(params(), batch())
    plan = step.plan
    jscaler.verify(plan)
    loop = next(s for s in plan.flat.items if isinstance(s, FlatLoop))
    with pytest.raises(VerificationError, match="computes another value"):  # the last layer first
        jscaler.verify(changed(plan, 0, loop=dataclasses.replace(loop.loop, reverse=not loop.loop.reverse)))
    shapes = [jnp.shape(inside.aval) for _, inside, _, _ in loop.carries]
    first, second = [i for i, s in enumerate(shapes) if s == (2, 4)]
    carries = list(loop.carries)
    a, b = carries[first], carries[second]
    carries[first], carries[second] = (a[0], a[1], b[2], a[3]), (b[0], b[1], a[2], b[3])
    with pytest.raises(VerificationError, match="computes another value"):  # two carries exchanged
        jscaler.verify(changed(plan, 0, carries=tuple(carries)))


def test_the_verifier_finds_a_reduction_that_a_loop_leaves_out() -> None:
    plan = lowered(columns_then_rows, 2).plan
    (at,) = [i for i, t in enumerate(plan.program.tasks) if isinstance(t, Repeat) and t.loop.name == "scan"]
    task = plan.program.tasks[at]
    assert isinstance(task, Repeat)
    (gone,) = [t for t in task.tasks if isinstance(t, Adapt)]

    def around(t: Any) -> Any:
        renamed = tuple(gone.input if s == gone.output else s for s in t.inputs) if not isinstance(t, Adapt) else ()
        return dataclasses.replace(t, inputs=renamed) if renamed else t

    tasks = list(plan.program.tasks)
    tasks[at] = dataclasses.replace(task, tasks=tuple(around(t) for t in task.tasks if t is not gone))
    broken = with_segment(plan, program=dataclasses.replace(plan.program, tasks=tuple(tasks)))
    with pytest.raises(VerificationError):
        jscaler.verify(broken)


def test_a_loop_makes_its_counts_and_zeros_itself() -> None:
    """Random bits of equal shape are drawn in front of a loop and in it: the counts that they are made of are not kept."""

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def drop(x: jax.Array, key: jax.Array) -> jax.Array:
            return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, jnp.zeros(x.shape, x.dtype))

        def loss(w: jax.Array) -> jax.Array:
            keys = jax.random.split(batch["key"], LAYERS + 1)
            x = drop(batch["x"], keys[0])
            body = jax.checkpoint(lambda x, of: (drop(jnp.tanh(x @ of[0]), of[1]), None), prevent_cse=False)
            return (jax.lax.scan(body, x, (w, keys[1:]))[0] ** 2).mean()

        value, gradient = jscaler.value_and_grad(loss)(w)
        return w - gradient, value

    args = jax.random.normal(jax.random.key(0), (LAYERS, 6, 6)), {"x": jnp.ones((8, 6)), "key": jax.random.key(1)}
    run = jscaler.parallelize("data_parallel", devices=4)(step)
    loops = [s for s in run.lower(*args).plan.flat.items if isinstance(s, FlatLoop)]
    assert len(loops) == 2
    for loop in loops:
        own = {*(init for init, *_ in loop.carries), *(stack for stack, _ in loop.xs)}
        assert all(shape(v) == () for v in loop.reads if v not in own), loop.reads
    for ours, whole in zip(run(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5)
