"""The canonical form, and two layouts on one mesh: nothing changes but the axes."""

import itertools
import random

import pytest
from materialize.layouts import every_layout, mesh_of
from materialize.oracle import count_layouts, meaning

from jscaler.materialize import Layout, parse_layout
from jscaler.materialize.canonical import canonical, in_primes, on_common_mesh, orderless, primes

MESHES = [mesh_of(4), mesh_of(2, 2), mesh_of(2, 3, devices=(5, 1, 0, 4, 2, 3)), mesh_of(2, 2, 2)]
SUBDIMS = [(), ((6,), (8,)), ((4,), (2, 4))]


def every(mesh, combiners: tuple[str, ...] = ("add", "max")) -> list[Layout]:
    return [layout for subdims in SUBDIMS for layout in every_layout(mesh, subdims, combiners)]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.axes))
def test_the_canonical_form_says_the_same_over_axes_in_order(mesh) -> None:
    for layout in every(mesh):
        found = canonical(layout)
        assert meaning(found) == meaning(layout)
        assert str(found) == str(layout)
        assert canonical(found) == found
        axes = (*found.free, *(a for a, _ in found.values), *(a for cut in found.cuts for a in cut))
        assert axes == found.mesh.names, "replicas, value shares, dims"
        assert len(found.free) <= 1
        assert all(len(cut) <= 1 for cut in found.cuts)
        assert len(found.values) == len(found.shares)


def test_equal_texts_are_equal_canonical_forms() -> None:
    layouts = [layout for mesh in (mesh_of(4), mesh_of(2, 2)) for layout in every_layout(mesh, ((4,), (8,)))]
    by_text: dict[str, set[Layout]] = {}
    for layout in layouts:
        by_text.setdefault(str(layout), set()).add(canonical(layout))
    assert all(len(forms) == 1 for forms in by_text.values())
    assert len(by_text) < len(layouts)


@pytest.mark.smoke
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.axes))
def test_two_layouts_of_one_mesh_share_its_coarsest_form(mesh) -> None:
    rng, layouts = random.Random(0), list(every_layout(mesh, ((8,), (4,)), ("add",)))
    for source, target in [rng.choices(layouts, k=2) for _ in range(200)]:
        first, last = on_common_mesh(source, target)
        assert first.mesh == last.mesh
        assert len(first.mesh.axes) <= len(mesh.axes)
        assert (meaning(first), meaning(last)) == (meaning(source), meaning(target))
        for a, b in itertools.pairwise(first.mesh.names):  # some layout tells neighbours apart
            assert any(not neighbours(layout, a, b) for layout in (first, last))


def neighbours(layout: Layout, a: str, b: str) -> bool:
    """Whether both axes could be one for ``layout``."""
    uses = [layout.free, *layout.cuts, tuple(x for x, _ in layout.values)]
    same = len({combiner for x, combiner in layout.values if x in (a, b)}) < 2
    return same and any((a, b) in itertools.pairwise(use) for use in uses)


@pytest.mark.parametrize("num_devices", [4, 6, 8])
def test_random_device_orders_share_a_mesh_or_none(num_devices: int) -> None:
    rng, found = random.Random(1), 0
    for _ in range(60):
        source, target = rng.choices(count_layouts(num_devices, (8, 12), rng=rng), k=2)
        both = on_common_mesh(source, target)
        if both is not None:
            found += 1
            assert both[0].mesh == both[1].mesh
            assert [meaning(layout) for layout in both] == [meaning(source), meaning(target)]
    assert found


def test_summands_stand_in_the_order_of_the_mesh() -> None:
    """Which of the shares of one combiner is the outer one does not matter; what nests keeps its order."""
    across = mesh_of(2, 2, 2, devices=(0, 4, 2, 6, 1, 5, 3, 7))
    plain = Layout(mesh_of(2, 2, 2), ((2,),), (("x0",),))
    for combiners, axes in ((("add", "add"), ("x0", "x2")), (("max", "add"), ("x2", "x0"))):
        values = tuple(zip(("x0", "x2"), combiners, strict=True))
        first, last = on_common_mesh(plain, Layout(across, ((2,),), (("x1",),), values))
        assert first.mesh.devices == tuple(range(8))
        assert last.values == tuple(zip(axes, combiners, strict=True))


def test_meshes_without_a_common_refinement() -> None:
    source, target = parse_layout("R2 V1 D(3)", (6,)), parse_layout("R3 V1 D(2)", (6,))
    assert on_common_mesh(source, target) is None
    assert on_common_mesh(source, parse_layout("R1 V1 D(6)", (6,))) is not None


def test_a_full_copy_lies_in_any_order() -> None:
    copy, cut = parse_layout("R4 V1 D(1) on [3 1 2 0]", (8,)), parse_layout("R1 V1 D(4) on [1 0 2 3]", (8,))
    assert orderless(copy)
    assert not orderless(cut)
    assert not orderless(parse_layout("R1 V4 D(1)", (8,)))
    for pair in ((copy, cut), (cut, copy)):
        both = on_common_mesh(*pair)
        assert both[0].mesh == both[1].mesh
        assert both[0].mesh.devices == (1, 0, 2, 3)
        assert [meaning(layout) for layout in both] == [meaning(layout) for layout in pair]


@pytest.mark.parametrize("mesh", [mesh_of(8), mesh_of(6, 2), mesh_of(4, 3)], ids=lambda mesh: str(mesh.axes))
def test_axes_of_prime_size(mesh) -> None:
    for layout in every_layout(mesh, ((24,), (2, 12)), ("add", "max")):
        fine = in_primes(layout)
        assert all(primes(size) == [size] for _, size in fine.mesh.axes)
        assert meaning(fine) == meaning(layout)
        assert canonical(fine) == canonical(layout)


def test_primes() -> None:
    assert [primes(n) for n in (1, 2, 7, 8, 12, 90)] == [[], [2], [7], [2, 2, 2], [2, 2, 3], [2, 3, 3, 5]]
