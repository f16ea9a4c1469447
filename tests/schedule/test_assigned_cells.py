"""The places of a grid's cells, from several decisions on boxes of it."""

from typing import Any

import numpy as np
import pytest

from jscaler import PlanError
from jscaler.ir import Place
from jscaler.primitives import Assign, GridAxis
from jscaler.schedule.assigned_cells import cell_places

SPACE, TIME = GridAxis("a", 2), GridAxis("b", 3, time="t")


def assign(index: Any, *devices: int) -> Assign:
    return Assign("x", index, tuple(map(Place, devices)))


def devices(places: np.ndarray) -> list[Any]:
    return np.vectorize(lambda place: place.device, otypes=[int])(places).tolist()


def test_a_box_of_cells_for_each_decision() -> None:
    own = [assign(((0, 2), (0, 1)), 4, 5), assign(((0, 1), (1, 3)), 0, 1), assign(((1, 2), (1, 3)), 2, 3)]
    assert devices(cell_places("x", (SPACE, TIME), own)) == [[4, 0, 1], [5, 2, 3]]


def test_parts_in_time_of_one_cell_in_space_share_a_place() -> None:
    assert devices(cell_places("x", (SPACE, TIME), [assign(((0, 2), (0, 3)), 7, 8)])) == [[7] * 3, [8] * 3]


def test_a_grid_without_axes_has_one_cell() -> None:
    assert devices(cell_places("x", (), [assign((), 3)])) == 3
    with pytest.raises(PlanError, match=r"^cell \[\] of 'x' is assigned twice: to d3 and to d4$"):
        cell_places("x", (), [assign((), 3), assign((), 4)])


def test_cells_that_are_assigned_twice_or_not_at_all() -> None:
    first = assign(((0, 2), (0, 2)), 0, 1)
    with pytest.raises(PlanError, match=r"^cell \[1, 1\] of 'x' is assigned twice: to d1 and to d5$"):
        cell_places("x", (SPACE, TIME), [first, assign(((1, 2), (1, 3)), 5)])
    with pytest.raises(PlanError, match=r"'x' was split into 6 cells and 2 of them have no device: '\[0, 2\]', '\[1, 2\]'"):
        cell_places("x", (SPACE, TIME), [first])
