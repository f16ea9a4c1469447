"""Which axes of a plan lie in time: those of TimeSplits, and those along which cells share devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower.steps import assert_same_numbers, planned

import jscaler
from jscaler import PlanError, Replicate, Split, SplitError, TimeSplit, plans
from jscaler.capture.residuals import with_backward_bodies
from jscaler.ir import Graph
from jscaler.lower.flat_program import FlatLoop
from jscaler.primitives import Assign, Plan, Trans
from jscaler.schedule.time_axes import SHARED, TimeAxes, TimeCut, time_axes
from jscaler.stages import transform


def step(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("down"):
            return (h**2).sum()

    value, grad = jscaler.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


W, X = np.linspace(0.0, 1.0, 24).reshape(4, 6), np.linspace(-1.0, 1.0, 32).reshape(8, 4)


@pytest.fixture(scope="module")
def captured() -> Any:
    return jscaler.parallelize("single")(step).lower(W, X).captured


@pytest.fixture(scope="module")
def graph(captured: Any) -> Graph:
    return with_backward_bodies(captured.graph, captured.bodies)


def axes_of(captured: Any, graph: Graph, policy: Any, devices: int = 4) -> TimeAxes:
    return time_axes(graph, transform(captured, policy, devices))


def dot_on(devices: Any, *algorithms: Any) -> Any:
    """A policy that splits ``up/dot`` (factor a: rows of x, c: columns of w) and assigns it."""

    def policy(graph: Any, _: Any) -> None:
        graph.op_assign(graph.op_trans("up/dot", *algorithms), np.array(devices))

    return policy


def in_space(axes: TimeAxes) -> tuple[list[tuple[Any, int]], list[int]]:
    """What is left of the decisions on ``up/dot``: its axes, and its devices."""
    (trans,) = (d for d in axes.plan.decisions if isinstance(d, Trans))
    (assign,) = (d for d in axes.plan.decisions if isinstance(d, Assign))
    assert assign.index == tuple((0, a.parts) for a in trans.axes)
    return [(a.factor, a.parts) for a in trans.axes], list(assign.devices)


def test_a_plan_without_time_is_left_as_it_is(captured: Any, graph: Graph) -> None:
    plan = transform(captured, dot_on([0, 1], Split("a", 2)), 4)
    assert time_axes(graph, plan) == TimeAxes((), {}, plan)


@pytest.mark.smoke
def test_a_time_split_leaves_the_grid_and_its_backward_has_it_too(captured: Any, graph: Graph) -> None:
    axes = axes_of(captured, graph, dot_on([2, 3], Split("a", 2), TimeSplit("a", 4, "turns")))
    assert axes.names == ("turns",)
    cut = {"turns": TimeCut("turns", "a", 4, blocks=2)}  # each device walks its own block of the rows
    assert axes.cuts == {"up/dot": cut, "up/dot@backward": cut}
    assert in_space(axes) == ([("a", 2)], [2, 3])


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_space_lies_outside_of_time_wherever_the_plan_writes_it(captured: Any, graph: Graph, order: Any) -> None:
    algorithms = [TimeSplit("a", 2), Split("a", 2), Split("c", 2)]
    axes = axes_of(captured, graph, dot_on([0, 1, 2, 3], *(algorithms[i] for i in order)))
    assert axes.cuts["up/dot"]["time"] == TimeCut("time", "a", 2, blocks=2)
    assert in_space(axes)[1] == [0, 1, 2, 3]


def test_an_axis_of_another_factor_makes_no_blocks(captured: Any, graph: Graph) -> None:
    axes = axes_of(captured, graph, dot_on([0, 1], Split("c", 2), TimeSplit("a", 4)))
    assert axes.cuts["up/dot"]["time"].blocks == 1


def lowered(policy: Any, devices: int = 1) -> Any:
    return jscaler.parallelize(policy, devices=devices)(step).lower(W, X)


def assert_like_jit(policy: Any, devices: int = 1) -> None:
    with jax.enable_x64(True):
        made = lowered(policy, devices)
        jscaler.verify(made)
        ours = made.compile()(W, X)
        for mine, true in zip(ours, jax.jit(step)(W, X), strict=True):
            np.testing.assert_allclose(mine, true, rtol=1e-12, atol=1e-12)


# -- cells that share devices

SHARES = {  # devices of up/dot split (a, 2), (c, 2) -> the axis in time, and what is left
    "rows": ([[0, 1], [0, 1]], TimeCut(f"{SHARED}+2", "a", 2), [("c", 2)], [0, 1]),
    "columns": ([[2, 2], [0, 0]], TimeCut(f"{SHARED}+2", "c", 2), [("a", 2)], [2, 0]),
}


@pytest.mark.parametrize("case", SHARES)
def test_cells_that_share_devices_run_in_turn(captured: Any, graph: Graph, case: str) -> None:
    devices, cut, left, places = SHARES[case]
    axes = axes_of(captured, graph, dot_on(devices, Split("a", 2), Split("c", 2)))
    assert axes.names == (f"{SHARED}+2",)
    assert axes.cuts["up/dot"] == {f"{SHARED}+2": cut}
    assert in_space(axes) == (left, places)


@pytest.mark.parametrize("case", SHARES)
def test_cells_may_be_assigned_one_by_one(captured: Any, graph: Graph, case: str) -> None:
    devices, cut, left, places = SHARES[case]

    def policy(graph: Any, _: Any) -> None:
        cells = graph.op_trans("up/dot", Split("a", 2), Split("c", 2))
        for i, row in enumerate(devices):
            for j, device in enumerate(row):
                graph.op_assign(cells[i, j], device)

    axes = axes_of(captured, graph, policy)
    assert axes.cuts["up/dot"] == {f"{SHARED}+2": cut}
    assert in_space(axes) == (left, places)


def test_every_cell_on_one_device_in_a_loop_of_the_policy() -> None:
    """The seeds' ``for part in parts: op_assign(part, device)``."""

    def policy(graph: Any, devices: Any) -> None:
        parts = graph.op_trans("up/dot", Split("a", 4))
        for i in range(4):
            graph.op_assign(parts[i], devices[0])

    assert {loop.length for loop in lowered(policy).plan.graph.loops.values()} == {4}
    assert_like_jit(policy)


