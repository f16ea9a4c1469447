"""Grids are indexed like numpy arrays."""

from typing import Any

import numpy as np
import pytest

from jscaler import PlanError
from jscaler.ir import Op
from jscaler.primitives import Grid, GridAxis
from jscaler.primitives.grid import one_in_time

AXES = (GridAxis("a", 4), GridAxis(None, 3), GridAxis("b", 2))
GRID = Grid.whole(Op("up/dot", "forward", (), ()), AXES)
CELLS = np.arange(24).reshape(GRID.shape)


def cells_of(grid: Grid) -> list[int]:
    return CELLS[tuple(slice(*interval) for interval in grid.index)].ravel().tolist()


@pytest.mark.smoke
@pytest.mark.parametrize(
    "key",
    [
        0, -1, slice(1, 3), slice(None), slice(-2, None), slice(None, 99), (1, 2), (slice(None), 0),
        (3, slice(1, None), -1), (slice(0, 2), slice(0, 2), slice(0, 1)), np.int64(2),
    ],
    ids=str,
)  # fmt: skip
def test_an_index_selects_what_numpy_selects(key: Any) -> None:
    assert cells_of(GRID[key]) == CELLS[key].ravel().tolist()


def test_indices_compose() -> None:
    assert cells_of(GRID[1:][0]) == cells_of(GRID[1])
    assert cells_of(GRID[1:3, :, 1][1, 1:]) == CELLS[1:3, :, 1:][1, 1:].ravel().tolist()
    assert GRID[2, 1, 0][0, 0, 0] == GRID[2, 1, 0]


def test_shapes_keep_every_axis() -> None:
    assert GRID.shape == (4, 3, 2)
    assert GRID[1].shape == (1, 3, 2)
    assert GRID[1, 1:, -1].shape == (1, 2, 1)
    assert (GRID.is_whole, GRID[:].is_whole, GRID[1:].is_whole) == (True, True, False)


@pytest.mark.parametrize("key", [4, -5, (0, 3), (0, 0, 2)], ids=str)
def test_a_cell_that_does_not_exist(key: Any) -> None:
    with pytest.raises(IndexError):
        CELLS[key]
    with pytest.raises(PlanError, match=r"'up/dot': cell -?\d of grid axis \d, which has \d cells"):
        GRID[key]


@pytest.mark.parametrize("key", [slice(2, 2), slice(3, 1), slice(None, None, 2), slice(None, None, -1)], ids=str)
def test_empty_and_stepped_slices_are_refused(key: slice) -> None:
    with pytest.raises(PlanError, match=r"'up/dot': grid slice slice\(.*\) is empty or has a step; axis 0 has 4 cells"):
        GRID[key]


def test_too_many_indices() -> None:
    with pytest.raises(PlanError, match="'up/dot': 4 indices for a grid of 3 axes"):
        GRID[0, 0, 0, 0]


TIMED = Grid.whole(GRID.op, (GridAxis("a", 2), GridAxis("b", 3, time="t")))


def test_cells_along_a_time_axis_have_one_device() -> None:
    assert one_in_time(TIMED, np.array([4, 4, 4, 7, 7, 7])).tolist() == [[4], [7]]
    assert one_in_time(TIMED, np.array([4, 7])).tolist() == [4, 7]  # said once
    assert one_in_time(GRID[0, 0], np.array([5, 6])).tolist() == [5, 6]


@pytest.mark.parametrize("devices", [[4, 4, 4, 7, 7, 4], [4, 7, 4, 4, 7, 4], [0, 1, 2, 3, 4, 5]], ids=str)
def test_cells_along_a_time_axis_may_have_devices_of_their_own(devices: list[int]) -> None:
    """Where one differs, all are named."""
    assert one_in_time(TIMED, np.array(devices)).tolist() == np.reshape(devices, (2, 3)).tolist()


def test_some_of_the_cells_along_a_time_axis() -> None:
    assert one_in_time(TIMED[:, 1:], np.array([4, 4, 7, 7])).tolist() == [[4], [7]]
    assert one_in_time(TIMED[:, 1:], np.array([4, 5, 7, 8])).tolist() == [[4, 5], [7, 8]]


def test_str() -> None:
    assert str(GRID) == "Grid(up/dot [a:4, copy:3, b:2])"
    assert str(GRID[1]) == "Grid(up/dot [a:4, copy:3, b:2] at ((1, 2), (0, 3), (0, 2)))"
