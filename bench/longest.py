"""The longest sequence whose step fits a device's memory, found with few compilations.

Memory grows with a constant, a linear and a square term of the sequence. A curve through the sequences that were compiled
says which to compile next; what is known to fit and what is known not to keeps it honest. Two neighbours end the search.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Longest:
    """What was found.

    Attributes:
        steps: the longest that fits, in steps; 0 where not even one does.
        peak: bytes at ``steps``; 0 where nothing fits.
        seen: bytes by steps, of everything that was compiled.
    """

    steps: int
    peak: int
    seen: dict[int, int]


def longest(peak: Callable[[int], int], limit: float, guess: int = 4) -> Longest:
    """The largest number of steps whose ``peak`` is at most ``limit``; peaks must not fall.

    Args:
        peak: compiles for a number of steps and tells the bytes.
        guess: where to begin.

    Example:
        >>> found = longest(lambda n: 100 + n * n, limit=500)
        >>> found.steps, found.peak
        (20, 500)
    """
    seen: dict[int, int] = {}
    fits, misses, at = 0, math.inf, max(guess, 1)
    while misses - fits > 1:
        seen[at] = peak(at)
        if seen[at] <= limit:
            fits = max(fits, at)
        else:
            misses = min(misses, at)
        at = _next(seen, limit, fits, misses)
    return Longest(fits, seen.get(fits, 0), seen)


def _next(seen: dict[int, int], limit: float, fits: int, misses: float) -> int:
    """Where the curve through what was seen reaches the limit, between what fits and what does not."""
    top = misses - 1 if misses < math.inf else 4 * fits
    expected = _reached(seen, limit)
    if expected is None:  # one point: a good guess has its neighbour on the other side
        expected = fits + 1 if misses == math.inf else misses - 1
    return int(min(max(expected, fits + 1), top))


def _reached(seen: dict[int, int], limit: float) -> int | None:
    """Where a parabola through the three points nearest to the limit reaches it; through two, one that is flat at zero."""
    near = sorted(seen, key=lambda n: abs(seen[n] - limit))[:3]
    if len(near) < 2:
        return None
    powers = [0, 2] if len(near) == 2 else [0, 1, 2]
    table = np.array([[float(n) ** p for p in powers] for n in near])
    constant, *rest = np.linalg.solve(table, np.array([float(seen[n]) for n in near]))
    linear, square = (0.0, *rest) if len(near) == 2 else rest
    inside = linear**2 + 4 * square * (limit - constant)
    if square <= 0 or inside < 0:  # no parabola that opens upwards and gets there: a line through two
        one, other = near[:2]
        slope = (seen[one] - seen[other]) / (one - other)
        return int(one + (limit - seen[one]) / slope) if slope > 0 else None
    return int((math.sqrt(inside) - linear) / (2 * square))
