"""The mesh of a plan: axes fine enough for every device array in it."""

import itertools

import numpy as np
import pytest
from materialize.layouts import mesh_of

from jscaler.errors import PlanError
from jscaler.materialize.mesh import DeviceMesh, PlacedGrid, common_mesh, find_common_mesh

EIGHT = np.arange(8)


def grid(array: np.ndarray, op: str = "op") -> PlacedGrid:
    return PlacedGrid(op, array.shape, tuple(int(d) for d in array.flat))


def mesh_for(*arrays: np.ndarray) -> tuple[DeviceMesh, list[tuple[tuple[str, ...], ...]]]:
    """The common mesh, and what it covers; checked cell by cell against the arrays themselves."""
    grids = [grid(array, f"op{i}") for i, array in enumerate(arrays)]
    mesh, covered = common_mesh(grids, tuple(range(arrays[0].size)))
    for one, array in zip(grids, arrays, strict=True):
        for cell in np.ndindex(array.shape):
            position = mesh.devices.index(array[cell])
            assert cell == tuple(mesh.coordinate(position, axes) for axes in covered[one])
    return mesh, [covered[one] for one in grids]


def test_one_array_gives_its_own_axes() -> None:
    mesh, covered = mesh_for(EIGHT.reshape(2, 4))
    assert mesh.axes == (("x0", 2), ("x1", 4))
    assert mesh.devices == tuple(range(8))
    assert covered == [(("x0",), ("x1",))]


@pytest.mark.smoke
def test_2x4_and_4x2_need_three_axes() -> None:
    mesh, covered = mesh_for(EIGHT.reshape(2, 4), EIGHT.reshape(4, 2), EIGHT)
    assert mesh.axes == (("x0", 2), ("x1", 2), ("x2", 2))
    assert covered == [(("x0",), ("x1", "x2")), (("x0", "x1"), ("x2",)), (("x0", "x1", "x2"),)]


def test_a_transposed_array_covers_the_minor_axis_first() -> None:
    mesh, covered = mesh_for(EIGHT.reshape(2, 4), EIGHT.reshape(2, 4).T)
    assert mesh.axes == (("x0", 2), ("x1", 4))
    assert covered == [(("x0",), ("x1",)), (("x1",), ("x0",))]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_an_axis_counts_digits_in_any_order(order: tuple[int, ...]) -> None:
    cube = EIGHT.reshape(2, 2, 2).transpose(order)
    mesh, (_, line, square) = mesh_for(EIGHT, cube.reshape(-1), cube.reshape(4, 2))
    assert mesh.devices == tuple(range(8))
    assert line == (square[0] + square[1],)
    assert sorted(line[0]) == [name for name, _ in mesh.axes]


def test_orders_in_which_axes_count_one_digit_come_first() -> None:
    """So the axes are as few as they can be."""
    mesh, covered = mesh_for(EIGHT.reshape(2, 4).T.reshape(-1))
    assert (mesh.devices, mesh.axes, covered) == ((0, 4, 1, 5, 2, 6, 3, 7), (("x0", 8),), [(("x0",),)])


def test_axes_of_one_part_cover_nothing() -> None:
    mesh, covered = mesh_for(EIGHT.reshape(1, 8, 1), EIGHT.reshape(2, 1, 4))
    assert mesh.axes == (("x0", 2), ("x1", 4))
    assert covered == [((), ("x0", "x1"), ()), (("x0",), (), ("x1",))]


def test_a_permuted_order_becomes_the_order_of_the_mesh() -> None:
    shuffled = np.array([5, 1, 0, 4, 2, 3])
    mesh, covered = mesh_for(shuffled.reshape(2, 3), shuffled, shuffled.reshape(2, 3).T)
    assert mesh.devices == tuple(shuffled)
    assert covered == [(("x0",), ("x1",)), (("x0", "x1"),), (("x1",), ("x0",))]


def test_one_permuted_array_among_plain_ones() -> None:
    """The transposed order is regular in 0..7 as well, so the plain order stays."""
    mesh, _ = mesh_for(EIGHT, EIGHT.reshape(2, 2, 2).transpose(2, 0, 1))
    assert mesh.devices == tuple(range(8))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_every_transpose_of_a_cube(order: tuple[int, ...]) -> None:
    mesh, _ = mesh_for(EIGHT.reshape(2, 2, 2), EIGHT.reshape(2, 2, 2).transpose(order), EIGHT.reshape(2, 4))
    assert mesh.axes == (("x0", 2), ("x1", 2), ("x2", 2))


