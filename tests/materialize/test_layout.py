"""Layouts: their masks by brute force, their PartitionSpecs by JAX's own NamedSharding."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from masks import elements
from materialize.layouts import assert_lies_as, every_layout, make_parts, mesh_of

from jscaler.materialize import Layout
from jscaler.materialize.layout import common_subdims

MESHES = [mesh_of(4), mesh_of(2, 2), mesh_of(2, 3), mesh_of(2, 2, devices=(2, 0, 3, 1))]
RUNS = [0, 1, *range(4, 12), 3, 2, *range(30, 36)]
STRIDED = [d for first in range(8) for d in range(first, 32, 8)]
SUBDIMS = [((6,), (12,)), ((6,), (3, 4)), ((2, 3), (2, 2, 3))]


def every(mesh) -> list[Layout]:
    return [layout for subdims in SUBDIMS for layout in every_layout(mesh, subdims)]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.axes))
def test_masks_partition_the_tensor(mesh) -> None:
    """Each element lies on as many devices as its replicas and value shares, with every share equally often."""
    for layout in every(mesh):
        masks = [layout.mask(p) for p in range(len(mesh.devices))]
        held = Counter((element, mask.shares) for mask in masks for element in elements(mask))
        num_shares = mesh.size(tuple(axis for axis, _ in layout.values))
        assert set(held.values()) == {mesh.size(layout.free)}, layout
        assert len(held) == 6 * 12 * num_shares, layout
        assert {element for element, _ in held} == set(np.ndindex(6, 12)), layout
        assert all(mask.size == np.prod(layout.local_shape) for mask in masks), layout


@pytest.mark.smoke
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.axes))
def test_partition_spec_means_the_same_as_the_masks(mesh) -> None:
    devices = np.array([jax.devices()[d] for d in mesh.devices]).reshape([size for _, size in mesh.axes])
    physical, num_storable = Mesh(devices, mesh.names), 0
    for layout in every(mesh):
        spec = layout.partition_spec()
        if spec is None:
            continue
        num_storable += 1
        indices = NamedSharding(physical, spec).devices_indices_map((6, 12))
        positions = np.arange(72).reshape(6, 12)
        for position, device in enumerate(devices.flat):
            theirs = set(positions[indices[device]].flat)
            assert theirs == {int(positions[e]) for e in elements(layout.mask(position))}, f"{layout} as {spec}"
    assert num_storable


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (Layout(mesh_of(2, 2), ((6,), (12,)), ((), ())), P()),
        (Layout(mesh_of(2, 2), ((6,), (12,)), (("x0",), ())), P("x0")),
        (Layout(mesh_of(2, 2), ((6,), (12,)), ((), ("x1", "x0"))), P(None, ("x1", "x0"))),
        (Layout(mesh_of(2, 2), ((6,), (12,)), (("x0",), ()), (("x1", "add"),)), None),  # value shares
        (Layout(mesh_of(2, 2), ((6,), (2, 6)), ((), ("x0",), ("x1",))), P(None, ("x0", "x1"))),  # the major one is used up
        (Layout(mesh_of(2, 2), ((6,), (4, 3)), ((), ("x0",), ())), P(None, "x0")),
        (Layout(mesh_of(2, 2), ((6,), (3, 4)), ((), (), ("x0",))), None),  # strided: no PartitionSpec can say it
        (Layout(mesh_of(2, 2), ((6,), (4, 4)), ((), ("x0",), ("x1",))), None),
        (Layout(mesh_of(2, 2), ((6,), (1, 12)), ((), (), ("x0",))), P(None, "x0")),
    ],
    ids=str,
)
def test_partition_spec(layout: Layout, spec: P | None) -> None:
    assert layout.partition_spec() == spec


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 9])
@pytest.mark.parametrize(
    "mesh", [mesh_of(4), mesh_of(2, 3), mesh_of(2, 2, devices=(2, 0, 3, 1))], ids=lambda m: str(m.axes)
)
def test_blocks_of_sizes_that_the_parts_do_not_divide(mesh, size: int) -> None:
    """Blocks of ⌈size / parts⌉, the last ones short or empty; every part is stored in the same shape."""
    for count in range(1, len(mesh.names) + 1):
        for axes in itertools.permutations(mesh.names, count):
            layout = Layout(mesh, ((2,), (size, 2)), ((), axes, ()))
            block = -(-size // mesh.size(axes))
            assert layout.local_shape == (2, block * 2)
            assert layout.even == (size % mesh.size(axes) == 0)
            for position in range(len(mesh.devices)):
                number = mesh.coordinate(position, axes)
                wanted = {(i, 2 * j + k) for i in (0, 1) for j in range(size) for k in (0, 1) if j // block == number}
                assert set(elements(layout.mask(position))) == wanted


def test_equal_numbers_of_blocks_hold_equal_data() -> None:
    for layout in every_layout(mesh_of(2, 3), ((6,), (3, 4)), ("add", "max")):
        masks, blocks = [layout.mask(p) for p in range(6)], layout.blocks().tolist()
        for a, b in itertools.product(range(6), repeat=2):
            assert (masks[a] == masks[b]) == (blocks[a] == blocks[b])


def test_neighbouring_shares_of_one_combiner_count_together() -> None:
    mesh = mesh_of(2, 3, 2)
    values = (("x0", "add"), ("x1", "add"), ("x2", "max"))
    assert Layout(mesh, (), (), values).shares == ((6, "add"), (2, "max"))
    assert Layout(mesh, (), (), (values[0], values[2])).shares == ((2, "add"), (2, "max"))
    assert Layout.replicated(mesh, ()).shares == ()


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.axes))
def test_refining_keeps_every_mask(mesh) -> None:
    refined_some = refused_some = False
    for layout in every_layout(mesh, ((6,), (12,))):
        for subdims in (((2, 3), (12,)), ((3, 2), (3, 4)), ((6,), (2, 2, 3))):
            finer = layout.refined(subdims)
            refined_some |= finer is not None
            refused_some |= finer is None
            if finer is None:
                continue
            assert finer.subdims == subdims
            assert finer.values == layout.values
            for position in range(len(mesh.devices)):
                mine, theirs = layout.mask(position), finer.mask(position)
                assert set(elements(mine)) == set(elements(theirs)), f"{layout} as {subdims}"
                assert mine.shares == theirs.shares
    assert refined_some
    assert refused_some


def test_a_cut_between_the_new_boundaries_cannot_be_refined() -> None:
    mesh = mesh_of(2, 2)
    assert Layout(mesh, ((12,),), (("x0", "x1"),)).refined(((3, 4),)) is None  # quarters of 12 are 3: not 4, not 12
    assert Layout(mesh, ((12,),), (("x0", "x1"),)).refined(((2, 6),)).cuts == (("x0",), ("x1",))
    assert Layout(mesh, ((12,),), (("x0", "x1"),)).refined(((4, 3),)).cuts == (("x0", "x1"), ())


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (((12,),), ((12,),), ((12,),)),
        (((12,),), ((3, 4),), ((3, 4),)),
        (((2, 6),), ((4, 3),), ((2, 2, 3),)),
        (((3, 4, 2),), ((24,),), ((3, 4, 2),)),
        (((3, 8),), ((12, 2),), ((3, 4, 2),)),
        (((3, 8),), ((4, 6),), None),
        (((2, 3),), ((3, 2),), None),
        (((1, 6), (5,)), ((6,), (5, 1)), ((6,), (5,))),  # ones do not matter
        (((1,), ()), ((1,), (1,)), ((1,), (1,))),
    ],
    ids=str,
)
def test_common_subdims(a, b, common) -> None:
    assert common_subdims(a, b) == common
    assert common_subdims(b, a) == common


def test_shapes_of_the_parts() -> None:
    layout = Layout(mesh_of(2, 3), ((6,), (3, 4)), (("x0",), ("x1",), ()))
    assert (layout.shape, layout.sizes) == ((6, 12), (6, 3, 4))
    assert (layout.local_shape, layout.local_sizes) == ((3, 4), (3, 1, 4))
    assert layout.by_dim == ((("x0",),), (("x1",), ()))
    assert Layout.replicated(layout.mesh, (6, 12)).free == ("x0", "x1")


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout.replicated(mesh_of(8), (4, 4)), "R8 V1 D(1,1) on [0 1 2 3 4 5 6 7]"),
        (Layout(mesh_of(2, 4), ((8,), (8,)), (("x1",), ())), "R2 V1 D(4,1) on [0 1 2 3 4 5 6 7]"),
        (Layout(mesh_of(2, 2), ((8,), (8,)), ((), ("x1",)), (("x0", "add"),)), "R1 V2 D(1,2) on [0 1 2 3]"),
        (Layout(mesh_of(2, 2), ((8,), (3, 4)), ((), (), ("x0",))), "R2 V1 D(1,1·2) on [0 2 1 3]"),
        (Layout.replicated(mesh_of(16), ()), "R16 V1 D() on [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]"),
        (Layout.replicated(mesh_of(32), ()), "R32 V1 D() on [0-31]"),
        (Layout(mesh_of(4, 8), ((8,),), (("x1", "x0"),)), f"R1 V1 D(32) on [{' '.join(map(str, STRIDED))}]"),
        (Layout.replicated(mesh_of(18, devices=RUNS), ()), "R18 V1 D() on [0 1 4-11 3 2 30-35]"),
        (Layout(mesh_of(2, 2), (), (), (("x0", "max"), ("x1", "add"))), "R1 V2max·2 D() on [0 1 2 3]"),
        (Layout(mesh_of(2), ((8,),), (("x0",),), (), "host"), "R1 V1 D(2) on [0 1] @host"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_str(layout: Layout, text: str) -> None:
    assert str(layout) == text


def test_the_helper_of_these_tests_can_fail() -> None:
    whole, rng = np.arange(24).reshape(4, 6), np.random.default_rng(0)
    layout = Layout(mesh_of(2, 2), ((4,), (6,)), (("x0",), ()), (("x1", "add"),))
    parts = make_parts(layout, whole, rng)
    assert_lies_as(layout, parts, whole)
    with pytest.raises(AssertionError):
        assert_lies_as(layout, [parts[2], parts[3], parts[0], parts[1]], whole)  # other rows
    with pytest.raises(AssertionError):
        assert_lies_as(layout, [parts[0], parts[0], *parts[2:]], whole)  # one summand twice
