"""Programs of the layers of a stack are twins, of one that a table cuts in pieces those of the middle stages: what is
copied of the first is what each would be by itself."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jscaler
from jscaler import plans, stages
from jscaler.lower.alike import program_keys
from jscaler.lower.level import Level
from jscaler.lower.program import Compute, Program, Repeat
from jscaler.lower.scopes import path_scope
from jscaler.lower.segment import Segment
from jscaler.lower.step_plan import StepPlan
from jscaler.lower.twins import twin_key
from jscaler.materialize import DeviceMesh
from jscaler.tables import schedule_named

STAGES = 5


def step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """Momentum for a stack of layers with a dropout, between two ends."""

    def loss_of(params: Any) -> jax.Array:
        def layer(x: jax.Array, at: Any) -> tuple[jax.Array, None]:
            kept = jax.random.bernoulli(jax.random.fold_in(batch["key"], at["number"]), 0.9, x.shape)
            return x + jnp.tanh(x @ at["w"]) * kept, None

        layers = {"w": params["layers"], "number": jnp.arange(2 * STAGES)}
        return jnp.mean((lax.scan(layer, batch["x"] @ params["first"], layers)[0] @ params["last"]) ** 2)

    params, moments = state
    loss, grads = value_and_grad(loss_of)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), loss


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    sizes = {"first": (4, 4), "layers": (2 * STAGES, 4, 4), "last": (4, 4)}
    params = {name: jnp.asarray(rng.normal(size=size) / 2, jnp.float32) for name, size in sizes.items()}
    batch = {"x": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "key": jax.random.key(1)}
    return (params, jax.tree.map(jnp.zeros_like, params)), batch


def planned(schedule: str) -> StepPlan:
    plan = plans.pipeline(STAGES, 4, schedule, plans.data_parallel())
    return jscaler.parallelize(plan, devices=2 * STAGES)(step).lower(*arguments()).plan


def halves_together() -> str:
    """A table whose backwards are halves, but for that of the last micro-batch, which is one executable."""
    schedule = schedule_named("zb_h1")
    assert schedule is not None
    return re.sub(r"(\d+)I3 (.*)\1W3", r"\1B3 \2", str(schedule.table(STAGES, 4)))


TABLES = {"1f1b": "1f1b", "zb_h1": "zb_h1", "halves together": halves_together()}


@pytest.fixture(scope="module", params=TABLES)
def made(request: pytest.FixtureRequest) -> StepPlan:
    return planned(TABLES[request.param])


def twins(made: StepPlan) -> list[Segment]:
    return [segment for segment in made.segments if any(block.like is not None for block in segment.blocks)]


def test_the_programs_of_layers_are_twins(made: StepPlan) -> None:
    """In each phase: the first of them is flattened and cut, and no other. A stage in one piece has its end in it."""
    groups, phases = made.completed.groups, {segment.program.phase for segment in made.segments}
    apart = {segment.program.phase for segment in made.segments if segment.program.of_layers}
    assert apart == (phases if made.instructions.ends else phases - {1}), "a table with W has a stage in one piece"
    alike = [groups[phase not in apart : len(groups) - (phase not in apart)] for phase in sorted(phases)]
    assert [s.program.group for s in twins(made)] == [group for own in alike for group in own[1:]]
    for segment in twins(made):
        assert {block.like and block.like.group for block in segment.blocks} == {alike[segment.program.phase][0]}
    ends = [s.program for s in made.segments if s.program.group in (groups[0], groups[-1]) and not s.program.of_layers]
    assert len(set(map(twin_key, ends))) == len(ends) == 2 * len(phases)


def test_a_twin_is_what_its_program_would_be_by_itself(made: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan is lowered once more, and no program is known for another's twin."""
    monkeypatch.setattr(stages, "twin_key", lambda program: object())
    alone = planned(str(made.instructions.table))
    assert not twins(alone)
    assert [segment.program.group for segment in alone.segments] == [segment.program.group for segment in made.segments]
    for segment, other in zip(made.segments, alone.segments, strict=True):
        if all(block.like is None for block in segment.blocks):
            continue
        assert str(segment.flat) == str(other.flat)
        for block, its in zip(segment.blocks, other.blocks, strict=True):
            assert str(block.flat) == str(its.flat)
            for name in ("group", "phase", "level", "takes", "results", "inputs", "outputs"):
                assert getattr(block, name) == getattr(its, name), name
            known = {*segment.program.imports, *segment.program.exports}  # other numbers are of what blocks hand on
            for mine, theirs in zip((*block.imports, *block.exports), (*its.imports, *its.exports), strict=True):
                assert mine == theirs if theirs in known else mine not in known
            assert program_keys([block, its])[0] == program_keys([block, its])[1]


