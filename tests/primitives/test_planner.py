"""The three primitives as a policy calls them: what they append, and what they refuse."""

from typing import Any

import numpy as np
import pytest
from lower.steps import make_batch, make_params, mlp_loss

import jscaler
from jscaler import PlanError, Replicate, Split, SplitError, UnknownNameError
from jscaler.ir import Graph, Place
from jscaler.primitives import Assign, GridAxis, Order, Planner, Trans, make_plan

FOUR = np.arange(4)


def places(*devices: int) -> tuple[Place, ...]:
    return tuple(map(Place, devices))


@pytest.fixture(scope="module")
def graph() -> Graph:
    """up/dot is ``a b, b c -> a c`` of (16, 8) and (8, 16)."""
    return jscaler.parallelize("single")(jscaler.grad(mlp_loss)).graph(make_params(), make_batch())


@pytest.fixture
def planner(graph: Graph) -> Planner:
    return Planner(graph, 4)


def decisions(planner: Planner) -> tuple[Any, ...]:
    return planner.plan("test").decisions


@pytest.mark.smoke
def test_a_planner_reads_like_its_graph(graph: Graph, planner: Planner) -> None:
    assert planner.forward() == graph.forward()
    assert planner["up/dot"] is graph["up/dot"]
    assert planner.factor_of("batch/x", 0) == graph.factor_of("batch/x", 0)
    assert str(planner) == str(graph)
    with pytest.raises(UnknownNameError, match="no op named 'up/dott'; did you mean 'up/dot'"):
        planner["up/dott"]


def test_op_trans_gives_a_grid_with_one_axis_per_algorithm(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 2), Replicate(3), Split(("kernel", 1), 4))
    assert grid.shape == (2, 3, 4)
    assert decisions(planner) == (Trans("up/dot", (GridAxis("a", 2), GridAxis(None, 3), GridAxis("c", 4))),)


def test_a_grid_can_be_split_further(planner: Planner) -> None:
    grid = planner.op_trans(planner.op_trans(planner["up/dot"], Split("b", 2)), Split("b", 4))
    assert grid.axes == (GridAxis("b", 2), GridAxis("b", 4))


@pytest.mark.parametrize("first", ["b", ("kernel", 0)], ids=str)
@pytest.mark.parametrize("second", ["b", ("kernel", 0)], ids=str)
def test_a_nested_split_has_the_rest_to_split(planner: Planner, first: Any, second: Any) -> None:
    """8 rows in 4 parts leave 2, however the factor is named."""
    grid = planner.op_trans(planner["up/dot"], Split(first, 4))
    with pytest.raises(SplitError, match="'up/dot' cannot split factor 'b' of size 2 into 4 parts; legal: 1, 2"):
        planner.op_trans(grid, Split(second, 4))


def test_an_op_is_split_once(planner: Planner) -> None:
    planner.op_trans(planner["up/dot"], Split("a", 2))
    with pytest.raises(PlanError, match=r"'up/dot' was split before, into Grid\(up/dot \[a:2\]\); split that grid further"):
        planner.op_trans(planner["up/dot"], Split("b", 2))


def test_part_of_a_grid_is_not_split_further(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 4))
    with pytest.raises(PlanError, match=r"Grid\(up/dot \[a:4\] at \(\(0, 2\),\)\) is part of a grid"):
        planner.op_trans(grid[:2], Split("b", 2))


def test_op_assign_lists_devices_row_major(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 2), Split("c", 2))
    planner.op_assign(grid, FOUR.reshape(2, 2).T)
    assert decisions(planner)[-1] == Assign("up/dot", ((0, 2), (0, 2)), places(0, 2, 1, 3))


def test_sub_grids_and_cells_are_assigned_on_their_own(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 2), Split("c", 2))
    planner.op_assign(grid[0], [2, 3])
    planner.op_assign(grid[1, 0], 0)
    planner.op_assign(grid[1, 1], np.int64(1))
    assert decisions(planner)[1:] == (
        Assign("up/dot", ((0, 1), (0, 2)), places(2, 3)),
        Assign("up/dot", ((1, 2), (0, 1)), places(0)),
        Assign("up/dot", ((1, 2), (1, 2)), places(1)),
    )


def test_an_unsplit_op_on_several_devices_is_copied(planner: Planner) -> None:
    planner.op_assign(planner["up/dot"], FOUR)
    assert decisions(planner) == (Trans("up/dot", (GridAxis(None, 4),)), Assign("up/dot", ((0, 4),), places(0, 1, 2, 3)))


