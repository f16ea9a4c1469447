"""``Mask``: which part of a PTensor an op reads or writes. A box over refined sub-dims, and a value share.

A dim may be refined into ordered sub-dims (a flat qkv kernel's last dim of ``3·h·d`` as ``(3, h, d)``), so that
"heads 0 and 1 of q, k and v" is a box. A value share says that the part holds one of ``count`` summands (or maxima,
minima) of those elements; shares nest: a summand of a summand.

    shape (4, 6), dim 1 refined to (3, 2)          box: rows 0-1, all three, second of two
    . # . # . #                                    Mask(((4,), (3, 2)), (((0, 2),), ((0, 3), (1, 2))))
    . # . # . #
    . . . . . .
    . . . . . .
"""

import math
from dataclasses import dataclass
from typing import Literal

Combiner = Literal["add", "max", "min"]
Interval = tuple[int, int]  # start, stop
SubDims = tuple[tuple[int, ...], ...]  # per dim the sizes of its sub-dims, major first


@dataclass(frozen=True)
class Share:
    """One of ``count`` values that ``combiner`` joins to the whole."""

    position: int
    count: int
    combiner: Combiner = "add"

    def __str__(self) -> str:
        return f"{self.position}/{self.count} {self.combiner}"


@dataclass(frozen=True)
class Mask:
    """A box over refined sub-dims and nested value shares, outermost share first."""

    subdims: SubDims
    box: tuple[tuple[Interval, ...], ...]
    shares: tuple[Share, ...] = ()

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Mask":
        """The mask of a whole tensor of ``shape``."""
        return Mask(tuple((s,) for s in shape), tuple(((0, s),) for s in shape))

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return math.prod(stop - start for dim in self.box for start, stop in dim)

    def __str__(self) -> str:
        dims = ", ".join("·".join(f"{a}:{b}" for a, b in dim) for dim in self.box)
        return f"[{dims}]" + "".join(f" share {s}" for s in self.shares)


def runs(sizes: tuple[int, ...], box: tuple[Interval, ...]) -> list[Interval]:
    """What a box over the sub-dims of one dim covers of the dim itself: runs of neighbours, equally long, in order."""
    if any(stop <= start for start, stop in box):
        return []
    found = [(0, 1)]  # in units of what lies below the sub-dims so far
    for size, (start, stop) in zip(sizes, box, strict=True):
        if stop - start == size:
            found = [(a * size, b * size) for a, b in found]
        else:
            found = [(i * size + start, i * size + stop) for a, b in found for i in range(a, b)]
    return found
