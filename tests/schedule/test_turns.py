"""Parts in time that take turns on devices: a part of an op lies on devices of its own, as the directions of Chimera do."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import Plan, PlanError, Split, TimeSplit
from jscaler.errors import OrderError, VerificationError
from jscaler.lower.step_plan import StepPlan
from jscaler.verification.time_loops import check_time_loops

ROWS, WIDTH = 24, 6
DRAWS = np.random.default_rng(0)
PARAMS = {name: DRAWS.normal(size=(WIDTH, WIDTH)) / 3 for name in "abc"}
BATCH = {name: DRAWS.normal(size=(ROWS, WIDTH)) for name in "xy"}
Policy = Callable[[Any, np.ndarray], None]


def step(params: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    def loss_of(params: Any) -> Any:
        with jax.named_scope("first"):
            h = jnp.tanh(batch["x"] @ params["a"])
        with jax.named_scope("second"):
            h = jnp.tanh(h @ params["b"])
        with jax.named_scope("third"):
            h = h @ params["c"]
            rows = jnp.sum((h - batch["y"]) ** 2, -1)
            return jnp.mean(rows), {"rows": rows, "most": jnp.max(rows)}

    (loss, seen), grads = value_and_grad(loss_of, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss, **seen}


def placed(places: dict[str, Any], parts: int, assign: Callable[..., None] | None = None, **axis: Any) -> Policy:
    """A policy that gives the parts of each scope's ops the devices of its turns."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("batch/x", 0) | graph.factor_of("batch/y", 0)
        for scope, turns in places.items():
            for op in graph.select(f"*{scope}/*", kind="forward"):
                if op in rows:
                    grid = graph.op_trans(op, TimeSplit(rows[op], None if axis else parts, "t", **axis))
                    if assign is None:
                        graph.op_assign(grid, np.resize(turns, parts))
                    else:
                        assign(graph, grid, turns)

    return policy


TWO_WAYS = {"first": [0, 2], "second": [1], "third": [2, 0]}


def lowered(policy: Policy | Plan, devices: int = 3) -> Any:
    return jscaler.parallelize(policy, devices=devices)(step).lower(PARAMS, BATCH)


def check_numbers(policy: Policy | Plan, devices: int = 3) -> None:
    """Two optimizer steps are those of one device, in float64."""
    with jax.enable_x64(True):
        given = lowered(policy, devices)
        jscaler.verify(given)
        run, plain = given.compile(), jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))
        ours = theirs = PARAMS
        for _ in range(2):
            (ours, mine), (theirs, true) = run(ours, BATCH), plain(theirs, BATCH)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), (ours, mine), (theirs, true))


def by_cells(graph: Any, grid: Any, turns: Any) -> None:
    for i in range(grid.shape[0]):
        graph.op_assign(grid[i], turns[i % len(turns)])


def by_halves(graph: Any, grid: Any, turns: Any) -> None:
    half = grid.shape[0] // 2
    graph.op_assign(grid[:half], turns[0])
    graph.op_assign(grid[half:], turns[-1])


@pytest.mark.parametrize("assign", [None, by_cells, by_halves])
def test_parts_lie_on_groups_in_turn(assign: Any) -> None:
    check_numbers(placed(TWO_WAYS, 4, assign))


