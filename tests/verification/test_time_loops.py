"""A loop over parts that leaves a part out, visits one twice, or sums one twice is found in the program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from losing import losing

import jscaler
from jscaler import TimeSplit, plans
from jscaler.capture.jaxprs import open_jaxpr, trace_flat
from jscaler.errors import VerificationError
from jscaler.ir import Body
from jscaler.lower.block_cuts import uncut
from jscaler.lower.numbering import flatten
from jscaler.lower.program import Compute, Repeat, Task
from jscaler.lower.segment import Segment
from jscaler.lower.step_plan import StepPlan
from jscaler.rules.part_forms import Sliced
from jscaler.schedule import time_axes
from jscaler.verification import iterations
from jscaler.verification.time_loops import check_time_loops

DRAWS = np.random.default_rng(0)
PARAMS = {name: DRAWS.normal(size=(8, 8)) / 3 for name in "ab"}
X = DRAWS.normal(size=(8, 8))


def step(params: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["a"])
        z = h + jnp.tanh(h @ params["b"])
        return jnp.mean(z * z)

    return jscaler.value_and_grad(loss)(params, x)


def policy(forward: int, backward: int, devices: int = 1) -> Any:
    """Parts in time of a product, and of its gradient."""

    def split(graph: Any, places: Any) -> None:
        space = [jscaler.Split("c", 2)] if devices == 2 else []
        for path, parts in (("loss/dot", forward), ("loss/dot@backward", backward)):
            graph.op_assign(graph.op_trans(path, *space, TimeSplit("a", parts, "t")), places)

    return split


def planned(devices: int = 1, forward: int = 4, backward: int = 4) -> StepPlan:
    return jscaler.parallelize(policy(forward, backward, devices), devices=devices)(step).lower(PARAMS, X).plan


@losing
@pytest.mark.parametrize("devices", [1, 2])
def test_a_right_program_is_proven(devices: int) -> None:
    report = jscaler.verify(planned(devices))
    assert report.time_loops == 2
    assert "time loops   2, each part once" in str(report)


@losing
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("counts", [(4, 2), (2, 4)])
def test_two_counts_under_one_name_would_be_found(
    counts: tuple[int, int], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that lost half of a gradient, as it was before plans were refused."""
    monkeypatch.setattr(time_axes, "_check_counts", lambda known: None)
    with pytest.raises(VerificationError, match=r"beyond its array|are left out"):
        jscaler.verify(planned(devices, *counts))


