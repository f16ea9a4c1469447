"""Symbolic local arrays: for every cell of every device, which element of the PTensor lies there, joined from what.

A *pattern* says what is joined in a cell: a multiset of share leaves (paths of nested shares) and their combiner. Whole
values are the empty path. Shares that are all there collapse to what they are shares of, from the inside out:

    device 0: share 0/2     device 1: share 1/2     after psum, both: whole
    psum once more                                  whole + whole: a double count, and visible as such
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jscaler.ir.mask import Combiner, Mask
from jscaler.verification.frames import Frame, Path, cells_of, element_ids, path_of

Where = Callable[[], str]  # a place in the program, worked out only when something is wrong there
WORD: dict[str, str] = {"add": "sum", "max": "maximum", "min": "minimum"}


@dataclass(frozen=True)
class Leaves:
    """Share leaves joined by ``combiner``, with how often each occurs; a leaf by itself has no combiner."""

    combiner: Combiner | None
    counts: tuple[tuple[Path, int], ...]


@dataclass(frozen=True)
class Constant:
    """No data, but a constant that leaves the given combiners' results unchanged."""

    neutral: frozenset[Combiner]


@dataclass(frozen=True)
class Broken:
    """Nothing that any consumer can want."""

    reason: str


Pattern = Leaves | Constant | Broken
PADDING = Broken("padding beyond the end of the part")


@dataclass(frozen=True)
class Symbolic:
    """One local array on each device: arrays of shape ``(devices, *local shape)``, often broadcast views.

    Attributes:
        element: the flat index of the PTensor's element in each cell; -1 where there is none.
        pattern: the number of the cell's pattern.
    """

    element: np.ndarray
    pattern: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.element.shape

    def map(self, fun: Callable[[np.ndarray], np.ndarray]) -> "Symbolic":
        """Move the cells."""
        return Symbolic(fun(self.element), fun(self.pattern))


