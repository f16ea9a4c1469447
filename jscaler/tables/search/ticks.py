"""Ticks: seconds and bytes as whole numbers, which the solver needs.

Where all seconds of a problem are multiples of one unit, that unit is a tick, and nothing is rounded. Else a tick is so
short that rounding every block of a device down takes away less than 0.1 % of its work. What is proved of the problem in
ticks is then a lower bound of the problem itself, since no block takes longer in it.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from jscaler.tables.search.problem import Problem, SearchBlock

RESOLUTION = 1e-3  # of a device's work in a micro-batch: what rounding to ticks takes away at most
_FINEST = 10**6  # denominators of exact units
_MOST_TICKS = 20_000  # of the longest block, where the unit is exact
_MOST_UNITS = 2**40  # of the largest number of bytes


@dataclass(frozen=True)
class InTicks:
    """A problem whose seconds are whole ticks.

    Attributes:
        problem: with ticks in place of seconds, rounded down; its bytes are as they were.
        tick: seconds of a tick.
        exact: whether nothing is rounded.
    """

    problem: Problem
    tick: Fraction
    exact: bool

    def seconds(self, ticks: float) -> float:
        """So many ticks in seconds."""
        return float(self.tick * Fraction(ticks))


def in_ticks(problem: Problem, *, fine: bool = False) -> InTicks:
    """``problem`` in ticks.

    Args:
        problem: its seconds and hops.
        fine: whether rounding loses next to nothing; such ticks are too many for the solver, and good for sums.

    Example:
        >>> from jscaler.tables.search.tessel import tessel_problem
        >>> found = in_ticks(tessel_problem("V", forward=0.5, backward=1.25))
        >>> found.tick, found.exact, [block.seconds for block in found.problem.lanes[0][:2]]
        (Fraction(1, 4), True, [2, 5])
    """
    blocks = [block.seconds for block in problem.lanes[0]]
    tick = common_unit([*blocks, *(edge.hop for edge in problem.edges)], _MOST_TICKS)
    exact = tick is not None
    if tick is None:
        tick = Fraction(max(blocks)) / (_MOST_UNITS if fine else len(blocks) * round(1 / RESOLUTION))

    def rounded(seconds: float) -> int:
        return round(Fraction(seconds) / tick) if exact else math.floor(Fraction(seconds) / tick)

    def block_in_ticks(block: SearchBlock) -> SearchBlock:
        return dataclasses.replace(block, seconds=rounded(block.seconds))

    lanes = tuple(tuple(map(block_in_ticks, lane)) for lane in problem.lanes)
    edges = tuple(dataclasses.replace(edge, hop=rounded(edge.hop)) for edge in problem.edges)
    return InTicks(dataclasses.replace(problem, lanes=lanes, edges=edges), tick, exact)


def unit_of_bytes(sizes: Iterable[float]) -> Fraction:
    """The unit of which all sizes are multiples; or one so small that rounding down loses less than a 1e-12th of the
    largest."""
    sizes = [size for size in sizes if size]
    return common_unit(sizes, _MOST_UNITS) or Fraction(max(sizes)) / _MOST_UNITS


def common_unit(values: Iterable[float], most: int) -> Fraction | None:
    """The largest number of which all ``values`` are multiples; None where the largest of them is more than ``most`` of it.

    Example:
        >>> common_unit([0.5, 0.75], 100), common_unit([1.0, 3.141592653589793], 100)
        (Fraction(1, 4), None)
    """
    found = [Fraction(value).limit_denominator(_FINEST) for value in values if value]
    if any(
        abs(near - Fraction(value)) > Fraction(value) / 10**13
        for near, value in zip(found, filter(None, values), strict=True)
    ):
        return None
    if not found:
        return Fraction(1)
    denominator = math.lcm(*(value.denominator for value in found))
    unit = Fraction(math.gcd(*(int(value * denominator) for value in found)), denominator)
    return unit if max(found) / unit <= most else None
