"""Where a row is cut into stages of which groups of devices have several, or whose groups are unlike: such that the slowest
group is fastest.

What a group does for a micro-batch is all of its stages. So a group that has a heavy stage (the logits) takes less in
another. How long the single stages are counts where the pipeline fills and drains.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jscaler.tables import Table
from jscaler.tables.legal import check_own_order
from jscaler.tables.simulator import UNITS, Turn, turn_tasks, turns_of
from jscaler.tables.tasks import times_of

FILL = 0.2  # what the slowest stage counts beside the slowest group: (p - 1) / m, of a few micro-batches m for each group
NEAR = 8  # places on either side of a known cut that others are tried at, or those of an even stage if these are more
KEPT = 12  # ways to the same place that are followed further; a row with few places has no more, and is searched through

Cuts = list[int]


@dataclass(frozen=True)
class StageOrder:
    """In which order groups run their stages, if they have several, or are unlike.

    Attributes:
        groups: the group of each stage.
        table: of all stages; None if it is still to be searched.
    """

    groups: tuple[int, ...]
    table: Table | None

    @staticmethod
    def of(lies: Sequence[int], table: Table | None) -> "StageOrder":
        """Of stages whose groups are ``lies``, and their table; None if it is still to be searched.

        Raises:
            OrderError: a block stands in front of one that it waits for.
        """
        if table is not None:
            check_own_order(table)
        return StageOrder(tuple(lies), table)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The blocks of all stages, in the order in which they run; none if that is still to be searched."""
        return turns_of(self.table) if self.table is not None else ()

    def seconds(self, shares: Sequence[float]) -> float:
        """Of all blocks in their order, if nothing is sent; without an order, `step_time`.

        Args:
            shares: seconds of each stage for a micro-batch; F, I and W take alike.
        """
        if not self.turns:
            return step_time(shares, self.groups)
        places = [(group,) for group in range(max(self.groups) + 1)]
        tasks, _ = turn_tasks(self.turns, lambda cell: shares[cell.stage] * UNITS[cell.kind], lambda *_: 0.0, places)
        return max(end for _, end in times_of(tasks))


def step_time(shares: Sequence[float], groups: Sequence[int]) -> float:
    """The seconds of a micro-batch, with a part of the time in which a pipeline fills and drains.

    Args:
        shares: seconds of each stage.
        groups: the group of each.
    """
    loads = [0.0] * (max(groups) + 1)
    for share, group in zip(shares, groups, strict=True):
        loads[group] += share
    return max(loads) + FILL * max(shares)


@dataclass(frozen=True)
class _Way:
    """The first stages, so many of which end at one place.

    Attributes:
        least: the seconds that a micro-batch takes at least, however the rest is cut; see `step_time`.
        uneven: how far from each other the stages behind it are, if all groups are to have as much.
        loads: seconds of each group.
        slowest: seconds of the slowest stage.
        ties: stages with little work, bytes across, and the stages' squares: what decides among equally fast ones.
    """

    least: float
    uneven: float
    cuts: tuple[int, ...]
    loads: tuple[float, ...]
    slowest: float
    ties: tuple[float, float, float]

    @property
    def rank(self) -> tuple[float, ...]:
        return self.least, *self.ties


def cuts_of_chunks(
    sums: np.ndarray,
    places: Sequence[int],
    nbytes: Sequence[float],
    groups: Sequence[int],
    start: Cuts,
    little: float | np.ndarray,
) -> list[Cuts]:
    """Cuts at ``places``, those of the least `step_time` first; of equal ones those with the fewest stages that have little
    to do, then with the fewest bytes across, then with stages as equal as can be.

    A search stage by stage that follows the most promising ways; what cannot be faster than the best known is left.

    Args:
        sums: seconds of all units in front of each place; or a row of them for each stage, if groups are unlike.
        nbytes: across each place.
        groups: the group of each stage.
        start: cuts that are known.
        little: seconds; a stage with less has little to do. Or those of each stage.
    """
    stages, end = len(groups), sums.shape[-1] - 1
    few_of = np.broadcast_to(little, stages)
    of_stage, fastest = np.broadcast_to(sums, (stages, end + 1)), sums.reshape(-1, end + 1).min(0)
    left = [[groups[stage + 1 :].count(group) for group in range(max(groups) + 1)] for stage in range(stages)]

    def longer(way: _Way, stage: int, stop: int) -> _Way:
        """``way`` with one stage more."""
        begin = way.cuts[-1] if way.cuts else 0
        share = float(of_stage[stage, stop] - of_stage[stage, begin])
        loads = (*way.loads[: groups[stage]], way.loads[groups[stage]] + share, *way.loads[groups[stage] + 1 :])
        few, crossing, squares = way.ties
        ties = few + (share < few_of[stage]), crossing + (nbytes[stop] if stop < end else 0), squares + share**2
        rest, slowest = float(fastest[end] - fastest[stop]), max(way.slowest, share)
        behind = [(load, count) for load, count in zip(loads, left[stage], strict=True) if count]
        most, uneven, further = max(loads), 0.0, 0.0
        if behind:
            mean = (sum(load for load, _ in behind) + rest) / len(behind)
            most, further = max(most, mean), rest / sum(count for _, count in behind)
            uneven = sum(((mean - load) / count - further) ** 2 * count for load, count in behind)
        least = round((most + FILL * max(slowest, further)) / unit, 9)  # sums of equal stages differ by what is rounded
        return _Way(least, uneven, (*way.cuts, stop), loads, slowest, ties)

    unit = float(fastest[end])
    nothing = _Way(0.0, 0.0, (), (0.0,) * (max(groups) + 1), 0.0, (0.0, 0.0, 0.0))
    best = nothing
    for stage, stop in enumerate([*start, end]):
        best = longer(best, stage, stop)
    ways, reach = [nothing], max(NEAR, len(places) // stages)
    for stage, near in enumerate([*start, end]):
        at = bisect.bisect(places, near)
        stops = places[max(at - reach, 0) : at + reach] if near < end else [end]
        of_place: dict[int, list[_Way]] = {}
        longest = (best.least * unit - unit / len(set(groups))) / FILL * (1 + 1e-9)
        for way in ways:
            done = of_stage[stage, way.cuts[-1]] if way.cuts else 0.0
            for stop in stops:
                if 0 < of_stage[stage, stop] - done <= longest:
                    one = longer(way, stage, stop)
                    if one.least <= best.least:
                        of_place.setdefault(stop, []).append(one)
        ways = [
            one
            for own in of_place.values()
            for one in sorted(own, key=lambda one: (one.least, one.uneven, one.ties))[:KEPT]
        ]
    return [[*one.cuts[:-1]] for one in sorted([best, *ways], key=lambda one: one.rank)]


def shares_of(sums: np.ndarray, cuts: Sequence[int]) -> list[float]:
    """The seconds of each stage."""
    ends = [*cuts, sums.shape[-1] - 1]
    rows = np.broadcast_to(sums, (len(ends), sums.shape[-1]))
    return [float(row[stop] - row[start]) for row, start, stop in zip(rows, [0, *cuts], ends, strict=True)]