def test_an_unsplit_op_on_one_device_is_one_cell(planner: Planner) -> None:
    planner.op_assign(planner["up/dot"], 3)
    assert decisions(planner) == (Trans("up/dot", ()), Assign("up/dot", (), places(3)))


def test_devices_are_numbers_or_places(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 2))
    planner.op_assign(grid, [1, Place(0)])
    assert decisions(planner)[-1].devices == (1, 0)
    with pytest.raises(PlanError, match="a device is a whole number or a Place, not 'd0'"):
        planner.op_assign(grid, np.array(["d0", "d1"], dtype=object))


def test_as_many_devices_as_cells(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 2))
    with pytest.raises(PlanError, match=r"Grid\(up/dot \[a:2\]\) has 2 cells and is assigned to 4 devices: \[0, 1, 2, 3\]"):
        planner.op_assign(grid, FOUR)


def test_a_device_array_has_the_shape_of_its_grid(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 4))
    with pytest.raises(PlanError, match=r"has shape \(4,\) and its devices have shape \(2, 2\)"):
        planner.op_assign(grid, FOUR.reshape(2, 2))
    planner.op_assign(grid, FOUR.reshape(4, 1))  # ones do not matter


def test_devices_that_do_not_exist(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 4))
    with pytest.raises(PlanError, match=r"is assigned to devices \[4, -1\]; there are 4: 0 to 3"):
        planner.op_assign(grid, [0, 4, 1, -1])


def test_op_order_takes_ops_and_grids(planner: Planner) -> None:
    grid = planner.op_trans(planner["up/dot"], Split("a", 2))
    planner.op_order(planner["down/dot"], grid)
    assert decisions(planner)[-1] == Order("down/dot", "up/dot")


def test_make_plan_hands_the_policy_all_devices(graph: Graph) -> None:
    def everywhere(graph: Any, devices: np.ndarray) -> None:
        assert devices.tolist() == [0, 1, 2, 3]
        graph.op_assign(graph["up/dot"], devices)

    plan = make_plan(everywhere, graph, 4)
    assert (plan.name, plan.num_devices, len(plan.decisions)) == ("everywhere", 4, 2)


# What only shows when the plan is complete is refused when it is lowered, by the name of the op.


def lower(policy: Any, devices: int = 4) -> Any:
    return jscaler.parallelize(policy, devices=devices)(jscaler.grad(mlp_loss)).lower(make_params(), make_batch())


def test_a_cell_without_a_device() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        grid = graph.op_trans(graph["up/dot"], Split("a", 2), Split("c", 2))
        graph.op_assign(grid[0], devices[:2])

    with pytest.raises(
        PlanError, match=r"'up/dot' was split into 4 cells and 2 of them have no device: '\[1, 0\]', '\[1, 1\]'"
    ):
        lower(policy)


def test_a_cell_with_two_devices() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        grid = graph.op_trans(graph["up/dot"], Split("a", 4))
        graph.op_assign(grid, devices)
        graph.op_assign(grid[1], 3)

    with pytest.raises(PlanError, match=r"cell \[1\] of 'up/dot' is assigned twice: to d1 and to d3"):
        lower(policy)


def test_several_cells_on_one_device() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.op_assign(graph.op_trans(graph["up/dot"], Split("a", 4)), [0, 0, 1, 1])

    with pytest.raises(PlanError, match=r"'up/dot' has 4 cells on 2 devices: .*time axis.* give each cell its own device"):
        lower(policy)


def test_an_op_in_host_memory() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.op_assign(graph.op_trans(graph["up/dot"], Split("a", 2)), [Place(0), Place(1, "host")])

    with pytest.raises(PlanError, match="'up/dot' is assigned to 'd1@host': ops cannot run in host memory"):
        lower(policy, devices=2)


def test_an_op_on_some_of_the_devices_takes_the_rest_there() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.op_assign(graph.op_trans(graph["up/dot"], Split("a", 2)), devices[2:])

    lowered = lower(policy)
    assert {op.placement.group.devices for op in lowered.plan.completed.ops.values()} == {(2, 3)}


def test_an_op_assigned_to_the_only_device() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        for op in graph.forward():
            graph.op_assign(op, devices)

    lower(policy, devices=1)
