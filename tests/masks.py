"""The slow, obvious meaning of a mask."""

import itertools
from collections.abc import Iterator

from jscaler.ir import Mask


def elements(mask: Mask) -> Iterator[tuple[int, ...]]:
    """The index of every element of the box in the *unrefined* tensor."""
    dims = zip(mask.subdims, mask.box, strict=True)
    yield from itertools.product(*(_positions(sizes, intervals) for sizes, intervals in dims))


def _positions(sizes: tuple[int, ...], intervals: tuple[tuple[int, int], ...]) -> list[int]:
    positions = [0]
    for size, (start, stop) in zip(sizes, intervals, strict=True):
        positions = [p * size + i for p in positions for i in range(start, stop)]
    return positions