@pytest.mark.parametrize("second", ["a", "c"])
def test_several_axes_may_share_devices(captured: Any, graph: Graph, second: str) -> None:
    policy = dot_on([[0, 0], [0, 0]], Split("a", 2), Split(second, 2))
    axes = axes_of(captured, graph, policy)
    assert axes.names == ("shared+2", "shared2+2")
    assert [(c.factor, c.blocks) for c in axes.cuts["up/dot"].values()] == [("a", 1), (second, 1)]
    assert {loop.parent is None for loop in lowered(policy).plan.graph.loops.values()} == {True, False}
    assert_like_jit(policy)


def test_unequal_parts_that_share_a_device_are_an_axis_of_their_own(captured: Any, graph: Graph) -> None:
    axes = axes_of(captured, graph, dot_on([0, 0], Split("a", sizes=(3, 5))))
    (name,) = axes.names
    assert not axes.in_loops(name)
    assert axes.cuts["up/dot"][name] == TimeCut(name, "a", 2, sizes=(3, 5))
    assert in_space(axes) == ([], [0])
    assert_like_jit(dot_on([0, 0], Split("a", sizes=(3, 5))))


def test_the_blocks_of_a_shared_axis_are_what_lies_outside_of_it(captured: Any, graph: Graph) -> None:
    """Cells (device, turn, piece) of the rows: the first axis is outside, the last inside of the turns."""
    devices = np.array([0, 1, 2, 3]).reshape(2, 1, 2) + np.zeros((2, 2, 2), int)
    axes = axes_of(captured, graph, dot_on(devices, Split("a", 2), Split("a", 2), Split("a", 2)))
    assert axes.cuts["up/dot"][f"{SHARED}+2"] == TimeCut(f"{SHARED}+2", "a", 2, blocks=2)
    assert in_space(axes) == ([("a", 2), ("a", 2)], [0, 1, 2, 3])


def test_copies_that_share_a_device_are_no_parts(captured: Any) -> None:
    with pytest.raises(PlanError):
        jscaler.parallelize(dot_on([0, 0], Replicate(2)), devices=2)(step).lower(W, X)


# -- errors