def spread(fun: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """Elementwise ``fun``, worked out once along the axes on which all ``arrays`` are broadcast."""
    shape = arrays[0].shape
    return np.broadcast_to(fun(*compact(*arrays)), shape)


def compact(*arrays: np.ndarray) -> list[np.ndarray]:
    """``arrays`` of one shape, cut to size 1 along the axes on which all are broadcast."""
    equal = [all(a.strides[axis] == 0 for a in arrays) for axis in range(arrays[0].ndim)]
    cut = tuple(slice(0, 1) if flat else slice(None) for flat in equal)
    return [a[cut] for a in arrays]


class Patterns:
    """The patterns met so far, numbered, and how they join.

    Args:
        shape: the shape of the whole tensor, for messages.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self._all: list[Pattern] = []
        self._numbers: dict[Pattern, int] = {}
        self._joined: dict[tuple[int, int, Combiner], int] = {}
        self.whole = self.number(Leaves(None, (((), 1),)))
        self.padding = self.number(PADDING)

    def number(self, pattern: Pattern) -> int:
        """The number of ``pattern``, a new one if it is new."""
        if pattern not in self._numbers:
            self._numbers[pattern] = len(self._all)
            self._all.append(pattern)
        return self._numbers[pattern]

    def __getitem__(self, number: int) -> Pattern:
        return self._all[number]

    def __len__(self) -> int:
        return len(self._all)

    def index(self, element: int) -> tuple[int, ...]:
        """The index of an element in the whole tensor."""
        return tuple(int(i) for i in np.unravel_index(element, self.shape)) if self.shape else ()

    def held(self, frame: Frame) -> Symbolic:
        """The local arrays of devices that hold the masks of ``frame``."""
        masks, ids = frame.masks, element_ids(self.shape)
        row = (-1, *[1] * len(frame.shape))
        leaves = np.array([self._leaf(m) for m in masks], np.int32)
        first = masks[0]
        if frame.full and first is not None and all(m is not None and m.box == first.box for m in masks):
            element = np.broadcast_to(cells_of(first, ids).reshape(frame.shape), (len(masks), *frame.shape))
            return Symbolic(element, np.broadcast_to(leaves.reshape(row), element.shape))
        element = np.full((len(masks), *frame.shape), -1, ids.dtype)
        pattern = np.full(element.shape, self.padding, np.int32)
        for position, mask in enumerate(masks):
            if mask is not None:
                frame.put(element[position, ...], position, cells_of(mask, ids))
                frame.put(pattern[position, ...], position, leaves[position])
        return Symbolic(element, np.broadcast_to(leaves.reshape(row), element.shape) if frame.full else pattern)

    def _leaf(self, mask: Mask | None) -> int:
        return self.number(PADDING if mask is None else Leaves(None, ((path_of(mask), 1),)))

    def constants(self, values: np.ndarray) -> Symbolic:
        """Concrete numbers among data: neutral for some combiners, or for none."""

        def numbers(some: np.ndarray) -> np.ndarray:
            wide = np.complex128 if some.dtype.kind == "c" else np.float64 if _inexact(some.dtype) else None
            distinct, inverse = np.unique(np.asarray(some, wide), return_inverse=True)
            kinds = [self.number(Constant(_neutral_for(v, values.dtype))) for v in distinct]
            return np.array(kinds, np.int32)[inverse].reshape(some.shape)

        return Symbolic(np.broadcast_to(np.int32(-1), values.shape), spread(numbers, values))

    def join(self, a: Symbolic, b: Symbolic, combiner: Combiner, where: Where) -> Symbolic:
        """The cells of ``a`` and ``b``, joined one by one; what cannot be joined is broken."""
        pattern = self.mapped(lambda x, y: self._pair(x, y, combiner, where), a.pattern, b.pattern)
        if (element := _same(a.element, b.element)) is not None:
            return Symbolic(element, pattern)
        clash = spread(lambda x, y: (x >= 0) & (y >= 0) & (x != y), a.element, b.element)
        if clash.any():
            first = np.unravel_index(int(clash.argmax()), clash.shape)
            pair = " with ".join(f"element {self.index(int(side.element[first]))}" for side in (a, b))
            reason = self.number(Broken(f"the {WORD[combiner]} of {pair}, {where()}"))
            pattern = spread(lambda p, c: np.where(c, np.int32(reason), p), pattern, clash)
        return Symbolic(spread(np.maximum, a.element, b.element), pattern)

    def mapped(self, fun: Callable[..., int], *patterns: np.ndarray) -> np.ndarray:
        """``fun`` of pattern numbers, cell by cell, called once for each distinct tuple of numbers."""
        count = len(self._all)

        def numbers(*arrays: np.ndarray) -> np.ndarray:
            code = np.zeros(arrays[0].shape, np.int64)
            for array in arrays:
                code = code * count + array
            distinct, inverse = np.unique(code, return_inverse=True)
            digits = [[int(v) // count**i % count for i in reversed(range(len(arrays)))] for v in distinct]
            return np.array([fun(*d) for d in digits], np.int32)[inverse].reshape(code.shape)

        return spread(numbers, *patterns)

    def _pair(self, a: int, b: int, combiner: Combiner, where: Where) -> int:
        key = (a, b, combiner)
        if key not in self._joined:
            result = joined(self[a], self[b], combiner)
            if isinstance(result, Broken) and result not in (self[a], self[b]):
                return self.number(Broken(f"{result.reason}, {where()}"))  # another place breaks it anew
            self._joined[key] = self.number(result)
        return self._joined[key]

    def describe(self, number: int, leaves: Sequence[Path]) -> str:
        """What lies in a cell, as the source's share ``leaves``: ``shares 0 0 1``."""
        pattern = self[number]
        if isinstance(pattern, Broken):
            return pattern.reason
        if isinstance(pattern, Constant):
            kinds = "/".join(sorted(pattern.neutral))
            return f"nothing (neutral for {kinds})" if kinds else "a constant"
        names = [path_name(p) for p, count in leaf_counts(pattern, leaves).items() for _ in range(count)]
        return f"share{'s' if len(names) > 1 else ''} {' '.join(names)}"


def leaf_counts(pattern: Leaves, leaves: Sequence[Path]) -> Mapping[Path, int]:
    """How often each of ``leaves`` is in ``pattern``."""
    found: Counter[Path] = Counter()
    for path, count in pattern.counts:
        inside = [leaf for leaf in leaves if leaf[: len(path)] == path] or [path]
        found.update(dict.fromkeys(inside, count))
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def path_name(path: Path) -> str:
    """``1`` for the second share, ``1.0`` for the first share of the second share, ``whole`` for no share."""
    return ".".join(str(s.position) for s in path) or "whole"


def joined(a: Pattern, b: Pattern, combiner: Combiner) -> Pattern:
    """What two cells of one element hold after ``combiner``."""
    for pattern in (a, b):
        if isinstance(pattern, Broken):
            return pattern
    if isinstance(a, Constant) and isinstance(b, Constant):
        if combiner in a.neutral & b.neutral:
            return Constant(a.neutral & b.neutral)
        return b if combiner in a.neutral else a if combiner in b.neutral else Constant(frozenset())
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Constant):
            return other if combiner in one.neutral else Broken(f"the {WORD[combiner]} of data and a constant")
    if a == b and combiner != "add":
        return a
    assert isinstance(a, Leaves)
    assert isinstance(b, Leaves)
    for pattern in (a, b):
        if pattern.combiner is not None and pattern.combiner != combiner:
            return Broken(f"the {WORD[combiner]} of an incomplete {WORD[pattern.combiner]}")
    counts = Counter(dict(a.counts)) + Counter(dict(b.counts))
    wrong = [path[-1].combiner for path in counts if path and path[-1].combiner != combiner]
    if wrong:
        return Broken(f"the {WORD[combiner]} of shares of a {WORD[wrong[0]]}")
    return _leaves(counts, combiner)


