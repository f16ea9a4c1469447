"""Has every part its rows, and around them its neighbours'? Beyond the border of the whole there are zeros."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jscaler.errors import VerificationError
from jscaler.materialize.edges import Edge
from jscaler.verification.frames import Frame, element_ids
from jscaler.verification.symbols import Patterns, Symbolic


def extended(patterns: Patterns, held: Frame, edges: Sequence[Edge], shares: np.ndarray) -> Symbolic:
    """What devices hold after a halo exchange, worked out from their masks alone.

    Args:
        patterns: the table of symbols.
        held: the parts before.
        edges: the rows around them.
        shares: per device the pattern of what it holds: an extended part is a share of as much.
    """
    ids = element_ids(patterns.shape).reshape(patterns.shape)
    zero = patterns.constants(np.zeros((1,), np.float32)).pattern.item()
    found = []
    for position in range(len(held.masks)):
        rows = [np.array(own) for own in _rows(held, position)]
        for edge in edges:
            own = rows[edge.dim]
            assert (np.diff(own) == 1).all(), f"{held.mask(position)} is not in a row along dim {edge.dim}"
            rows[edge.dim] = np.arange(own[0] - edge.before, own[-1] + 1 + edge.after)
        element = ids[np.ix_(*(np.clip(r, 0, n - 1) for r, n in zip(rows, patterns.shape, strict=True)))]
        inside = [(r >= 0) & (r < n) for r, n in zip(rows, patterns.shape, strict=True)]
        there = functools.reduce(np.logical_and, np.meshgrid(*inside, indexing="ij", sparse=True))
        found.append((np.where(there, element, -1), np.where(there, shares[position], zero)))
    elements, numbers = (np.stack(side) for side in zip(*found, strict=True))
    return Symbolic(elements, numbers)


def _rows(held: Frame, position: int) -> list[list[int]]:
    """Per dim the rows of a device's part."""
    mask = held.mask(position)
    found = []
    for sizes, intervals in zip(mask.subdims, mask.box, strict=True):
        rows = [0]
        for size, (start, stop) in zip(sizes, intervals, strict=True):
            rows = [row * size + i for row in rows for i in range(start, stop)]
        found.append(rows)
    return found


def check_extended(
    patterns: Patterns,
    found: Symbolic,
    wanted: Symbolic,
    edges: Sequence[Edge],
    names: Sequence[Any],
    where: Callable[[], str],
) -> int:
    """The number of elements proven.

    Raises:
        VerificationError: the first cell that is wrong.
    """
    wrong = (found.element != wanted.element) | (found.pattern != wanted.pattern)
    if not wrong.any():
        return int((wanted.element >= 0).sum())
    at = np.unravel_index(int(wrong.argmax()), wrong.shape)

    def cell(some: Symbolic) -> str:
        element = int(some.element[at])
        return f"element {patterns.index(element)}" if element >= 0 else patterns.describe(int(some.pattern[at]), [()])

    place = list(map(int, at[1:]))
    raise VerificationError(
        f"{where()}: device {names[int(at[0])]} holds at {place} of its part extended by {'; '.join(map(str, edges))} "
        f"{cell(found)} where {cell(wanted)} belongs"
    )
