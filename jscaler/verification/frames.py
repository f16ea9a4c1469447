"""``Frame``: how the parts that masks name lie in local arrays, which have one shape on all devices."""

import itertools
from collections.abc import Sequence

import numpy as np

from jscaler.ir.mask import Mask, Share

Path = tuple[Share, ...]  # which summand of which summand; empty for the whole


class Frame:
    """Local arrays of devices that hold ``masks``; None for a device that holds nothing. Smaller parts are padded.

    Args:
        packed: pad each dim at its end, behind the part's elements; else pad each sub-dim, as a `Layout` does.

    Attributes:
        shape: of the local arrays.

        sub-dims (2, 3), minor one cut in two:       a0 a1 b0 b1 | a2 .  b2 .        packed: a2 b2 .  .
    """

    def __init__(self, masks: Sequence[Mask | None], packed: bool = False):
        self.masks = masks
        self.packed = packed
        parts = [m for m in masks if m is not None]
        self._sizes = tuple(max(sizes) for sizes in zip(*map(extents, parts), strict=True))
        if packed:
            self.shape = tuple(max(sizes) for sizes in zip(*map(part_shape, parts), strict=True))
        else:
            rest = iter(self._sizes)
            self.shape = tuple(int(np.prod([next(rest) for _ in dim])) for dim in parts[0].subdims)

    def part(self, local: np.ndarray, position: int) -> np.ndarray:
        """The part of the device at ``position`` in its ``local`` array, seen over its sub-dims. Writes show, unpacked."""
        mask = self.mask(position)
        if self.packed:
            return local[tuple(map(slice, part_shape(mask)))].reshape(extents(mask))
        return local.reshape(self._sizes)[(*map(slice, extents(mask)), ...)]  # a view, of a scalar too

    def put(self, local: np.ndarray, position: int, values: np.ndarray) -> None:
        """Write a part."""
        if self.packed:
            shape = part_shape(self.mask(position))
            local[tuple(map(slice, shape))] = np.broadcast_to(values, extents(self.mask(position))).reshape(shape)
        else:
            self.part(local, position)[...] = values

    def rows(self, position: int) -> list[np.ndarray]:
        """Per dim of a device's local array the rows of the whole tensor that lie there; -1 is padding. Not if packed."""
        assert not self.packed
        mask, sizes, found = self.mask(position), iter(self._sizes), []
        for subdims, intervals in zip(mask.subdims, mask.box, strict=True):
            local = np.full([next(sizes) for _ in subdims], -1)
            whole = np.arange(np.prod(subdims, dtype=int)).reshape(subdims)
            local[tuple(slice(0, stop - start) for start, stop in intervals)] = whole[tuple(slice(*i) for i in intervals)]
            found.append(local.reshape(-1))
        return found

    def mask(self, position: int) -> Mask:
        """The mask of a device that holds something."""
        mask = self.masks[position]
        assert mask is not None
        return mask

    @property
    def full(self) -> bool:
        """Whether no device has padding."""
        return all(m is not None and extents(m) == self._sizes for m in self.masks)


def extents(mask: Mask) -> tuple[int, ...]:
    """The refined shape of a mask's box."""
    return tuple(max(0, stop - start) for dim in mask.box for start, stop in dim)


def part_shape(mask: Mask) -> tuple[int, ...]:
    """The shape of a mask's box, sub-dims joined."""
    return tuple(int(np.prod([max(0, stop - start) for start, stop in dim])) for dim in mask.box)


def cells_of(mask: Mask, ids: np.ndarray) -> np.ndarray:
    """The elements of ``mask``'s box over its sub-dims; ``ids`` numbers the whole tensor's."""
    refined = ids.reshape([size for dim in mask.subdims for size in dim])
    return refined[tuple(slice(*interval) for interval in itertools.chain.from_iterable(mask.box))]


def element_ids(shape: tuple[int, ...]) -> np.ndarray:
    """The flat index of every element."""
    size = int(np.prod(shape))
    return np.arange(size, dtype=np.int32 if size < 2**31 else np.int64)


def path_of(mask: Mask) -> Path:
    """A mask's place in the tree of shares; the only share of one is no share."""
    return tuple(s for s in mask.shares if s.count > 1)