ERRORS = {
    "two axes of one name": (dot_on([0], TimeSplit("a", 2), TimeSplit("c", 2)), PlanError, "a name of its own"),
    "parts that do not divide": (dot_on([0], TimeSplit("a", 3)), SplitError, "legal"),
    "parts of what devices leave": (dot_on([0, 1], Split("a", 2), TimeSplit("a", 8)), SplitError, "legal"),
    "unequal parts in time": (dot_on([0, 1], Split("a", sizes=(3, 5)), TimeSplit("a", 2)), PlanError, "by one split"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(captured: Any, graph: Graph, case: str) -> None:
    policy, error, message = ERRORS[case]
    with pytest.raises(error, match=message) as found:
        axes_of(captured, graph, policy)
    assert "up/dot" in str(found.value)


def test_a_part_of_a_time_axis_needs_the_others(captured: Any, graph: Graph) -> None:
    def policy(graph: Any, _: Any) -> None:
        graph.op_assign(graph.op_trans("up/dot", TimeSplit("a", 2))[0], 0)

    with pytest.raises(PlanError, match=r"1 of them have no device: '\[1\]'; call op_assign"):
        axes_of(captured, graph, policy)


@pytest.mark.parametrize("devices", [(0, 0, 1, 1), (0, 1, 1, 0)])
def test_cells_that_share_devices_in_no_axis_are_refused(devices: Any) -> None:
    """A device's block is an axis of its own: Split("a", 2), TimeSplit("a", 2)."""
    with pytest.raises(PlanError, match="share"):
        jscaler.parallelize(dot_on(devices, Split("a", 4)), devices=2)(step).lower(W, X)


def test_one_part_in_space_of_rows_that_are_gone() -> None:
    """``accumulate(8, data_parallel())`` on one device: of eight rows each micro-batch has one."""

    def policy(graph: Any, _: Any) -> None:
        graph.op_assign(graph.op_trans("up/dot", TimeSplit("a", 8), Split("a", 1)), 0)

    plan = jscaler.parallelize(policy, devices=1)(step).lower(W, X).plan
    assert {loop.length for loop in plan.graph.loops.values()} == {8}


def test_axes_nest_as_the_plan_first_names_them(captured: Any, graph: Graph) -> None:
    def policy(graph: Any, _: Any) -> None:
        graph.op_trans("up/tanh", TimeSplit("b", 2, "second"))
        graph.op_trans("up/dot", TimeSplit("a", 2, "first"), TimeSplit("c", 2, "second"))

    assert axes_of(captured, graph, policy).names == ("second", "first")


def test_a_plan_is_read_without_a_policy(captured: Any, graph: Graph) -> None:
    plan: Plan = transform(captured, dot_on([0], TimeSplit("a", 2)), 1)
    assert time_axes(graph, plan).cuts.keys() == {"up/dot", "up/dot@backward"}


def test_ops_that_are_split_among_unequal_numbers_of_devices_take_the_same_rows_at_a_time() -> None:
    """Rows on four devices, then columns on all four: in one loop, as each part of the second reads rows of all devices."""

    def rows_then_columns(graph: Any, devices: Any) -> None:
        for path, tensor, dim in (
            ("up/dot", "x", 0), ("up/add", "up/dot:0", 0), ("act/tanh", "up/add:0", 0), ("down/dot", "kernel", 1),
        ):  # fmt: skip
            op = graph[path]
            operand = next(t for t in op.inputs if t.name.endswith(tensor))
            graph.op_assign(graph.op_trans(op, Split((operand.name, dim), devices.size)), devices)

    def with_an_open_op(graph: Any, devices: Any) -> None:
        for path, tensor, dim in (("up/dot", "x", 0), ("up/add", "up/dot:0", 0), ("down/dot", "kernel", 1)):
            operand = next(t for t in graph[path].inputs if t.name.endswith(tensor))
            graph.op_assign(graph.op_trans(path, Split((operand.name, dim), devices.size)), devices)

    found = planned(plans.accumulate(2, plan=with_an_open_op), 4)
    assert sum(isinstance(item, FlatLoop) for item in found.blocks[0].flat.items) == 1
    for microbatches in (2, 4):
        plan = planned(plans.accumulate(microbatches, plan=rows_then_columns), 4)
        assert sum(isinstance(item, FlatLoop) for item in plan.blocks[0].flat.items) == 1
    assert_same_numbers(plans.accumulate(2, plan=rows_then_columns), 4)
