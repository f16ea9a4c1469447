"""Masks in common coordinates: the boxes of each mask, and where each lies in its device's buffer.

A dim of which every mask is a box over one common refinement is seen refined. In any other dim a mask is several
contiguous runs of the unrefined dim:

    24 = (3, 8), heads 2:4 of 8 held     24 = (4, 6), one of 4 wanted     no common refinement, runs of the flat dim:
    held 2:4 10:12 18:20                 wanted 6:12                      6:12 meets 10:12
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.ir.mask import Interval, Mask, Share, SubDims, runs
from jscaler.materialize.boxes import Box
from jscaler.materialize.layout import common_subdims

Shares = tuple[Share, ...]
Part = tuple[Box, tuple[int, ...]]  # of one dim: intervals of its sub-dims, and per sub-dim local minus global index


@dataclass(frozen=True)
class Holding:
    """The device at ``position`` of the group holds, or wants, ``mask``.

    Its buffer has the mask's elements in their order, dim by dim (the shape of a dim is the product of its sub-dims'
    extents), and zeros behind them up to the largest extent over the devices.
    """

    position: int
    mask: Mask


@dataclass(frozen=True)
class MaskBox:
    """A box of a device's mask. In the device's buffer it lies at index + ``offset``."""

    position: int
    box: Box
    offset: tuple[int, ...]
    shares: Shares


@dataclass(frozen=True)
class BoxSide:
    """All that the devices hold, or all that one consumer wants.

    Attributes:
        shape: the buffer's shape, equal on all devices.
        view: the buffer's shape over the common refinement.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    fragments: tuple[MaskBox, ...]


def fragment(shape: tuple[int, ...], sides: Sequence[Sequence[Holding]]) -> tuple[SubDims, list[BoxSide]]:
    """The common coordinates of all masks, and each side in them.

    Args:
        shape: the tensor's shape.
        sides: what is held, and what each consumer wants.
    """
    columns = [_dim(dim, size, sides) for dim, size in enumerate(shape)]
    result = []
    for number, side in enumerate(sides):
        extents = [_extent(dim, side) for dim in range(len(shape))]
        views = [view for _, column in columns for view in column[number][0]]
        found = [
            MaskBox(holding.position, box, offset, tuple(s for s in holding.mask.shares if s.count > 1))
            for row, holding in enumerate(side)
            for box, offset in _product([column[number][1][row] for _, column in columns])
        ]
        result.append(BoxSide(tuple(extents), tuple(views), tuple(found)))
    return tuple(sizes for sizes, _ in columns), result


def _extent(dim: int, side: Sequence[Holding]) -> int:
    return max((math.prod(max(0, b - a) for a, b in h.mask.box[dim]) for h in side), default=0)


def _product(columns: Sequence[Sequence[Part]]) -> list[Part]:
    """The boxes of a whole mask from the parts of its dims."""
    return [
        (tuple(i for box, _ in parts for i in box), tuple(o for _, offset in parts for o in offset))
        for parts in itertools.product(*columns)
    ]


Parts = Sequence[Sequence[Part]]  # of each mask of a side
Column = list[tuple[tuple[int, ...], Parts]]  # per side its view and its parts


def _dim(dim: int, size: int, sides: Sequence[Sequence[Holding]]) -> tuple[tuple[int, ...], Column]:
    """One dim of all masks: the sizes of its sub-dims, and per side the view and the parts."""
    sizes = _common({holding.mask.subdims[dim]: None for side in sides for holding in side}, size)
    column = None if sizes is None else [_boxes(dim, sizes, side) for side in sides]
    if sizes is not None and column is not None and None not in column:
        return sizes, [found for found in column if found is not None]
    cut = [[_run_parts(h.mask.subdims[dim], h.mask.box[dim]) for h in side] for side in sides]
    return (size,), [((_extent(dim, side),), parts) for side, parts in zip(sides, cut, strict=True)]


def _common(subdims: Sequence[tuple[int, ...]] | dict[tuple[int, ...], None], size: int) -> tuple[int, ...] | None:
    """The coarsest refinement of one dim that refines all of ``subdims``."""
    result: SubDims | None = ((size,),)
    for sizes in subdims:
        result = common_subdims(result, (sizes,)) if result is not None and size else None
    return None if result is None else result[0]


def _boxes(dim: int, sizes: tuple[int, ...], side: Sequence[Holding]) -> tuple[tuple[int, ...], Parts] | None:
    """One dim of a side as boxes over ``sizes``; None where a mask is no box, or its buffer has no such view."""
    boxes = [_refine(h.mask.subdims[dim], h.mask.box[dim], sizes) for h in side]
    if None in boxes:
        return None
    found = [box for box in boxes if box is not None]
    shapes = {tuple(b - a for a, b in box) for box in found if box}
    if len({shape[1:] for shape in shapes}) > 1:  # only the major sub-dim may differ: the padding stands at the end
        return None
    view = tuple(max(sizes) for sizes in zip(*shapes, strict=True)) if shapes else (0,) * len(sizes)
    return view, [[(box, tuple(-a for a, _ in box))] if box else [] for box in found]


@functools.lru_cache(maxsize=4096)
def _refine(old: tuple[int, ...], box: Box, sizes: tuple[int, ...]) -> Box | None:
    """``box`` over ``old`` as a box over the finer ``sizes``; () if empty, None if it is no box."""
    if any(stop <= start for start, stop in box):
        return ()
    rest, result = list(sizes[::-1]), []
    for size, interval in zip(old[::-1], box[::-1], strict=True):
        pieces: list[int] = []
        while math.prod(pieces) < size:
            pieces.append(rest.pop(0))
        split = _split(interval, pieces[::-1])
        if split is None:
            return None
        result = [*split, *result]
    return (*((0, 1) for _ in rest), *result)  # what is left over has size one


def _split(interval: Interval, sizes: list[int]) -> list[Interval] | None:
    """An interval of a sub-dim that is refined into ``sizes``."""
    if not sizes:
        return []
    start, stop = interval
    block = math.prod(sizes[1:])
    if start % block == 0 and stop % block == 0:
        return [(start // block, stop // block), *((0, s) for s in sizes[1:])]
    major = start // block
    if major != (stop - 1) // block:
        return None
    minor = _split((start - major * block, stop - major * block), sizes[1:])
    return None if minor is None else [(major, major + 1), *minor]


@functools.lru_cache(maxsize=4096)
def _run_parts(sizes: tuple[int, ...], box: Box) -> tuple[Part, ...]:
    """The runs of a box over sub-dims, one behind another in the device's buffer."""
    return tuple((((start, stop),), (i * (stop - start) - start,)) for i, (start, stop) in enumerate(runs(sizes, box)))