@pytest.mark.parametrize(
    "arrays",
    [
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2)),  # cuts at 3 and at 2: neither divides the other
        (np.arange(4), np.array([0, 2, 3, 1])),  # two orders
        (np.arange(4).reshape(2, 2), np.array([[0, 1], [3, 2]])),
    ],
    ids=["cuts at 3 and 2", "two orders", "a twisted square"],
)
def test_arrays_without_a_common_mesh_are_refused_by_name(arrays: tuple[np.ndarray, ...]) -> None:
    grids = [grid(array, f"layer_{i}/dot") for i, array in enumerate(arrays)]
    with pytest.raises(PlanError, match="share no common mesh") as error:
        common_mesh(grids, tuple(range(arrays[0].size)))
    assert all(f"'{one.op}' {one.shape} on {list(one.devices)}" in str(error.value) for one in grids)
    assert "reshapes and transposes of one device array" in str(error.value)


def test_one_device_has_no_axes() -> None:
    mesh, covered = mesh_for(np.zeros((), int))
    assert mesh == DeviceMesh((0,), ())
    assert covered == [()]
    assert mesh.coordinate(0, ()) == 0


def test_no_grids_leave_one_axis_of_all_devices() -> None:
    mesh, covered = common_mesh([], tuple(range(8)))
    assert mesh.axes == (("x0", 8),)
    assert covered == {}


def test_coordinates_take_the_first_axis_as_major() -> None:
    mesh = mesh_of(2, 3, devices=(5, 4, 3, 2, 1, 0))
    assert [mesh.coordinate(p, ("x0", "x1")) for p in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [mesh.coordinate(p, ("x1", "x0")) for p in range(6)] == [0, 2, 4, 1, 3, 5]
    assert [mesh.coordinate(p, ()) for p in range(6)] == [0] * 6
    assert (mesh.size("x1"), mesh.size(("x0", "x1")), mesh.size(())) == (3, 6, 1)


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2), (3, 2, 2)], ids=str)
def test_groups_and_coordinates_say_the_same(sizes: tuple[int, ...]) -> None:
    """Members of a group differ along its axes only, and stand in the order of their coordinates along them."""
    count = int(np.prod(sizes))
    mesh = mesh_of(*sizes, devices=np.random.default_rng(0).permutation(count).tolist())
    for number in range(len(sizes) + 1):
        for axes in itertools.permutations(mesh.names, number):
            along = dict(zip(mesh.devices, mesh.coordinates(axes).tolist(), strict=True))
            across = mesh.coordinates(tuple(n for n in mesh.names if n not in axes))
            others = dict(zip(mesh.devices, across.tolist(), strict=True))
            groups = mesh.groups(axes)
            assert groups.shape == (count // mesh.size(axes), mesh.size(axes))
            assert sorted(groups.reshape(-1).tolist()) == list(range(count))
            for group in groups.tolist():
                assert [along[d] for d in group] == list(range(mesh.size(axes)))
                assert len({others[d] for d in group}) == 1
            assert [mesh.coordinate(p, axes) for p in range(count)] == mesh.coordinates(axes).tolist()


def test_positions_by_device_number() -> None:
    mesh = mesh_of(4, devices=(7, 2, 4, 1))
    assert mesh.positions.tolist() == [3, 1, 2, 0]  # of devices 1, 2, 4, 7
    assert np.array(mesh.devices)[mesh.positions].tolist() == [1, 2, 4, 7]


def test_a_mesh_of_some_of_the_devices() -> None:
    grids = [grid(np.array([[4, 6], [5, 7]])), grid(np.array([4, 5, 6, 7]))]
    mesh, covered = find_common_mesh(grids, (4, 5, 6, 7))
    assert mesh.devices == (4, 5, 6, 7)
    for one in grids:
        array = np.array(one.devices).reshape(one.shape)
        for cell in np.ndindex(array.shape):
            position = mesh.devices.index(array[cell])
            assert cell == tuple(mesh.coordinate(position, axes) for axes in covered[one])
    assert find_common_mesh([grid(np.arange(6).reshape(2, 3)), grid(np.arange(6).reshape(3, 2))], tuple(range(6))) is None
