"""Boxes of indices: what two have in common, what is left of one, which of many cover it.

Searches ask millions of times: so tuples are made of lists, which take less time than generators.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from jscaler.ir.mask import Interval

Box = tuple[Interval, ...]
Tag = TypeVar("Tag", bound=Hashable)


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod([stop - start for start, stop in box])


def extents(box: Box) -> tuple[int, ...]:
    """The shape of the box."""
    return tuple([stop - start for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """What both cover, or None."""
    common = tuple([(max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True)])
    return None if any(stop <= start for start, stop in common) else common


def subtract(box: Box, hole: Box) -> list[Box]:
    """``box`` without ``hole``: at most two slabs per dim."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    rest = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        around = ((start, low), (high, stop))
        rest += [(*common[:dim], slab, *box[dim + 1 :]) for slab in around if slab[0] < slab[1]]
    return rest


def without(boxes: Iterable[Box], holes: Iterable[Box]) -> list[Box]:
    """``boxes`` without all of ``holes``."""
    rest = list(boxes)
    for hole in holes:
        rest = [piece for box in rest for piece in subtract(box, hole)]
    return rest


def merge(boxes: Iterable[Box]) -> list[Box]:
    """Join disjoint boxes that lie side by side, dim by dim, until none do."""
    found = list(boxes)
    count = None
    while len(found) > 1 and count != len(found):
        count = len(found)
        for dim in range(len(found[0])):
            found = _merge_along(found, dim)
    return found


def _merge_along(boxes: list[Box], dim: int) -> list[Box]:
    rows: dict[Box, list[Interval]] = {}
    for box in boxes:
        rows.setdefault((*box[:dim], *box[dim + 1 :]), []).append(box[dim])
    result = []
    for row, intervals in rows.items():
        joined: list[Interval] = []
        for start, stop in sorted(intervals):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        result += [(*row[:dim], interval, *row[dim:]) for interval in joined]
    return result


def cut(box: Box, parts: int) -> list[Box]:
    """At most ``parts`` slabs, equal where a dim divides: fewer shapes are fewer rounds."""
    sizes = extents(box)
    if not sizes or parts == 1:
        return [box]
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] % parts == 0, sizes[d]))
    start, parts = box[dim][0], min(parts, sizes[dim])
    bounds = [start + i * sizes[dim] // parts for i in range(parts + 1)]
    return [(*box[:dim], slab, *box[dim + 1 :]) for slab in itertools.pairwise(bounds)]


def overlay(items: Iterable[tuple[Box, Tag]]) -> list[tuple[Box, tuple[Tag, ...]]]:
    """Cut overlapping boxes into disjoint ones, each with the tags of all boxes that cover it."""
    same: dict[Box, list[Tag]] = {}
    for box, tag in items:
        same.setdefault(box, []).append(tag)
    atoms: list[tuple[Box, tuple[Tag, ...]]] = []
    for box, tags in same.items():
        rest, after = [box], []
        for atom, others in atoms:
            common = intersect(atom, box)
            if common is None:
                after.append((atom, others))
            else:
                after += [(common, (*others, *tags)), *((piece, others) for piece in subtract(atom, common))]
                rest = without(rest, [common])
        atoms = after + [(piece, tuple(tags)) for piece in rest]
    return atoms


class Cover:
    """Many boxes, asked which of them meet a box. Answers are kept: devices often ask the same.

    Args:
        boxes: distinct boxes of one number of dims.
    """

    def __init__(self, boxes: Sequence[Box]):
        self.boxes = tuple(boxes)
        bounds = np.array(self.boxes, dtype=np.int64).reshape(len(self.boxes), -1, 2)
        self._low, self._high = bounds[..., 0], bounds[..., 1]
        self._hits: dict[Box, list[tuple[int, Box]]] = {}
        self._disjoint: dict[Box, bool] = {}

    def hits(self, box: Box) -> list[tuple[int, Box]]:
        """The index of each box that meets ``box``, and what they have in common."""
        if box not in self._hits:
            start, stop = np.array(box, dtype=np.int64).reshape(-1, 2).T
            low, high = np.maximum(self._low, start), np.minimum(self._high, stop)
            index = np.flatnonzero((low < high).all(axis=1))
            found = np.stack([low[index], high[index]], axis=-1).tolist()
            self._hits[box] = [(i, tuple([(a, b) for a, b in f])) for i, f in zip(index.tolist(), found, strict=True)]
            self._disjoint[box] = _disjoint(low[index], high[index])
        return self._hits[box]

    def disjoint(self, box: Box) -> bool:
        """Whether no element of ``box`` lies in two of the boxes."""
        self.hits(box)
        return self._disjoint[box]

    def rest(self, box: Box) -> list[Box]:
        """What none of the boxes covers of ``box``."""
        hits = [common for _, common in self.hits(box)]
        if self.disjoint(box) and sum(map(volume, hits)) == volume(box):
            return []
        return without([box], hits)


def _disjoint(low: np.ndarray, high: np.ndarray) -> bool:
    """Whether boxes are pairwise disjoint: first along one dim, then each against each."""
    if len(low) < 2:
        return True
    for dim in range(low.shape[1]):
        order = np.argsort(low[:, dim])
        if (high[order[:-1], dim] <= low[order[1:], dim]).all():
            return True
    if len(low) > 1024:  # the answer "perhaps not" is safe, only slower
        return False
    meet = (np.maximum(low, low[:, None]) < np.minimum(high, high[:, None])).all(axis=-1)
    return int(meet.sum()) == len(low)
