"""Helpers of the layout tests: all layouts of a tensor on a mesh, and what a layout means in numpy."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jscaler.ir.mask import Mask, Share, SubDims
from jscaler.materialize import DeviceMesh, Layout

JOIN = {"add": np.add, "max": np.maximum, "min": np.minimum}


def mesh_of(*sizes: int, devices: Sequence[int] | None = None) -> DeviceMesh:
    """Axes x0, x1, ... of ``sizes`` over ``devices``, by default 0, 1, ..."""
    return DeviceMesh(tuple(devices or range(int(np.prod(sizes)))), tuple((f"x{i}", size) for i, size in enumerate(sizes)))


def every_layout(mesh: DeviceMesh, subdims: SubDims, combiners: Sequence[str] = ("add",)) -> Iterator[Layout]:
    """Every use of every axis (replicate, a value share, cut a sub-dim) and every order of the axes of one cut."""
    sizes = [size for dim in subdims for size in dim]
    for uses in itertools.product((None, *combiners, *range(len(sizes))), repeat=len(mesh.names)):
        table = dict(zip(mesh.names, uses, strict=True))
        values = tuple((axis, use) for axis, use in table.items() if isinstance(use, str))
        orders = [list(itertools.permutations([a for a in mesh.names if table[a] == i])) for i in range(len(sizes))]
        for cuts in itertools.product(*orders):
            if all(size % mesh.size(axes) == 0 for size, axes in zip(sizes, cuts, strict=True)):
                yield Layout(mesh, subdims, cuts, values)


def box_of(mask: Mask, whole: np.ndarray) -> np.ndarray:
    """The elements of ``mask``'s box, in the shape of the part."""
    refined = whole.reshape([size for dim in mask.subdims for size in dim])
    part = refined[tuple(slice(*interval) for dim in mask.box for interval in dim)]
    return part.reshape([int(np.prod([b - a for a, b in dim])) for dim in mask.box])


def make_parts(layout: Layout, whole: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """What each device holds, by position: random value shares that join to ``whole``; equal masks hold equal data."""
    held: dict[tuple[Mask, tuple[Share, ...]], np.ndarray] = {}
    masks = [layout.mask(p) for p in range(len(layout.mesh.devices))]
    for mask in dict.fromkeys(Mask(m.subdims, m.box) for m in masks):
        for shares, part in _shares(box_of(mask, whole), layout, layout.values, rng):
            held[mask, shares] = part
    return [held[Mask(m.subdims, m.box), m.shares] for m in masks]


def _shares(
    value: np.ndarray, layout: Layout, values: Sequence[tuple[str, str]], rng: np.random.Generator
) -> Iterator[tuple[tuple[Share, ...], np.ndarray]]:
    """Break ``value`` into nested random shares, the outermost first."""
    if not values:
        yield (), value
        return
    (axis, combiner), *rest = values
    count = layout.mesh.size(axis)
    drawn = rng.integers(-3, 4, (count, *value.shape)).astype(value.dtype)
    if combiner == "add":
        drawn[0] = value - drawn[1:].sum(0)
    else:  # one share, another for each element, holds the extreme
        further = JOIN["min" if combiner == "max" else "max"](value, value + drawn)
        holder = rng.integers(0, count, value.shape)
        drawn = np.where(np.arange(count).reshape(-1, *[1] * value.ndim) == holder, value, further)
    for position in range(count):
        for inner, part in _shares(drawn[position], layout, rest, rng):
            yield (Share(position, count, combiner), *inner), part


def joined(layout: Layout, parts: Sequence[np.ndarray]) -> list[tuple[Mask, np.ndarray]]:
    """Join the value shares of ``parts`` within each group of devices; (box, values) for each.

    Checks that devices with equal masks hold equal data.
    """
    held: dict[Mask, np.ndarray] = {}
    for position, part in enumerate(parts):
        assert part.shape == layout.local_shape
        np.testing.assert_array_equal(held.setdefault(layout.mask(position), part), part)
    while any(mask.shares for mask in held):
        groups: dict[Mask, list[tuple[Share, np.ndarray]]] = {}
        for mask, part in held.items():  # the innermost share is joined first
            groups.setdefault(Mask(mask.subdims, mask.box, mask.shares[:-1]), []).append((mask.shares[-1], part))
        held = {}
        for mask, group in groups.items():
            assert sorted(share.position for share, _ in group) == list(range(group[0][0].count))
            held[mask] = JOIN[group[0][0].combiner].reduce([part for _, part in group])
    return list(held.items())


def assert_lies_as(layout: Layout, parts: Sequence[np.ndarray], whole: np.ndarray) -> None:
    """Every device holds exactly what its mask says."""
    for mask, part in joined(layout, parts):
        np.testing.assert_array_equal(part, box_of(mask, whole), err_msg=f"{mask} of {layout}")
