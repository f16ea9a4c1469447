"""Who holds which value of which elements: the whole value, or shares of it in a tree.

A path of shares from the root says which value: () the whole, (0/2,) one of two summands of it, (0/2, 1/3) one of
three summands of that. The leaves below a path are the fewest held values that join to the path's value.

    held (0/2) by d0, (1/2, 0/2) by d1, (1/2, 1/2) by d2        leaves below (): all three; below (1/2): the last two
"""

from collections.abc import Sequence

from jscaler.ir.mask import Combiner, Share
from jscaler.materialize.boxes import Box, Cover, merge, without
from jscaler.materialize.mask_boxes import MaskBox, Shares

Family = tuple[int, Combiner]  # shares that join to one value: their number and their combiner
Owners = dict[int, tuple[int, ...]]  # position -> offset of the box in its buffer


class Holders:
    """An index of what is held.

    Args:
        held: at most one mask per position, in boxes.
    """

    def __init__(self, held: Sequence[MaskBox]):
        groups: dict[Shares, dict[Box, Owners]] = {}
        self._families: dict[Shares, dict[Family, dict[Box, None]]] = {}
        self.path: dict[int, Shares] = {}
        for f in held:
            groups.setdefault(f.shares, {}).setdefault(f.box, {})[f.position] = f.offset
            self.path[f.position] = f.shares
            for level, share in enumerate(f.shares):
                families = self._families.setdefault(f.shares[:level], {})
                families.setdefault((share.count, share.combiner), {})[f.box] = None
        covers = {boxes: Cover(boxes) for boxes in {tuple(found): None for found in groups.values()}}
        self._covers = {path: covers[tuple(found)] for path, found in groups.items()}  # shares often lie alike
        self._owners = {path: list(boxes.values()) for path, boxes in groups.items()}
        self._below: dict[tuple[Shares, Family], Cover] = {}
        self._leaves: dict[tuple[Shares, Box], list[tuple[Box, tuple[Shares, ...]]]] = {}
        self._sources: dict[tuple[Shares, Box], list[tuple[Box, Shares]]] = {}

    def at(self, path: Shares, box: Box) -> list[tuple[Box, Owners]]:
        """The held boxes of the value at ``path`` that meet ``box``: the common part, and who holds it."""
        return [(common, self._owners[path][i]) for i, common in self._covers[path].hits(box)]

    def disjoint(self, path: Shares, box: Box) -> bool:
        """Whether what ``at`` answers does not overlap."""
        return self._covers[path].disjoint(box)

    def rest(self, path: Shares, box: Box) -> list[Box]:
        """The parts of ``box`` where nobody holds the value at ``path`` itself."""
        return self._covers[path].rest(box) if path in self._covers else [box]

    def leaves(self, path: Shares, box: Box) -> list[tuple[Box, tuple[Shares, ...]]]:
        """Which held values join to the value at ``path``.

        Returns:
            Disjoint parts of ``box``, each with its leaves. A part that nobody holds is not among them.
        """
        if (path, box) not in self._leaves:
            rest = self.rest(path, box)
            found = [(piece, (path,)) for piece in _cut_out([box], rest)]
            for family in self._families.get(path, ()):
                parts = self._joined(path, family, rest)
                found += parts
                rest = without(rest, [piece for piece, _ in parts])
            self._leaves[path, box] = found
        return self._leaves[path, box]

    def _joined(self, path: Shares, family: Family, boxes: list[Box]) -> list[tuple[Box, tuple[Shares, ...]]]:
        """The parts of ``boxes`` of which every share of ``family`` is held, with the leaves of all shares."""
        parts: list[tuple[Box, tuple[Shares, ...]]] = [(box, ()) for box in boxes]
        for position in range(family[0]):
            child = (*path, Share(position, *family))
            parts = [(piece, (*own, *more)) for box, own in parts for piece, more in self.leaves(child, box)]
        return parts

    def source(self, want: Shares, box: Box) -> list[tuple[Box, Shares]]:
        """The value from which a consumer makes its share: ``want`` or the nearest above it that the holders know.

        All consumers of an element decide alike, so that their shares join to the whole: the walk from the root ends
        where a value is held itself, or as other shares than the wanted ones.
        """
        if (want, box) not in self._sources:
            found: list[tuple[Box, Shares]] = []
            boxes = [box]
            for level, share in enumerate(want):
                path = want[:level]
                family: Family = (share.count, share.combiner)
                rest = [piece for b in boxes for piece in self.rest(path, b)]
                other = [piece for b in rest for piece in self._rest_below(path, family, b)]
                found += [(piece, path) for piece in _cut_out(boxes, rest) + other]
                boxes = _cut_out(rest, other)
            self._sources[want, box] = found + [(piece, want) for piece in boxes]
        return self._sources[want, box]

    def _rest_below(self, path: Shares, family: Family, box: Box) -> list[Box]:
        """The parts of ``box`` of which no share of ``family`` is held."""
        boxes = self._families.get(path, {}).get(family)
        if boxes is None:
            return [box]
        if (path, family) not in self._below:
            self._below[path, family] = Cover(list(boxes))
        return self._below[path, family].rest(box)


def _cut_out(boxes: list[Box], rest: list[Box]) -> list[Box]:
    """``boxes`` without ``rest``, in large pieces; mostly one of the two is empty."""
    return boxes if not rest else [] if boxes == rest else merge(without(boxes, rest))