@losing
def test_what_each_group_makes_for_itself_is_a_part_too() -> None:
    """The gradient of a row's sum is a literal, repeated: stages in front make it, too, and it does not cross."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            with jax.named_scope("first"):
                scale = jnp.tanh(x @ params["a"])
                h = jnp.exp(scale)
            rows = scale.sum(axis=-1)
            with jax.named_scope("second"):
                y = jnp.tanh(h @ params["b"])
            return jnp.mean(rows + y.sum(axis=-1))

        return jscaler.value_and_grad(loss)(params, x)

    stages = plans.pipeline(2, 2, at=["*second"], batch="x")
    assert jscaler.verify(jscaler.parallelize(stages, devices=2)(step).lower(PARAMS, X).plan).time_loops == 1


# -- faults in a program that was right


Fault = Callable[[Task], Task]


def planted(plan: StepPlan, fault: Fault) -> StepPlan:
    """``plan`` with a fault in its tasks, in what is emitted and in what it is compared with."""
    changed = 0

    def task(old: Task) -> Task:
        nonlocal changed
        if isinstance(old, Repeat):
            old = dataclasses.replace(old, tasks=tuple(map(task, old.tasks)))
        new = fault(old)
        changed += new is not old
        return new

    program = dataclasses.replace(plan.program, tasks=tuple(map(task, plan.program.tasks)))
    assert changed == 1, f"{changed} places"
    source = next(op.body for op in plan.source.ops if op.body is not None)
    flat = flatten(program, source.jaxpr)
    return dataclasses.replace(plan, segments=(Segment(program, flat, (uncut(program, flat),)),))


def rewritten(path: str, fun: Callable[..., Any]) -> Fault:
    """Another body for one op."""

    def fault(task: Task) -> Task:
        if not isinstance(task, Compute) or task.op.path != path:
            return task
        body = trace_flat(lambda *xs: [fun(*xs)], [v.aval for v in task.jaxpr.invars])
        return dataclasses.replace(task, jaxpr=body, op=dataclasses.replace(task.op, body=Body(body)))

    return fault


def of_length(length: int) -> Fault:
    def fault(task: Task) -> Task:
        if isinstance(task, Repeat) and task.loop.name == "t@loss/dot@backward":
            loop = dataclasses.replace(task.loop, length=length)
            return dataclasses.replace(task, loop=loop)
        return task

    return fault


def without_adding(task: Task) -> Task:
    """Each iteration hands on its own summand."""
    if not (isinstance(task, Repeat) and any(c.is_sum for c in task.loop.carries)):
        return task
    joins = {t.op.outputs[0]: t for t in task.tasks if isinstance(t, Compute) and t.op.path.endswith("@more")}
    carries = tuple(dataclasses.replace(c, out=joins[c.out].op.inputs[1]) for c in task.loop.carries)
    slots = tuple(
        (init, inside, joins[c.out].inputs[1], final)
        for (init, inside, _, final), c in zip(task.carries, task.loop.carries, strict=True)
    )
    return dataclasses.replace(task, loop=dataclasses.replace(task.loop, carries=carries), carries=slots)


def without_the_last(task: Task) -> Task:
    """What was added is dropped: the next iteration starts where this one did."""
    if not (isinstance(task, Repeat) and any(c.is_sum for c in task.loop.carries)):
        return task
    carries = tuple(dataclasses.replace(c, out=c.inside) for c in task.loop.carries)
    slots = tuple((init, inside, inside, final) for init, inside, _, final in task.carries)
    return dataclasses.replace(task, loop=dataclasses.replace(task.loop, carries=carries), carries=slots)


def twice(task: Task) -> Task:
    """The summand is added once more, to what it was added to."""
    return _joined_again(task, behind=True)


def read_again(task: Task) -> Task:
    """Something else is made of what was there before the summand."""
    return _joined_again(task, behind=False)


def _joined_again(task: Task, behind: bool) -> Task:
    if not (isinstance(task, Repeat) and any(c.is_sum for c in task.loop.carries)):
        return task
    (index,) = (i for i, t in enumerate(task.tasks) if isinstance(t, Compute) and t.op.path.endswith("@more"))
    join = task.tasks[index]
    assert isinstance(join, Compute)
    made = dataclasses.replace(join.op.outputs[0], name="once more")
    inputs = (join.op.outputs[0], join.op.inputs[1]) if behind else join.op.inputs
    op = dataclasses.replace(join.op, path="more", inputs=inputs, outputs=(made,))
    slots = (join.outputs[0], join.inputs[1]) if behind else join.inputs
    again = dataclasses.replace(join, op=op, inputs=slots, outputs=(9999,))
    tasks = (*task.tasks[: index + 1], again, *task.tasks[index + 1 :])
    if not behind:
        return dataclasses.replace(task, tasks=tasks)
    ((init, inside, _, final),) = task.carries
    (carry,) = task.loop.carries
    loop = dataclasses.replace(task.loop, carries=(dataclasses.replace(carry, out=made),))
    return dataclasses.replace(task, tasks=tasks, loop=loop, carries=((init, inside, 9999, final),))


def taken(start: Callable[[Any], Any], stride: int = 1) -> Callable[..., Any]:
    """Two of eight rows."""
    if stride == 1:
        return lambda x, i, *_: lax.dynamic_slice_in_dim(x, start(i), 2, 0)
    return lambda x, i, *_: lax.dynamic_slice_in_dim(x.reshape(2, 4, -1), start(i), 1, 1).reshape(2, -1)


CUT, MERGE, SUM, COUNT = "x@cut@t@loss/dot", "loss/dot:0@merge", "d(params/a)", "t@loss/dot:count"
FAULTS: dict[str, tuple[Fault, str]] = {
    "half the length": (of_length(2), "parts"),
    "twice the length": (of_length(8), "parts"),
    "a part twice": (rewritten(COUNT, lambda: jnp.array([0, 1, 1, 3], jnp.int32)), r"runs the parts \[0, 1, 1, 3\]"),
    "a part beyond": (rewritten(COUNT, lambda: lax.iota(jnp.int32, 4) + 1), r"runs the parts \[1, 2, 3, 4\]"),
    "another start": (rewritten(CUT, taken(lambda i: i)), "are left out"),
    "a start beyond": (rewritten(CUT, taken(lambda i: 2 * i + 1)), "beyond its array"),
    "the same start": (rewritten(CUT, taken(lambda i: i * 0)), "are left out"),
    "another stride": (rewritten(CUT, taken(lambda i: i, 4)), "another order"),
    "turned round": (rewritten(CUT, taken(lambda i: 6 - 2 * i)), "do not follow each other"),
    "merged turned round": (rewritten(MERGE, lambda x, *_: x[::-1].reshape(8, -1)), "another order"),
    "merged by rows": (rewritten(MERGE, lambda x, *_: jnp.swapaxes(x, 0, 1).reshape(8, -1)), "another order"),
    "merged without the last": (
        rewritten(MERGE, lambda x, *_: jnp.concatenate([x[:3], x[2:3]]).reshape(8, -1)), "2 come more|are left out",
    ),
    "the last summand alone": (without_adding, "last iteration leaves is not the whole: a summand"),
    "no summand": (without_the_last, "no iteration adds"),
    "a summand twice": (twice, "is joined twice"),
    "a sum that is read on the way": (read_again, "read 2 times in an iteration"),
    "not from nothing": (rewritten(f"{SUM}@loss/dot@start", lambda *_: jnp.ones((8, 8))), "starts at"),
}  # fmt: skip


@pytest.fixture(scope="module")
def right() -> StepPlan:
    with jax.enable_x64(True):
        plan = planned()
    assert check_time_loops(plan, []) == 2
    return plan


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, right: StepPlan) -> None:
    plant, message = FAULTS[fault]
    with jax.enable_x64(True):
        wrong = planted(right, plant)
        with pytest.raises(VerificationError, match=message):
            check_time_loops(wrong, [])


BY_NUMBERS = ("merged turned round", "merged without the last")  # rows are moved by a table of their numbers


def test_of_large_arrays_dims_are_looked_at_one_by_one(right: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same faults are found, or it is said that nothing was looked at."""
    monkeypatch.setattr(iterations, "MOST_CELLS", 0)
    left_out: list[str] = []
    assert check_time_loops(right, left_out) == 2
    assert not left_out
    for fault, (plant, message) in FAULTS.items():
        with jax.enable_x64(True):
            wrong, unseen = planted(right, plant), list[str]()
            if fault not in BY_NUMBERS:
                with pytest.raises(VerificationError, match=message):
                    check_time_loops(wrong, unseen)
                continue
            check_time_loops(wrong, unseen)
            assert unseen


