"""Two towers on two device groups, equal but for their devices: no cache hit, merge or constant goes across."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jscaler
from jscaler import Split
from jscaler.lower.flat_program import results
from jscaler.lower.program import Compute
from jscaler.lower.step_plan import StepPlan
from jscaler.stages import Captured, lower, transform

TABLE = np.arange(16.0).reshape(4, 4)  # constants that both towers read, the second one in the ops that are left open
ROW = np.arange(1.0, 5.0)
GROUPS = {"left": (2, 0), "right": (1, 3)}


def towers(left: dict[str, jax.Array], right: dict[str, jax.Array]) -> list[jax.Array]:
    """The same ops, a constant and an iota in each; the last op of each is for the completion to place."""
    table, row, made = jnp.asarray(TABLE), jnp.asarray(ROW), []
    for name, given in (("left", left), ("right", right)):
        with jax.named_scope(name):
            with jax.named_scope("mix"):
                x = given["x"] @ (given["w"] * table) + jnp.arange(4.0)
            with jax.named_scope("norm"):
                made.append(jnp.tanh(x) * row)
    return made


def by_tower(graph: Any, devices: np.ndarray) -> None:
    del devices
    for name, group in GROUPS.items():
        for op in graph.select(f"{name}/mix/*"):
            factor = graph.factor_of(f"{name}/x", 0).get(op)
            parts = graph.op_trans(op, Split(factor, 2)) if factor else graph.op_trans(op, jscaler.Replicate(2))
            graph.op_assign(parts, list(group))


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    arguments = {"x": jnp.ones((8, 4)), "w": jnp.ones((4, 4))}
    captured = Captured.of(jscaler.parallelize("single", devices=1)(towers).graph(arguments, arguments))
    lowered = lower(captured, transform(captured, by_tower, 4))
    assert not lowered.transfers
    return lowered


def test_every_op_lies_on_its_tower_s_group(plan: StepPlan) -> None:
    completed = plan.completed
    assert [sorted(group.devices) for group in completed.groups] == [[0, 2], [1, 3]]
    for op in plan.graph.ops:
        group = completed.ops[op.path].placement.group
        assert group.devices == GROUPS[op.path.split("/")[0]], op.path
        for layout in (*completed.ops[op.path].inputs, *completed.ops[op.path].outputs):
            assert layout.mesh is group
    towers_of = [{t.op.path.split("/")[0] for t in s.program.tasks if isinstance(t, Compute)} for s in plan.segments]
    assert towers_of == [{"left"}, {"right"}]


def test_a_backward_op_runs_where_its_forward_op_does() -> None:
    """Though what it reads first may come from another group: the cotangent of a result does."""

    def step(x: jax.Array, w: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            with jax.named_scope("left"):
                y = x @ w
            with jax.named_scope("right"):
                return jnp.sum(jnp.sin(y) @ w)

        return jscaler.value_and_grad(loss)(w)

    def policy(graph: Any, devices: np.ndarray) -> None:
        del devices
        for name, group in GROUPS.items():
            for op in graph.select(f"{name}/*", kind="forward"):
                graph.op_assign(graph.op_trans(op, jscaler.Replicate(2)), list(group))

    captured = Captured.of(jscaler.parallelize("single", devices=1)(step).graph(jnp.ones((4, 4)), jnp.ones((4, 4))))
    lowered = lower(captured, transform(captured, policy, 4))
    backward = [op for op in lowered.graph.ops if op.forward is not None]
    assert {op.path.split("/")[0] for op in backward} == {"left", "right"}
    for op in backward:
        assert lowered.completed.homes[op.path].group.devices == GROUPS[op.path.split("/")[0]], op.path


def test_what_the_plan_left_open_is_filled_in_on_its_own_group(plan: StepPlan) -> None:
    """The caches of the completion know the group: equal ops whose inputs lie alike, on other devices."""
    completed = plan.completed
    for name in GROUPS:
        (path,) = [p for p in completed.ops if p.startswith(f"{name}/norm")]
        placement = completed.ops[path].placement
        assert (placement.origin, list(placement.factors.values())) == ("filled", [("x0",)])


def test_each_group_has_a_copy_of_the_constant_and_arguments_of_its_own(plan: StepPlan) -> None:
    programs = [segment.program for segment in plan.segments]
    constants = [t for t, _ in plan.graph.constants]
    assert len(constants) == 2
    for program, name in zip(programs, GROUPS, strict=True):
        own = [t.name for t in program.tensors if t not in constants]
        assert sorted(own) == [f"{name}/w", f"{name}/x"]
        assert [t for t in program.tensors if t in constants] == constants
        assert all(layout.mesh is program.group for _, layout in (*program.inputs, *program.outputs))
    assert [program.results for program in programs] == [(0,), (1,)]


def test_value_numbering_merges_nothing_across_groups(plan: StepPlan) -> None:
    """Both programs make their own counts (an iota that reads nothing), and share no variable."""
    flats = [segment.flat for segment in plan.segments]
    names = [[eqn.primitive.name for eqn in flat.equations] for flat in flats]
    assert names[0] == names[1]
    assert names[0].count("iota") == 1
    defined = [{v for item in flat.items for v in results(item)} | set(flat.inputs) for flat in flats]
    assert defined[0].isdisjoint(defined[1])
    for flat, own in zip(flats, defined, strict=True):
        assert all(v in own for eqn in flat.equations for v in eqn.invars if isinstance(v, core.Var))