def test_what_is_one_executable_of_twins_has_their_scopes(made: StepPlan) -> None:
    """An equation is the first twin's; XLA's text says of which stage's op it is."""
    found = [block for block in made.blocks if any(part.like is not None for part, _ in block.parts)]
    assert bool(found) == ({"0I0", "0B3"} <= {*str(made.instructions.table).split()})
    for block in found:
        scopes = {str(eqn.source_info.name_stack) for eqn in block.flat.equations}
        assert scopes >= {path_scope(path) for path in block.flat.origins.op.values() if "dot" in path} != set()


@pytest.mark.one_day_in(2)
def test_a_step_of_twins_gives_one_device_s_numbers() -> None:
    plan = plans.pipeline(STAGES - 1, 4)
    expected = jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))(*arguments())
    found = jscaler.parallelize(plan, devices=STAGES - 1)(step)(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def in_loop(change: Callable[[Repeat], Repeat]) -> Callable[[Program], Program]:
    """A program whose first loop is another."""

    def planted(program: Program) -> Program:
        place = next(i for i, task in enumerate(program.tasks) if isinstance(task, Repeat))
        loop = program.tasks[place]
        assert isinstance(loop, Repeat)
        return replace(program, tasks=(*program.tasks[:place], change(loop), *program.tasks[place + 1 :]))

    return planted


def in_op(change: Callable[[Compute], Compute]) -> Callable[[Program], Program]:
    """A program of which the first op of its first loop that computes something of two operands is another."""

    def planted(loop: Repeat) -> Repeat:
        place = next(i for i, one in enumerate(loop.tasks) if isinstance(one, Compute) and len(one.inputs) > 1)
        op = loop.tasks[place]
        assert isinstance(op, Compute)
        return replace(loop, tasks=(*loop.tasks[:place], change(op), *loop.tasks[place + 1 :]))

    return in_loop(planted)


def with_literal(op: Compute) -> Compute:
    made = jax.make_jaxpr(lambda *xs: [2 * y for y in jax.core.eval_jaxpr(op.jaxpr, [], *xs)])(*op.jaxpr.in_avals)
    return replace(op, jaxpr=made.jaxpr)


def in_bfloat16(program: Program) -> Program:
    first, *rest = program.tensors
    return replace(program, tensors=(replace(first, aval=first.aval.update(dtype=jnp.bfloat16)), *rest))


def on_another_mesh(program: Program) -> Program:
    return replace(program, group=DeviceMesh(program.group.devices, (("x0", 1), *program.group.axes)))


PLANTED: dict[str, Callable[[Program], Program]] = {
    "a literal, as of a dropout rate": in_op(with_literal),
    "operands of an op": in_op(lambda op: replace(op, inputs=op.inputs[::-1])),
    "which result is read": in_op(lambda op: replace(op, outputs=tuple(slot + 1 for slot in op.outputs))),
    "how many layers": in_loop(lambda one: replace(one, loop=replace(one.loop, length=one.loop.length + 1))),
    "the direction": in_loop(lambda one: replace(one, loop=replace(one.loop, reverse=not one.loop.reverse))),
    "carried values": in_loop(lambda one: replace(one, carries=one.carries[1:])),
    "nothing left of a layer, as of a frozen one": in_loop(lambda one: replace(one, ys=one.ys[1:], tasks=one.tasks[:-1])),
    "a dtype": in_bfloat16,
    "another mesh": on_another_mesh,
    "how often it runs": lambda program: replace(program, times=program.times + 1),
    "how something lies": lambda program: replace(program, inputs=(*program.inputs[1:], program.inputs[0])),
    "what leaves": lambda program: replace(program, exports=program.exports[:-1]),
    "when something arrives": lambda program: replace(program, import_levels=(Level(99), *program.import_levels[1:])),
    "what is in order": lambda program: replace(program, pinned={"an/op": Level(0)}),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_program_that_differs_is_no_twin(planted: str, made: StepPlan) -> None:
    """One difference in the loop of one of the layers' programs, and it has a template of its own."""
    own = [segment.program for segment in twins(made) if segment.program.times > 1]
    assert len({twin_key(program) for program in own}) == 1
    assert twin_key(PLANTED[planted](own[1])) != twin_key(own[0])