@pytest.mark.one_day_in(2)
def test_rows_of_a_large_array() -> None:
    """A cut of (blocks, parts, rows), and what puts its parts together, on an array that no machine could hold."""
    aval = jax.ShapeDtypeStruct((6, 2**20, 2**20), jnp.float32)
    form = Sliced(1, 4, 8, 2**15)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    cut = open_jaxpr(jax.make_jaxpr(form.take)(aval, index))[0]
    moved = iterations.each_once(cut, [None, np.arange(8, dtype=np.int32)], 8, [], "cut")
    assert moved is not None
    assert moved.are_parts(aval.shape, 1, 4, 8, 2**15)
    assert not moved.are_parts(aval.shape, 1, 1, 8, 2**17)
    stack = jax.ShapeDtypeStruct((8, *form.shape(aval.shape)), jnp.float32)
    merged = iterations.each_once(open_jaxpr(jax.make_jaxpr(form.merge)(stack))[0], [None], 1, [], "merge")
    assert merged is not None
    assert merged.puts_together(stack.shape, 1, 4, 8, 2**15)
    assert not merged.puts_together(stack.shape, 1, 2, 8, 2**16)
    with pytest.raises(VerificationError, match="1048576 elements 131072 are left out, 131072 come more than once"):
        iterations.each_once(cut, [None, np.array([0, 1, 2, 3, 4, 5, 6, 6], np.int32)], 8, [], "cut")


@pytest.mark.parametrize("fun", [
    lambda y, i: Sliced(1, 1, 4, 4).take(y.reshape(4, 2, 8).transpose(0, 2, 1).reshape(4, 16), i),
    lambda y, i: Sliced(1, 1, 4, 4).take(y.reshape(4, 16)[::-1], i),
    lambda y, i: Sliced(0, 1, 4, 1).take(y.reshape(2, 2, 16).transpose(1, 0, 2).reshape(4, 16), i),
])  # fmt: skip
def test_rows_that_change_places_on_the_way(fun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element comes once, in another place than its part's."""
    jaxpr = open_jaxpr(jax.make_jaxpr(fun)(jnp.zeros((4, 16)), 0))[0]
    args = [None, np.arange(4, dtype=np.int32)]
    for most in (10**9, 0):
        monkeypatch.setattr(iterations, "MOST_CELLS", most)
        moved = iterations.each_once(jaxpr, args, 4, [], "cut")
        assert moved is None or not (moved.are_parts((4, 16), 1, 1, 4, 4) or moved.are_parts((4, 16), 0, 1, 4, 1))


def test_equal_dims_that_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "MOST_CELLS", 0)
    take = Sliced(0, 1, 4, 1).take
    args = [None, np.arange(4, dtype=np.int32)]
    for turned in (False, True):
        fun = lambda y, i, turned=turned: take(y.transpose(0, 2, 1) if turned else y, i)  # noqa: E731
        moved = iterations.each_once(open_jaxpr(jax.make_jaxpr(fun)(jnp.zeros((4, 3, 3)), 0))[0], args, 4, [], "cut")
        assert moved is not None
        assert moved.are_parts((4, 3, 3), 0, 1, 4, 1) != turned
