"""The collectives, as a table: what each sends, in how many steps, and what else must be known of a kind of transition.

Bytes as the RVD search of nnScaler costs them (OSDI '24, section 4), with n members and x bytes per member before.
Latency counts the steps of a tree: what is measured for small messages grows with log n, not with n.

A new kind is a line here, the states from which it leads (``materialize.transitions``), and how it is written
(``lower.emit_collectives``); and ``verification.collectives`` has what it does, should it bind a primitive that no other
binds.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jax import lax

Kind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "value_mask", "permute", "point_to_point"
]


class TransitionKind(NamedTuple):
    """One line of the table.

    Attributes:
        sent: bytes that each of n members sends, as a multiple of x.
        steps: latencies.
        hlo: the instruction that it is compiled to; none where nothing is sent.
        moves: whether it only moves elements, whatever they are.
        shares: whether value shares are ``joined`` or ``made``.
        to_all: whether each member sends to all others; else to its neighbour.
        in_place: whether the result may be written over the operand.
        alone: the collective over the axis ``members`` of that size, as it is measured.
    """

    sent: Callable[[int], float]
    steps: Callable[[int], int]
    hlo: str = ""
    moves: bool = False
    shares: Literal["", "joined", "made"] = ""
    to_all: bool = False
    in_place: bool = False
    alone: Callable[[Any, int], Any] | None = None


def _tree(n: int) -> int:
    return math.ceil(math.log2(n)) if n > 1 else 0


def _once(n: int) -> int:
    return int(n > 1)


def _shifted(x: Any, n: int) -> Any:
    return lax.ppermute(x, "members", [(i, (i + 1) % n) for i in range(n)])


COLLECTIVES: dict[str, TransitionKind] = {
    "all_gather": TransitionKind(  # D -> R
        lambda n: n - 1, _tree, "all-gather", moves=True, alone=lambda x, n: lax.all_gather(x, "members", tiled=True)
    ),
    "all_reduce": TransitionKind(  # V -> R
        lambda n: 2 * (n - 1) / n, lambda n: 2 * _tree(n), "all-reduce", shares="joined", in_place=True,
        alone=lambda x, n: lax.psum(x, "members"),
    ),
    "reduce_scatter": TransitionKind(  # V -> D
        lambda n: (n - 1) / n, _tree, "reduce-scatter", shares="joined",
        alone=lambda x, n: lax.psum_scatter(x, "members", tiled=True),
    ),
    "all_to_all": TransitionKind(  # Di -> Dj: all members send at once
        lambda n: (n - 1) / n, _once, "all-to-all", moves=True, to_all=True,
        alone=lambda x, n: lax.all_to_all(x, "members", 0, 0, tiled=True),
    ),
    "slice": TransitionKind(lambda n: 0.0, lambda n: 0, moves=True),  # R -> D
    "value_mask": TransitionKind(lambda n: 0.0, lambda n: 0, shares="made"),  # R -> V
    # x for each device whose block comes from another, in each round: these need no group
    "permute": TransitionKind(_once, _once, "collective-permute", moves=True, in_place=True, alone=_shifted),
    "point_to_point": TransitionKind(_once, _once, "collective-permute"),
    "halo": TransitionKind(_once, _once, "collective-permute"),  # no transition: rows of the neighbours' parts
}  # fmt: skip


def sends(kind: str) -> bool:
    """Whether a step of this kind sends anything."""
    return kind in COLLECTIVES and bool(COLLECTIVES[kind].hlo)
