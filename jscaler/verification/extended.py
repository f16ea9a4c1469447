"""Has every part its rows, and around them its neighbours'? Beyond the border of the whole there are zeros.

Parts of several sizes, along dims without an edge, are padded as before; so are the rows that their neighbours send.
"""

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
    found = [_around(held.rows(p), edges, ids, (int(shares[p]), zero, patterns.padding)) for p in range(len(held.masks))]
    elements, numbers = (np.stack(side) for side in zip(*found, strict=True))
    return Symbolic(elements, numbers)


def _around(
    rows: list[np.ndarray], edges: Sequence[Edge], ids: np.ndarray, kinds: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """One device's extended part, as elements and patterns.

    Args:
        rows: of the whole, per dim of the local array; -1 for padding, which only dims without an edge have.
        kinds: the patterns of an element, of what is beyond the border and of padding.
    """
    padded = [own < 0 for own in rows]
    for edge in edges:
        own = rows[edge.dim]
        assert own[0] >= 0, f"parts of several sizes along dim {edge.dim}, which has an edge"
        assert (np.diff(own) == 1).all(), f"{own.tolist()} are not in a row along dim {edge.dim}"
        rows[edge.dim] = np.arange(own[0] - edge.before, own[-1] + 1 + edge.after)
        padded[edge.dim] = np.zeros(len(rows[edge.dim]), bool)
    element = ids[np.ix_(*(np.clip(r, 0, n - 1) for r, n in zip(rows, ids.shape, strict=True)))]
    there = _outer(np.logical_and, [(r >= 0) & (r < n) for r, n in zip(rows, ids.shape, strict=True)])
    share, zero, padding = kinds
    pattern = np.where(_outer(np.logical_or, padded), padding, np.where(there, share, zero))
    return np.where(there, element, -1), pattern


def _outer(join: np.ufunc, sides: Sequence[np.ndarray]) -> np.ndarray:
    """One flag per row of each dim, joined to one per cell."""
    return functools.reduce(join, np.meshgrid(*sides, indexing="ij", sparse=True))


def check_extended(
    patterns: Patterns,
    found: Symbolic,
    wanted: Symbolic,
    edges: Sequence[Edge],
    names: Sequence[Any],
    where: Callable[[], str],
) -> int:
    """The number of elements proven. What lies in the padding of smaller parts, nobody reads.

    Raises:
        VerificationError: the first cell that is wrong.
    """
    differs = (found.element != wanted.element) | (found.pattern != wanted.pattern)
    wrong = differs & (wanted.pattern != patterns.padding)
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
