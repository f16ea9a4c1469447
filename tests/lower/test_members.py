"""Who takes part in a collective: names of the program's axes where they say it, groups else."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from materialize.layouts import mesh_of

from jscaler.lower.members import Members, axis_names, members
from jscaler.materialize import DeviceMesh

ORDER = (5, 1, 0, 4, 2, 3, 7, 6)
MESHES = [
    mesh_of(2, 2, 2),
    mesh_of(4, 2),
    mesh_of(2, 4),
    mesh_of(8),
    mesh_of(2, 2, 2, devices=ORDER),
    mesh_of(4, 2, devices=(0, 2, 4, 6, 1, 3, 5, 7)),
]


def said(found: Members, mesh: DeviceMesh) -> set[tuple[int, ...]]:
    """The device numbers of each group, members in order."""
    if found.groups is None:
        return set(map(tuple, mesh.groups(found.names).tolist()))
    assert found.names == mesh.names
    return {tuple(mesh.devices[p] for p in group) for group in found.groups}


@pytest.mark.smoke
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.axes} {mesh.devices}")
@pytest.mark.parametrize("lying", MESHES, ids=lambda mesh: f"{mesh.axes} {mesh.devices}")
def test_members_are_the_groups_of_the_layout(mesh: DeviceMesh, lying: DeviceMesh) -> None:
    for count in range(1, len(lying.axes) + 1):
        for axes in itertools.permutations(lying.names, count):
            found = members(mesh, lying, axes)
            assert found.size == lying.size(axes)
            assert said(found, mesh) == set(map(tuple, lying.groups(axes).tolist()))


def test_the_programs_own_axes_are_named() -> None:
    for mesh in MESHES:
        for count in range(1, len(mesh.axes) + 1):
            for axes in itertools.permutations(mesh.names, count):
                assert members(mesh, mesh, axes) == Members(mesh.size(axes), axes)


@pytest.mark.parametrize(
    ("lying", "axes", "names"),
    [
        (mesh_of(4, 2), ("x0",), ("x0", "x1")),
        (mesh_of(4, 2), ("x1", "x0"), ("x2", "x0", "x1")),
        (mesh_of(8), ("x0",), ("x0", "x1", "x2")),
        (mesh_of(2, 4, devices=(0, 2, 4, 6, 1, 3, 5, 7)), ("x1",), ("x0", "x1")),
        (mesh_of(2, 4, devices=(0, 2, 4, 6, 1, 3, 5, 7)), ("x0",), ("x2",)),
        (mesh_of(2, 2, 2, devices=(0, 4, 2, 6, 1, 5, 3, 7)), ("x0", "x2"), ("x2", "x0")),
        (mesh_of(2, 4, devices=(0, 2, 6, 4, 1, 3, 7, 5)), ("x0",), ("x2",)),  # the order of the groups does not matter
    ],
    ids=str,
)
def test_axes_of_another_mesh_that_are_the_programs(lying: DeviceMesh, axes, names) -> None:
    assert members(mesh_of(2, 2, 2), lying, axes) == Members(lying.size(axes), names)


@pytest.mark.parametrize(
    ("lying", "axes"),
    [
        (mesh_of(2, 4, devices=(0, 2, 6, 4, 1, 3, 7, 5)), ("x1",)),  # the order of the members does
        (mesh_of(2, 4, devices=(1, 0, 2, 3, 4, 5, 6, 7)), ("x1",)),
        (mesh_of(2, 4, devices=ORDER), ("x0",)),
    ],
    ids=str,
)
def test_other_groups_are_listed(lying: DeviceMesh, axes) -> None:
    found = members(mesh_of(2, 2, 2), lying, axes)
    assert found.groups is not None
    assert found.over["axis_index_groups"] == [list(group) for group in found.groups]
    assert found.over["axis_name"] == ("x0", "x1", "x2")


def test_a_mesh_of_some_devices_counts_positions() -> None:
    mesh = mesh_of(2, 2, devices=(7, 4, 5, 6))
    assert members(mesh, mesh_of(2, 2, devices=(7, 5, 4, 6)), ("x0",)) == Members(2, ("x1",))
    assert members(mesh, mesh_of(4, devices=(4, 5, 6, 7)), ("x0",)) == Members(4, ("x0", "x1"), ((1, 2, 3, 0),))


def test_one_name_stands_by_itself() -> None:
    assert axis_names(("x0",)) == "x0"
    assert axis_names(("x0", "x1")) == ("x0", "x1")
    assert Members(2, ("x0",)).over == {"axis_name": "x0", "axis_index_groups": None}


def test_index_within_the_group() -> None:
    mesh = mesh_of(2, 2, 2)
    cases = [(lying, axes) for lying in MESHES for axes in [(lying.names[0],), lying.names[::-1]]]
    physical = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), mesh.names)

    def local() -> list[jax.Array]:
        return [members(mesh, *case).index()[None] for case in cases]

    run = jax.jit(jax.shard_map(local, mesh=physical, in_specs=(), out_specs=P(mesh.names), check_vma=False))
    for (lying, axes), index in zip(cases, run(), strict=True):
        along = dict(zip(lying.devices, lying.coordinates(axes).tolist(), strict=True))
        assert index.tolist() == [along[d] for d in mesh.devices]
