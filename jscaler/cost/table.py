"""The collectives, as a table: bytes that each member sends, and the steps that it takes when nothing else matters.

Bytes as the RVD search of nnScaler costs them (OSDI '24, section 4), with n members and x bytes per member before.
Latency counts the steps of a tree: what is measured for small messages grows with log n, not with n.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "value_mask", "permute", "point_to_point"
]


class Collective(NamedTuple):
    """One line of the table: ``sent(n)`` bytes as a multiple of x, ``steps(n)`` latencies."""

    sent: Callable[[int], float]
    steps: Callable[[int], int]


def _tree(n: int) -> int:
    return math.ceil(math.log2(n)) if n > 1 else 0


COLLECTIVES: dict[str, Collective] = {
    "all_gather": Collective(lambda n: n - 1, _tree),  # D -> R
    "all_reduce": Collective(lambda n: 2 * (n - 1) / n, lambda n: 2 * _tree(n)),  # V -> R
    "reduce_scatter": Collective(lambda n: (n - 1) / n, _tree),  # V -> D
    "all_to_all": Collective(lambda n: (n - 1) / n, lambda n: int(n > 1)),  # Di -> Dj: all members send at once
    "slice": Collective(lambda n: 0.0, lambda n: 0),  # R -> D
    "value_mask": Collective(lambda n: 0.0, lambda n: 0),  # R -> V
}
# A permute, and each round of a point-to-point exchange: x for each device whose block comes from another, one step.
