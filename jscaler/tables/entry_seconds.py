"""What an entry of a table takes: its cells one after another, less what hides of the communication of an overlapped one.

While a collective runs beside arithmetic, that gets on ``interference`` times as slowly. So one of h seconds, all of it
beside the arithmetic of another cell, makes an entry h / interference shorter than if it ran alone::

    0F3  arithmetic 6, collectives 3
    1B2  arithmetic 4, collectives 2      (0F3;1B2) takes 10 + 5 - 3 / 1.5 - 2 / 1.5 with an interference of 1.5
"""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """What waits for no other part of its entry.

    Attributes:
        arithmetic: seconds of its kernels, and of what nobody takes apart.
        collectives: seconds of those that can run beside another part's kernels.
        others: seconds of those that cannot.
    """

    arithmetic: float
    collectives: float = 0.0
    others: float = 0.0


def hidden_seconds(parts: Sequence[Part], interference: float = 1.0) -> float:
    """By how much less an entry takes than all of its parts one after another.

    Each part's collectives hide behind the arithmetic of the others, as far as there is so much of it. So no entry takes
    less than all of its arithmetic, or than all of its communication.
    """
    arithmetic = sum(part.arithmetic for part in parts)
    behind = (min(part.collectives / interference, arithmetic - part.arithmetic) for part in parts)
    return max(0.0, min(sum(behind), arithmetic)) if len(parts) > 1 else 0.0


def entry_seconds(parts: Sequence[Part], interference: float = 1.0) -> float:
    """Seconds of an entry.

    Example:
        >>> entry_seconds([Part(6.0, 3.0), Part(4.0, 2.0)], 1.0), entry_seconds([Part(6.0, 3.0), Part(4.0, 2.0)], 2.0)
        (10.0, 12.5)
        >>> entry_seconds([Part(6.0, 3.0)]), entry_seconds([Part(6.0, 0.0, 3.0), Part(4.0, 0.0, 2.0)])
        (9.0, 15.0)
    """
    return sum(sum(part) for part in parts) - hidden_seconds(parts, interference)
