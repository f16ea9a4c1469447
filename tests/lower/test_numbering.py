"""Value numbering: arithmetic that a backward body repeats is done once; what is fenced or has an effect is kept."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from lower.steps import (
    MOMENTUM,
    batch_and_hidden,
    make_batch,
    make_params,
    make_state,
    make_step,
    mlp_loss,
    planned,
    tied_loss,
)

import jscaler
from jscaler.capture.jaxprs import evaluate, make_jaxpr
from jscaler.lower.flat_program import FlatLoop, FlatProgram, reads, results
from jscaler.lower.numbering import flatten
from jscaler.primitives import Order, Plan


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """All equations of a jaxpr, those of the jaxprs it calls included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


def counted(*jaxprs: Any) -> Counter[str]:
    return Counter(eqn.primitive.name for jaxpr in jaxprs for eqn in equations(jaxpr))


def in_flat(flat: FlatProgram) -> Counter[str]:
    """The primitives of a program without loops, and of the jaxprs that its equations call."""
    inner = [jaxpr for eqn in flat.equations for jaxpr in core.jaxprs_in_params(eqn.params)]
    return Counter(eqn.primitive.name for eqn in flat.equations) + counted(*inner)


def flat_of(fun: Any, *args: Any, plan: Any = "single", devices: int = 1) -> FlatProgram:
    return jscaler.parallelize(plan, devices=devices)(fun).lower(*args).plan.flat


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("loss_fn", "plan", "devices"),
    [
        (mlp_loss, "single", 1),
        (mlp_loss, "data_parallel", 4),
        (mlp_loss, batch_and_hidden, 4),
        (tied_loss, "single", 1),
        (tied_loss, "data_parallel", 4),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_backward_pass_computes_nothing_that_the_forward_pass_has(loss_fn: Any, plan: Any, devices: int) -> None:
    theirs = counted(jax.make_jaxpr(jax.value_and_grad(loss_fn))(make_params(), make_batch()))
    ours = in_flat(planned(plan, devices, loss_fn).flat)
    names = ("dot_general", "exp", "log", "tanh", "rsqrt")
    assert {n: ours[n] for n in names} == {n: theirs[n] for n in names}
    assert theirs["dot_general"] > 3


def test_equal_arithmetic_is_done_once() -> None:
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("a"):
            one = jnp.sin(x) @ x
        with jax.named_scope("b"):
            two = jnp.sin(x) @ x
        return one + two

    ours = in_flat(flat_of(step, jnp.ones((4, 4))))
    assert (ours["sin"], ours["dot_general"], ours["add"]) == (1, 1, 1)


def test_different_parameters_or_literals_are_different_values() -> None:
    def step(x: jax.Array) -> tuple[jax.Array, ...]:
        return x.sum(0), x.sum(1), x + 1.0, x + 2.0, x**2, x**3, x.astype(jnp.int32), x.astype(jnp.float16)

    x = jnp.arange(4.0).reshape(2, 2)
    ours = in_flat(flat_of(step, x))
    assert (ours["reduce_sum"], ours["add"], ours["convert_element_type"]) == (2, 2, 2)
    for mine, theirs in zip(jscaler.parallelize("single", devices=1)(step)(x), step(x), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_literals_that_compare_equal_but_differ_are_kept_apart() -> None:
    """0.0 == -0.0 and 1 == 1.0 == True, but they are not the same values."""

    def step(x: jax.Array) -> tuple[jax.Array, ...]:
        return 1.0 / (x * 0.0), 1.0 / (x * -0.0)

    plus, minus = jscaler.parallelize("single", devices=1)(step)(jnp.ones(2))
    assert (float(plus[0]), float(minus[0])) == (np.inf, -np.inf)


def test_copies_behind_optimization_barriers_are_kept_apart() -> None:
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("a"):
            one = jnp.sin(jax.lax.optimization_barrier(x)) @ x
        with jax.named_scope("b"):
            two = jnp.sin(jax.lax.optimization_barrier(x)) @ x
        return one + two

    ours = in_flat(flat_of(step, jnp.ones((4, 4))))
    assert (ours["optimization_barrier"], ours["sin"], ours["dot_general"]) == (2, 2, 2)


@pytest.mark.parametrize(("plan", "devices"), [("single", 1), ("data_parallel", 4)])
def test_what_jax_checkpoint_recomputes_is_recomputed(plan: str, devices: int) -> None:
    """The backward pass of a checkpointed function repeats its forward pass, as under ``jax.jit``."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        with jax.named_scope("layer"):
            h = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ params["up"]["kernel"])))(batch["x"])
        return jnp.mean(h**2)

    theirs = counted(jax.make_jaxpr(jax.value_and_grad(loss_fn))(make_params(), make_batch()))
    ours = in_flat(planned(plan, devices, loss_fn).flat)
    assert (ours["sin"], ours["dot_general"]) == (theirs["sin"], theirs["dot_general"])
    assert theirs["sin"] > 2


def test_what_a_loop_makes_is_made_again_behind_it() -> None:
    """No variable of a body is known outside; what is made in front of a loop is known in it."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        before = jnp.cos(w)

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("inside"):
                return jnp.tanh(carry @ jnp.sin(w)) @ jnp.cos(w), None

        last, _ = jax.lax.scan(body, x, None, length=3)
        with jax.named_scope("behind"):
            last = last @ jnp.sin(w)
        return (last @ before).sum()

    def step(w: jax.Array, x: jax.Array) -> Any:
        return jscaler.value_and_grad(loss)(w, x)

    w, x = jnp.linspace(0.2, 1.0, 16).reshape(4, 4), jnp.ones((2, 4))
    flat = flat_of(step, w, x)
    inside = Counter(e.primitive.name for loop in flat.items if isinstance(loop, FlatLoop) for e in loop.items)
    outside = Counter(eqn.primitive.name for eqn in flat.items if isinstance(eqn, core.JaxprEqn))
    assert (inside["sin"], outside["sin"]) == (1, 1)
    assert (inside["cos"], outside["cos"]) == (0, 1)
    for mine, theirs in zip(
        jscaler.parallelize("single", devices=1)(step)(w, x), jax.value_and_grad(loss)(w, x), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_an_exchange_is_one_with_another_of_its_adapter_and_dtype() -> None:
    plan = planned("data_parallel", 4)
    program = plan.program
    one = next(task for task in program.adapters if task.adapter.adds)
    assert one.reduce_dtype is None
    more = [replace(one, output=-1), replace(one, output=-2, reduce_dtype="float64")]
    flat = flatten(replace(program, tasks=(*program.tasks, *more)), plan.flat.source)
    same = [e for e in flat.exchanges if e.adapt.tensor == one.tensor and e.adapt.adapter == one.adapter]
    assert [e.adapt.reduce_dtype for e in same] == [None, "float64"]


def test_effects_happen_as_often_as_they_are_written() -> None:
    seen: list[float] = []

    def step(x: jax.Array) -> jax.Array:
        for _ in range(3):
            jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        return x * 2

    assert in_flat(flat_of(step, jnp.ones(4)))["debug_callback"] == 3
    jax.block_until_ready(jscaler.parallelize("single", devices=1)(step)(jnp.ones(4)))
    jax.effects_barrier()
    assert seen == [4.0] * 3


def test_an_effect_in_the_loss_is_not_repeated_by_its_backward() -> None:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        with jax.named_scope("layer"):
            h = batch["x"] @ params["up"]["kernel"]
            jax.debug.callback(lambda value: None, h)
            h = jnp.tanh(h)
        return jnp.mean(h**2)

    theirs = counted(jax.make_jaxpr(jax.value_and_grad(loss_fn))(make_params(), make_batch()))
    assert theirs["debug_callback"] == 1
    assert in_flat(planned("single", 1, loss_fn).flat)["debug_callback"] == 1


@pytest.mark.filterwarnings("ignore:plan .*side effects of ops that are copied:jscaler.PlanWarning")
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
def test_an_effect_sees_whole_values() -> None:
    """A debug print is not shown one device's rows, nor its summand."""
    seen: list[float] = []

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        with jax.named_scope("layer"):
            h = batch["x"] @ params["up"]["kernel"]
            total = jnp.sum(h**2)
            jax.debug.callback(lambda value: seen.append(float(value)), total)
        return total

    step = jscaler.parallelize("data_parallel", devices=4)(make_step(loss_fn))
    _, loss = jax.block_until_ready(step(make_state(MOMENTUM), make_batch()))
    jax.effects_barrier()
    assert seen
    np.testing.assert_allclose(seen, float(loss), rtol=1e-6)


def test_every_variable_is_assigned_once_before_it_is_read() -> None:
    flat = planned(batch_and_hidden, 4).flat
    written = [*flat.inputs, *(var for _, var in flat.part_indices)]
    for item in flat.items:
        assert set(reads(item)) <= set(written)
        written += results(item)
    assert len(written) == len(set(written))
    assert {v for v in flat.outputs if isinstance(v, core.Var)} <= set(written)


def test_what_nobody_reads_is_gone() -> None:
    flat = planned("data_parallel", 4).flat
    later = {v for v in flat.outputs if isinstance(v, core.Var)}
    for item in reversed(flat.items):
        assert later & set(results(item))
        later.update(reads(item))


def test_on_one_device_the_whole_step_is_equations_alone() -> None:
    """Run by hand, equation by equation, it gives the step's numbers."""
    plan = planned("single", 1)
    assert plan.flat.equations == plan.flat.items
    leaves = jax.tree.leaves((make_state(MOMENTUM), make_batch()))
    names = [t.name for t in plan.graph.inputs]
    assert len(names) == len(leaves) == len(plan.flat.inputs)
    env = dict(zip(plan.flat.inputs, leaves, strict=True))
    for eqn in plan.flat.equations:
        made = evaluate(make_jaxpr([eqn], reads(eqn), eqn.outvars, plan.flat.source), [env[v] for v in reads(eqn)])
        env.update(zip(eqn.outvars, made, strict=True))
    loss = env[plan.flat.outputs[-1]]
    np.testing.assert_allclose(loss, mlp_loss(make_params(), make_batch()), rtol=1e-6)


def test_op_order_is_a_fence_around_its_reader() -> None:
    """XLA may run independent work in any order, so an order that was asked for is a barrier."""

    def ordered(graph: Any, devices: np.ndarray) -> None:
        graph.op_order(graph["loss/div"], graph["up/dot@backward"])

    assert in_flat(planned("single", 1).flat)["optimization_barrier"] == 0
    plan = planned(ordered, 1)
    assert plan.plan == Plan("ordered", 1, (Order("loss/div", "up/dot@backward"),))
    barriers = [e for e in plan.flat.equations if e.primitive.name == "optimization_barrier"]
    assert len(barriers) == 1
    div = next(e for e in plan.flat.equations if e.primitive.name == "div")
    assert div.outvars[0] in barriers[0].invars
