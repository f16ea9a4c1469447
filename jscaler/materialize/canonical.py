"""The canonical form of a layout: axes in the order replicas, value shares, dims, and as few of them as can be.

Any assignment of mesh axes is a row-major assignment of another order of the devices. Two layouts become comparable by
writing both on one mesh, whose axes are the coarsest common refinement of theirs.
"""

import dataclasses
import itertools

from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh, PlacedGrid, find_common_mesh


def canonical(layout: Layout) -> Layout:
    """The same layout with its axes in canonical order; neighbours of one use are merged."""
    return _on_digits(_on_digits(layout))  # in canonical order further axes are neighbours


def _on_digits(layout: Layout) -> Layout:
    """``layout`` on the mesh of its digits: runs of neighbouring axes that have one use, in canonical order."""
    names = [n for n in layout.mesh.names if layout.mesh.size(n) > 1]
    free = _runs([a for a in layout.free if a in names], layout)
    values = [
        (run, combiner)
        for combiner, group in itertools.groupby(layout.values, key=lambda v: v[1])
        for run in _runs([a for a, _ in group if a in names], layout)
    ]
    cuts = [_runs([a for a in axes if a in names], layout) for axes in layout.cuts]
    order = [*free, *(run for run, _ in values), *(run for runs in cuts for run in runs)]
    digit = {run: f"x{i}" for i, run in enumerate(order)}
    axes = tuple((digit[run], layout.mesh.size(run)) for run in order)
    devices = layout.mesh.groups(tuple(a for run in order for a in run)).reshape(-1)
    return dataclasses.replace(
        layout,
        mesh=DeviceMesh(tuple(devices.tolist()), axes),
        cuts=tuple(tuple(digit[run] for run in runs) for runs in cuts),
        values=tuple((digit[run], combiner) for run, combiner in values),
    )


def _runs(axes: list[str], layout: Layout) -> list[Axes]:
    """``axes`` grouped where one is the next minor neighbour of the one before."""
    names = [n for n in layout.mesh.names if layout.mesh.size(n) > 1]
    runs: list[Axes] = []
    for axis in axes:
        if runs and names.index(axis) == names.index(runs[-1][-1]) + 1:
            runs[-1] += (axis,)
        else:
            runs.append((axis,))
    return runs


def on_common_mesh(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts on one mesh, as coarse as they allow; None where no mesh is regular for both device orders."""
    if source.mesh == target.mesh:
        return _merged(_in_mesh_order(source), _in_mesh_order(target))
    first, second = _on_digits(source), _on_digits(target)
    if orderless(first):
        return dataclasses.replace(first, mesh=second.mesh), second
    if orderless(second):
        return first, dataclasses.replace(second, mesh=first.mesh)
    grids = [PlacedGrid("", tuple(s for _, s in m.axes), m.devices) for m in (first.mesh, second.mesh)]
    found = find_common_mesh(grids, source.mesh.devices)
    if found is None:
        return None
    mesh, covered = found
    return _rewritten(first, mesh, covered[grids[0]]), _rewritten(second, mesh, covered[grids[1]])


def _in_mesh_order(layout: Layout) -> Layout:
    """Shares of one combiner have no order among them: that of the mesh serves. Shares of several keep their nesting."""
    order = {name: i for i, name in enumerate(layout.mesh.names)}
    uniform = len({combiner for _, combiner in layout.values}) <= 1
    return (
        dataclasses.replace(layout, values=tuple(sorted(layout.values, key=lambda v: order[v[0]]))) if uniform else layout
    )


def _merged(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Two layouts of one mesh, over that mesh with neighbours merged that neither layout tells apart."""
    mesh = source.mesh
    joined = _joined(source) & _joined(target)
    runs: list[Axes] = []
    for name in mesh.names:
        if runs and (runs[-1][-1], name) in joined:
            runs[-1] += (name,)
        else:
            runs.append((name,))
    if len(runs) == len(mesh.names):
        return source, target
    axes = tuple(("·".join(run), mesh.size(run)) for run in runs)
    name_of = {run[0]: name for run, (name, _) in zip(runs, axes, strict=True)}
    coarse = DeviceMesh(mesh.devices, axes)
    both = []
    for layout in (source, target):
        cuts = tuple(tuple(name_of[a] for a in cut if a in name_of) for cut in layout.cuts)
        values = tuple((name_of[a], combiner) for a, combiner in layout.values if a in name_of)
        both.append(dataclasses.replace(layout, mesh=coarse, cuts=cuts, values=values))
    return both[0], both[1]


def _joined(layout: Layout) -> set[tuple[str, str]]:
    """The pairs of neighbouring axes that ``layout`` uses as one."""
    by_combiner = [[a for a, _ in run] for _, run in itertools.groupby(layout.values, key=lambda v: v[1])]
    uses = [list(layout.free), *by_combiner, *map(list, layout.cuts)]
    return {pair for use in uses for run in _runs(use, layout) for pair in itertools.pairwise(run)}


def orderless(layout: Layout) -> bool:
    """Whether ``layout`` is a full copy on every device: equal in any order of the devices."""
    return not layout.values and not any(layout.cuts)


def _rewritten(layout: Layout, mesh: DeviceMesh, covered: tuple[Axes, ...]) -> Layout:
    spans = dict(zip(layout.mesh.names, covered, strict=True))
    cuts = tuple(tuple(x for a in axes for x in spans[a]) for axes in layout.cuts)
    values = tuple((x, combiner) for a, combiner in layout.values for x in spans[a])
    return _in_mesh_order(dataclasses.replace(layout, mesh=mesh, cuts=cuts, values=values))


def in_primes(layout: Layout) -> Layout:
    """The same layout over axes of prime size, major first: for meshes without a common refinement."""
    axes: list[tuple[str, int]] = []
    spans: dict[str, Axes] = {}
    for name, size in layout.mesh.axes:
        pieces = [(f"{name}.{i}", p) for i, p in enumerate(primes(size))]
        spans[name] = tuple(n for n, _ in pieces)
        axes += pieces
    mesh = DeviceMesh(layout.mesh.devices, tuple(axes))
    return _rewritten(layout, mesh, tuple(spans[n] for n in layout.mesh.names))


def primes(number: int) -> list[int]:
    """Prime factors in rising order."""
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found