def test_devices_of_one_group_in_turn() -> None:
    """Orders of the same devices that no mesh expresses are groups of their own, between which rows cross."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("batch/x", 0) | graph.factor_of("batch/y", 0)
        for op in graph.select("*/*", kind="forward"):
            if op in rows:
                grid = graph.op_trans(op, TimeSplit(rows[op], 2, "t"), Split(rows[op], 4))
                graph.op_assign(grid, np.array([[0, 1, 2, 3], [0, 2, 1, 3]]))

    check_numbers(policy, 4)
    loop = next(loop for loop in lowered(policy, 4).plan.graph.loops.values() if loop.time)
    assert (loop.length, loop.turns) == (1, 2)


@pytest.mark.one_day_in(2)
def test_unequal_parts_in_turn() -> None:
    """Parts that run in no loop lie where the plan says, too."""
    plan = lowered(placed(TWO_WAYS, 3, sizes=(4, 12, 8))).plan
    first = {i: plan.completed.ops[f"first/dot[{i}]"].placement.group.devices for i in range(3)}
    assert first == {0: (0,), 1: (2,), 2: (0,)}
    check_numbers(placed(TWO_WAYS, 3, sizes=(4, 12, 8)))


def test_parameters_lie_on_each_group_and_gradients_are_joined_once() -> None:
    plan = lowered(placed(TWO_WAYS, 8)).plan
    assert plan.spanning is not None
    sent = [t.tensor for t in plan.transfers if t.phase in plan.spanning.phases and t.tensor.shape]
    assert {t.shape for t in sent} == {(ROWS // 8, WIDTH)}, "of a micro-batch activations and their cotangents alone"
    assert len(sent) == 2 * 2 * 2, "two boundaries there and back, at two turns"
    behind = [
        t.tensor.name for t in plan.transfers if t.phase > plan.spanning.phases[-1] and t.tensor.shape == (WIDTH, WIDTH)
    ]
    assert len(behind) == 2, f"of two parameters a sum comes from another group: {behind}"


def test_what_is_compiled_does_not_grow_with_the_parts() -> None:
    plans = [lowered(placed(TWO_WAYS, parts)).plan for parts in (4, 12)]
    assert len({len(plan.blocks) for plan in plans}) == len({len(plan.graph.ops) for plan in plans}) == 1


@pytest.mark.one_day_in(2)
def test_orders_of_parts_on_groups_in_turn() -> None:
    def ordered(*pairs: tuple[tuple[str, int], tuple[str, int]]) -> Policy:
        def policy(graph: Any, devices: np.ndarray) -> None:
            placed(TWO_WAYS, 4)(graph, devices)
            for before, after in pairs:
                graph.op_order(before, after)

        return policy

    usual = lowered(placed(TWO_WAYS, 4)).plan.instructions.table
    assert str(usual.rows[0][0]) == "0F0"
    last_first = ordered((("third/dot", 3), ("third/dot", 1)), (("first/dot", 2), ("first/dot", 0)))
    rows = [list(map(str, row)) for row in lowered(last_first).plan.instructions.table.rows]
    assert rows[0].index("2F3") < rows[0].index("2F1")
    assert rows[0].index("0F2") < rows[0].index("0F0")
    check_numbers(last_first)
    with pytest.raises(OrderError, match="wait for each other"):
        lowered(ordered((("third/dot", 1), ("first/dot", 1))))


@pytest.mark.one_day_in(2)
def test_a_table_names_micro_batches_as_they_are() -> None:
    table = str(lowered(placed(TWO_WAYS, 4)).plan.instructions.table)

    def scheduled(text: str) -> Policy:
        def policy(graph: Any, devices: np.ndarray) -> None:
            placed(TWO_WAYS, 4)(graph, devices)
            graph.schedule(text)

        return policy

    check_numbers(scheduled(table))
    with pytest.raises(PlanError, match=r"'gpipe' has a row for each stage, and stages of 2 turns lie on other devices"):
        lowered(scheduled("gpipe"))
    with pytest.raises(PlanError, match=r"lacks '0F2'; it runs '0F for micro-batches 0 to 2, one in 2'"):
        lowered(scheduled(table.replace("0F2 ", "")))


@pytest.mark.one_day_in(2)
def test_a_plan_file_keeps_them() -> None:
    plan = lowered(placed(TWO_WAYS, 4)).plan.plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    check_numbers(again)


def test_wrong_assignments() -> None:
    def missing(graph: Any, grid: Any, turns: Any) -> None:
        graph.op_assign(grid[:2], turns[0])

    def twice(graph: Any, grid: Any, turns: Any) -> None:
        graph.op_assign(grid[:3], turns[0])
        graph.op_assign(grid[2:], turns[-1])

    def in_any_order(graph: Any, grid: Any, turns: Any) -> None:
        graph.op_assign(grid, np.resize(turns, 4), any_order=True)

    def of_two_axes(graph: Any, grid: Any, turns: Any) -> None:
        inner = graph.op_trans(grid, TimeSplit("b", 2, "u"))
        graph.op_assign(inner, np.arange(8).reshape(4, 2) % 3)

    with pytest.raises(PlanError, match=r"split into 4 cells and 2 of them have no device"):
        lowered(placed(TWO_WAYS, 4, missing))
    with pytest.raises(PlanError, match=r"cell \[2\] of '.*' is assigned twice: to d0 and to d2"):
        lowered(placed(TWO_WAYS, 4, twice))
    with pytest.raises(PlanError, match=r"in any order"):
        lowered(placed({"second": [0, 1]}, 4, in_any_order))
    with pytest.raises(PlanError, match=r"the parts along 't' and 'u' lie on devices of their own"):
        lowered(placed({"first": [0, 1]}, 4, of_two_axes))


def faulty(plan: StepPlan, change: Callable[[Any], Any]) -> StepPlan:
    """``plan`` with another loop over groups."""
    assert plan.spanning is not None
    loop = change(plan.spanning.loop)
    return dataclasses.replace(plan, spanning=dataclasses.replace(plan.spanning, loop=loop))


def test_a_turn_that_is_left_out_or_run_twice_is_found() -> None:
    plan = lowered(placed(TWO_WAYS, 4)).plan
    check_time_loops(plan, [])

    def swapped(loop: Any) -> Any:
        return dataclasses.replace(loop, xs=loop.xs[::-1])

    def once(loop: Any) -> Any:
        first = loop.xs[0]
        return dataclasses.replace(loop, xs=tuple(dataclasses.replace(x, stack=first.stack) for x in loop.xs))

    def without_a_sum(loop: Any) -> Any:
        gone = next(c for c in loop.carries if "~1" in c.out.name and c.is_sum)
        return dataclasses.replace(loop, carries=tuple(c for c in loop.carries if c is not gone))

    for change in (swapped, once, without_a_sum):
        with pytest.raises(VerificationError):
            check_time_loops(faulty(plan, change), [])
