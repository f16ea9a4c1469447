"""Where a row is cut into stages of which groups of devices have several, or whose groups are unlike: such that the slowest
group is fastest.

What a group does for a micro-batch is all of its stages. So a group that has a heavy stage (the logits) takes less in
another. How long the single stages are counts where the pipeline fills and drains.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, fields
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
class _Ways:
    """Ways to cut the first stages, each a row of all arrays.

    Attributes:
        least: the seconds that a micro-batch takes at least, however the rest is cut; see `step_time`.
        uneven: how far from each other the stages behind it are, if all groups are to have as much.
        cuts: the places where the stages end.
        loads: seconds of each group.
        slowest: seconds of the slowest stage.
        ties: stages with little work, bytes across, and the stages' squares: what decides among equally fast ones.
    """

    least: np.ndarray
    uneven: np.ndarray
    cuts: np.ndarray
    loads: np.ndarray
    slowest: np.ndarray
    ties: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        return self.cuts[:, -1] if self.cuts.shape[1] else np.zeros(len(self.cuts), int)

    def at(self, rows: np.ndarray) -> "_Ways":
        """Some of them, in this order."""
        return _Ways(*(getattr(self, field.name)[rows] for field in fields(self)))


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
    stages, end, count = len(groups), sums.shape[-1] - 1, max(groups) + 1
    few_of, across = np.broadcast_to(little, stages), np.array([*nbytes[:end], 0.0])
    of_stage, fastest = np.broadcast_to(sums, (stages, end + 1)), sums.reshape(-1, end + 1).min(0)
    unit = fastest[end]

    def longer(ways: _Ways, stage: int, stops: np.ndarray) -> _Ways:
        """Each of ``ways`` with one stage more."""
        share = of_stage[stage, stops] - of_stage[stage, ways.ends]
        loads, slowest, rest = ways.loads.copy(), np.maximum(ways.slowest, share), unit - fastest[stops]
        loads[:, groups[stage]] += share
        ties = ways.ties + np.stack([share < few_of[stage], across[stops], share**2], 1)
        left = [groups[stage + 1 :].count(group) for group in range(count)]
        behind = [(loads[:, group], left[group]) for group in range(count) if left[group]]
        most, uneven, further = loads.max(1), np.zeros(len(stops)), np.zeros(len(stops))
        if behind:
            mean = (sum(load for load, _ in behind) + rest) / len(behind)
            most, further = np.maximum(most, mean), rest / sum(left)
            uneven = sum((((mean - load) / n - further) ** 2 * n for load, n in behind), uneven)
        # sums of equal stages differ by what is rounded
        least = np.round((most + FILL * np.maximum(slowest, further)) / unit, 9)
        return _Ways(least, uneven, np.column_stack([ways.cuts, stops]), loads, slowest, ties)

    nothing = _Ways(np.zeros(1), np.zeros(1), np.zeros((1, 0), int), np.zeros((1, count)), np.zeros(1), np.zeros((1, 3)))
    best = nothing
    for stage, stop in enumerate([*start, end]):
        best = longer(best, stage, np.array([stop]))
    most = best.least[0]
    longest = (most * unit - unit / len(set(groups))) / FILL * (1 + 1e-9)
    ways, reach = nothing, max(NEAR, len(places) // stages)
    for stage, near in enumerate([*start, end]):
        at = bisect.bisect(places, near)
        stops = np.array(places[max(at - reach, 0) : at + reach] if near < end else [end])
        shares = of_stage[stage, stops] - of_stage[stage, ways.ends][:, None]
        rows, columns = np.nonzero((shares > 0) & (shares <= longest))
        ways = longer(ways.at(rows), stage, stops[columns])
        ways = ways.at(np.flatnonzero(ways.least <= most))
        _, first, place = np.unique(ways.ends, return_index=True, return_inverse=True)
        order = np.lexsort((*ways.ties.T[::-1], ways.uneven, ways.least, first[place]))
        _, begins, sizes = np.unique(first[place][order], return_index=True, return_counts=True)
        ways = ways.at(order[np.arange(len(order)) - np.repeat(begins, sizes) < KEPT])
    every = _Ways(*(np.concatenate([getattr(one, field.name) for one in (best, ways)]) for field in fields(_Ways)))
    order = np.lexsort((*every.ties.T[::-1], every.least))
    return every.cuts[order, :-1].tolist()


def shares_of(sums: np.ndarray, cuts: Sequence[int]) -> list[float]:
    """The seconds of each stage."""
    ends = [*cuts, sums.shape[-1] - 1]
    rows = np.broadcast_to(sums, (len(ends), sums.shape[-1]))
    return [float(row[stop] - row[start]) for row, start, stop in zip(rows, [0, *cuts], ends, strict=True)]