def _leaves(counts: Counter[Path], combiner: Combiner) -> Leaves:
    """The collapsed form: siblings that are all there, equally often, become their parent."""
    while True:
        if combiner != "add":
            counts = Counter({p: 1 for p in counts if not _covered(p, counts, combiner)})
        families: dict[Path, list[Path]] = {}
        for path in counts:
            if path and path[-1].combiner == combiner:
                families.setdefault(path[:-1], []).append(path)
        complete = [
            (parent, paths)
            for parent, paths in families.items()
            if len(paths) == paths[0][-1].count and len({counts[p] for p in paths}) == 1
        ]
        if not complete:
            break
        for parent, paths in complete:
            number = counts[paths[0]]
            for path in paths:
                del counts[path]
            counts[parent] += number
    alone = len(counts) == 1 and all(n == 1 for n in counts.values())
    return Leaves(None if alone else combiner, tuple(sorted(counts.items(), key=lambda item: _order(item[0]))))


def _covered(path: Path, counts: Mapping[Path, int], combiner: Combiner) -> bool:
    """Whether a maximum has ``path`` in it already, as part of one of its ancestors."""
    for length in range(len(path) - 1, -1, -1):
        if path[length].combiner != combiner:
            return False
        if path[:length] in counts:
            return True
    return False


def _order(path: Path) -> list[tuple[int, int, str]]:
    return [(s.position, s.count, s.combiner) for s in path]


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return None
    left, right = compact(a, b)
    return a if np.array_equal(left, right) else None


def _inexact(dtype: Any) -> bool:
    return dtype.kind not in "biu"  # bfloat16 and its like have a kind of their own


def _neutral_for(value: Any, dtype: Any) -> frozenset[Combiner]:
    """The combiners whose results ``value`` does not change."""
    if dtype.kind == "b":
        low, high = False, True
    elif _inexact(dtype):
        low, high = -np.inf, np.inf
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    table: dict[Combiner, Any] = {"add": 0, "max": low, "min": high}
    return frozenset(c for c, neutral in table.items() if value == neutral)
