"""Helpers of the layout tests: all layouts of a tensor on a mesh."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from bench.numeric import check_parts, deal
from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask, SubDims
from jscaler.materialize import DeviceMesh, Layout
from jscaler.verification.frames import cells_of, part_shape


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
    return cells_of(mask, whole).reshape(part_shape(mask))


def make_parts(layout: Layout, whole: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    return deal(layout, whole, rng)


def assert_lies_as(layout: Layout, parts: Sequence[np.ndarray], whole: np.ndarray) -> None:
    """Every device holds exactly what its mask says."""
    try:
        check_parts(layout, parts, whole)
    except VerificationError as error:
        raise AssertionError(str(error)) from None
