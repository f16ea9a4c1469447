"""Every op has a group, and a stage where the plan has some: as the plan says, or as ops around it have."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import plans
from jscaler.ir.loop import chain_of
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize.groups import on_groups
from jscaler.primitives import Planner
from jscaler.stages import transform

WIDTH = 4


def step(params: Any, x: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        y = x
        for name in sorted(params):
            with jax.named_scope(name):
                y = y + jnp.tanh(y @ params[name])
        return jnp.mean(y**2)

    loss, grads = jscaler.value_and_grad(loss_of)(params)
    return jax.tree.map(
        lambda p, g: p - jax.lax.fori_loop(0, 3, lambda i, g: g @ g.T @ g * (1 + 0.1 * i), g), params, grads
    ), loss


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    """Four stages in a V on two groups, whose layers are computed again."""
    params = {f"layer_{i}": jnp.ones((WIDTH, WIDTH)) for i in range(4)}
    policy = plans.pipeline(2, 4, "zb_v", plans.recompute_layers(), batch="x")
    return jscaler.parallelize(policy, devices=2)(step).lower(params, jnp.ones((8, WIDTH))).plan


def layer_of(path: str) -> int:
    return int(path.split("layer_")[1][0])


def test_ops_of_a_layer_are_of_its_stage_on_its_group(plan: StepPlan) -> None:
    """What is computed again, its fence, and the backward: all that comes of a forward op that the plan places."""
    groups = [(0,), (1,), (1,), (0,)]
    seen = set[str]()
    for op in plan.graph.ops:
        home = plan.completed.homes[op.path]
        made_of = op.forward or op.again or (op if op.anywhere == "fence" or home.why == "" else None)
        if made_of is None or "layer_" not in made_of.path or "@cut" in op.path:
            continue
        assert (home.stage, home.group.devices) == (layer_of(made_of.path), groups[layer_of(made_of.path)]), op.path
        seen.add("again" if op.again is not None else op.anywhere or op.kind)
    assert seen == {"forward", "backward", "again", "fence"}


def test_a_loop_that_no_decision_names_is_on_one_group(plan: StepPlan) -> None:
    """Its counter, too, which reads nothing that an op made."""
    loops = {op.loop for op in plan.graph.ops if op.kind == "update" and op.loop is not None}
    assert len(loops) == 4
    for name in loops:
        homes = [plan.completed.homes[op.path] for op in plan.graph.ops if op.loop == name]
        assert len({home.group for home in homes}) == 1
        assert {home.stage for home in homes} == {None}


def test_every_op_of_the_loop_over_micro_batches_has_a_stage_of_its_group(plan: StepPlan) -> None:
    """What the plan does not place goes with what it reads, and else with who reads it first."""
    groups = [(0,), (1,), (1,), (0,)]
    assert plan.spanning is not None
    by = dict[str | None, set[str]]()
    position = {op.path: n for n, op in enumerate(plan.graph.ops)}
    for op in plan.graph.ops:
        if chain_of(op.loop, plan.graph.loops)[:1] != (plan.spanning.loop.name,):
            continue
        home = plan.completed.homes[op.path]
        assert home.stage is not None
        assert groups[home.stage] == home.group.devices, op.path
        by.setdefault(home.stage_by, set()).add(op.path)
        readers = [plan.completed.homes[r.path] for t in op.outputs for r in plan.graph.consumers.get(t, ())]
        if home.stage_by == "readers":
            assert home.stage == next(r.stage for r in readers if r.group == home.group)
        if home.stage_by == "operands":
            makers = [m for m in map(plan.graph.flow.maker, op.inputs) if m is not None]
            makers.sort(key=lambda m: position[m.path])
            last = [plan.completed.homes[m.path] for m in makers if plan.completed.homes[m.path].group == home.group][-1]
            assert home.stage == last.stage
    assert by.keys() == {"plan", "operands", "readers"}, {why: sorted(ops) for why, ops in by.items()}


def test_a_pass_hands_on_where_ops_run() -> None:
    params = {f"layer_{i}": jnp.ones((WIDTH, WIDTH)) for i in range(2)}
    captured = jscaler.parallelize("single", devices=1)(step).lower(params, jnp.ones((8, WIDTH))).captured

    def policy(graph: Planner, devices: np.ndarray) -> None:
        for i in range(2):
            graph.on_devices(graph.select(f"layer_{i}/*"), devices[i : i + 1])

    plan = transform(captured, policy, 2)
    placed = on_groups(captured.graph, plan, captured.bodies)
    assert placed.with_graph(captured.graph) is placed
    (loss,) = captured.graph.select("loss/div")
    (mesh,) = (mesh for mesh in placed.groups.meshes if mesh != placed.homes[loss.path].group)
    ops = tuple(dataclasses.replace(op, saved=()) if op is loss else op for op in captured.graph.ops)
    moved = placed.with_graph(dataclasses.replace(captured.graph, ops=ops), {loss.path: mesh})
    changed = {path for path, home in moved.homes.items() if home != placed.homes[path]}
    assert changed == {loss.path}
    assert moved.homes[loss.path].group == mesh


def test_a_plan_on_one_group_has_no_stages() -> None:
    params = {f"layer_{i}": jnp.ones((WIDTH, WIDTH)) for i in range(2)}
    lowered = jscaler.parallelize("data_parallel(batch='x')", devices=2)(step).lower(params, jnp.ones((8, WIDTH)))
    homes = lowered.plan.completed.homes
    assert homes.keys() == {op.path for op in lowered.plan.graph.ops}
    assert {(home.group.devices, home.stage) for home in homes.values()} == {((0, 1), None)}
