"""The search finds the cheapest path: against an exhaustive relaxation of the whole graph of layouts."""

import itertools
import math

import pytest
from materialize.layouts import every_layout, mesh_of

from jscaler.materialize import Layout, Transition, adapter_stages, cheapest_path
from jscaler.materialize.transitions import transitions_from

ITEMSIZE = 4
MESHES = [mesh_of(2, 2), mesh_of(2, 3), mesh_of(2, 2, devices=(3, 1, 0, 2))]
SHAPE = ((6,), (12,))  # on 2 × 2 devices, a dim of 6 cannot be cut twice


def least_bytes(source: Layout, combiners: tuple[str, ...] = ("add",)) -> dict[Layout, float]:
    """Bytes from ``source`` to every layout, by relaxing all transitions until nothing falls (Bellman-Ford)."""
    layouts = list(every_layout(source.mesh, source.subdims, combiners))
    edges = [
        (here, step.apply(here), step.bytes(here, ITEMSIZE))
        for here in layouts
        for step in transitions_from(here)
        if step.kind != "value_mask" or step.combiner in combiners
    ]
    least = dict.fromkeys(layouts, math.inf) | {source: 0.0}
    changed = True
    while changed:
        changed = False
        for here, beyond, cost in edges:
            if least[here] + cost < least[beyond] - 1e-9:
                least[beyond] = least[here] + cost
                changed = True
    return least


def walk(source: Layout, path: tuple[Transition, ...]) -> tuple[Layout, float]:
    """The layout at the end of ``path``, and its bytes."""
    here, sent = source, 0.0
    for step in path:
        sent += step.bytes(here, ITEMSIZE)
        here = step.apply(here)
    return here, sent


@pytest.mark.smoke
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.devices))
def test_optimum_equals_the_exhaustive_one(mesh) -> None:
    for source in every_layout(mesh, SHAPE):
        for target, least in least_bytes(source).items():
            path, cost = cheapest_path(source, target, ITEMSIZE)
            assert cost == pytest.approx(least), f"{source} -> {target} by {[str(s) for s in path]}"


def test_optimum_with_maxima() -> None:
    for source in every_layout(mesh_of(2, 2), ((4,),), ("max",)):
        for target, least in least_bytes(source, ("max",)).items():
            assert cheapest_path(source, target, ITEMSIZE)[1] == pytest.approx(least), f"{source} -> {target}"


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.devices))
def test_every_path_ends_at_its_target_and_costs_what_it_says(mesh) -> None:
    for source, target in itertools.product(every_layout(mesh, SHAPE), repeat=2):
        path, cost = cheapest_path(source, target, ITEMSIZE)
        end, sent = walk(source, path)
        assert end == target
        assert sent == pytest.approx(cost)
        assert bool(path) == (source != target)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.devices))
def test_no_two_neighbours_could_be_one_collective(mesh) -> None:
    for source, target in itertools.product(every_layout(mesh, SHAPE), repeat=2):
        path, _ = cheapest_path(source, target, ITEMSIZE)
        for first, second in itertools.pairwise(path):
            assert not first.kind == second.kind == "all_reduce", f"{source} -> {target}"
            assert not first.kind == second.kind == "all_gather" or first.source != second.source, f"{source} -> {target}"


def test_gathers_of_one_dim_run_as_one_collective_major_axis_first() -> None:
    mesh = mesh_of(2, 3)
    source = Layout(mesh, ((6,),), (("x1", "x0"),))
    path, cost = cheapest_path(source, Layout.replicated(mesh, (6,)), ITEMSIZE)
    assert path == (Transition("all_gather", ("x1", "x0"), source=0),)
    assert cost == 5 * ITEMSIZE


def test_sums_over_two_axes_run_as_one_collective() -> None:
    mesh = mesh_of(2, 2)
    source = Layout(mesh, (), (), (("x0", "add"), ("x1", "add")))
    path, cost = cheapest_path(source, Layout.replicated(mesh, ()), ITEMSIZE)
    assert path == (Transition("all_reduce", ("x0", "x1")),)
    assert cost == 2 * 3 / 4 * ITEMSIZE


def test_sums_that_are_wanted_whole_are_not_scattered_first() -> None:
    """One all-reduce over both axes sends no more than scattering and gathering would, and is one step, not two."""
    mesh = mesh_of(2, 2)
    source = Layout(mesh, ((8,), (8,)), ((), ()), (("x0", "add"), ("x1", "add")))
    path, cost = cheapest_path(source, Layout.replicated(mesh, (8, 8)), ITEMSIZE)
    assert [step.kind for step in path] == ["all_reduce"]
    assert cost == 2 * 3 / 4 * 64 * ITEMSIZE


def test_stages_view_different_refinements_alike() -> None:
    """A cut of the flat dim is a cut of its major sub-dim: nothing to send, nothing to do."""
    mesh = mesh_of(2, 2)
    flat, heads = Layout(mesh, ((24,),), (("x0", "x1"),)), Layout(mesh, ((4, 6),), (("x0", "x1"), ()))
    assert adapter_stages(flat, heads, ITEMSIZE) == ((), 0.0)
    assert adapter_stages(heads, flat, ITEMSIZE) == ((), 0.0)


def test_stages_of_all_pairs_with_different_refinements_connect() -> None:
    mesh = mesh_of(2, 2)
    refinements = [((24,), (4,)), ((4, 6), (4,)), ((3, 8), (2, 2))]
    layouts = [layout for subdims in refinements for layout in every_layout(mesh, subdims)]
    for source, target in itertools.product(layouts, repeat=2):
        stages, cost = adapter_stages(source, target, ITEMSIZE)
        sent, end = 0.0, source
        for start, path in stages:
            assert start.local_shape == end.local_shape
            end, more = walk(start, path)
            sent += more
        assert (end.local_shape, end.values) == (target.local_shape, target.values)
        assert sent == pytest.approx(cost)
        positions = range(len(mesh.devices))
        ends = [set(end.mask(p).elements()) for p in positions]
        assert ends == [set(target.mask(p).elements()) for p in positions]
