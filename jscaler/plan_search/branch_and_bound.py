"""Branch and bound over the points of spaces, priced by tables: which points to price next, and a bound of all others.

Points of one family differ only in ordered arguments: more micro-batches, or a later schedule. A later point never computes
or sends less than an earlier one. So the busiest device of an earlier point bounds the seconds of all later points. On top
comes what the stages of a later point wait for. A point that does not fit rules out all points that hold more.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from jscaler.plan_search.candidates import Candidate, Candidates
from jscaler.spaces import Point
from jscaler.tables import BlockKind

SURELY = 1.5  # tables put a peak at most so many times too high (bench.prices: 1.40)
LIKELY = 1.1  # a plan with this peak, by tables, may fit well enough that its cost is asked at once
ABOVE = 0.03  # tables put seconds at most by this part too high (bench.search --only brute)
CLOSE = 0.002  # a gain below this part is not searched for
PATIENCE = 8  # candidates whose cost is asked in vain, one after another, the fastest by tables first


@dataclass
class Family:
    """Points that differ only in ordered arguments.

    Attributes:
        open: points that are not priced yet, earlier ones first.
        priced: candidates that are priced.
        places: the point of each here; a candidate that another search has priced may have the point of another space.
        bounds: a lower bound of the seconds of each open point, with the point.
        order: 1 if no later point was cheaper than an earlier one; else the lowest ratio of the two; None if no two tell.
    """

    open: list[Point]
    priced: list[Candidate] = field(default_factory=list)
    places: dict[Candidate, Point] = field(default_factory=dict)
    bounds: list[tuple[float, Point]] = field(default_factory=list)
    order: float | None = None
    bounded: object = None  # what was known of the candidates when these were worked out

    @property
    def is_illegal(self) -> bool:
        """Whether all priced points are illegal for the same reason."""
        return not any(one.is_known for one in self.priced) and len({one.why for one in self.priced}) == 1

    def bound(self, point: Point, floor: float) -> float:
        """A lower bound of the seconds of ``point``, from earlier points that are priced; inf where its schedule has no
        table for its numbers."""
        if point.stages is not None and not point.stages.has_table:
            return math.inf
        known = [one for one in self.priced if one.is_known and one.least is None]  # a point with holes was filled to fit
        return max((_least_seconds(one, point) for one in known if point.is_behind(self.places[one])), default=floor)


class BranchAndBound:
    """Branch and bound, step by step.

    Attributes:
        memory: bytes of a device; None for no limit.
        every: whether all points are priced, and ``jscaler.cost`` confirms all.
        best: the candidate that fits with the lowest cost.
    """

    def __init__(
        self, candidates: Candidates, spaces: Iterable[Iterable[Point]], memory: float | None, every: bool = False
    ):
        self.candidates, self.memory, self.every = candidates, memory, every
        self.best: Candidate | None = None
        self.families: list[Family] = []
        self._of_spaces: list[list[Family]] = []
        seen: set[object] = set()
        for points in spaces:
            families: dict[tuple[object, ...], Family] = {}
            for point in points:
                if point.key not in seen:
                    seen.add(point.key)
                    families.setdefault(point.family, Family([])).open.append(point)
            for family in families.values():
                family.open.sort(key=lambda point: sum(point.ranks))
            self._of_spaces.append([*families.values()])
            self.families += families.values()
        self.num_points = len(seen)

    @property
    def priced(self) -> list[Candidate]:
        """All candidates that are priced."""
        return [one for family in self.families for one in family.priced]

    def steps(self) -> Iterator[Candidate]:
        """Price one point after another until no other can be faster; yields each candidate.

        For each space in turn: the first point of each family, then the points that may still be the best.
        """
        begun: list[Family] = []
        for family, point in [(f, point) for f in self.families for point in f.open] if self.every else []:
            one = self._price(family, point)
            self.keep(self.candidates.confirmed(one))
            yield one
        for families in self._of_spaces:
            for family in families:
                if (
                    not family.priced and family.open[0].opening is None
                ):  # holes take long to fill: the most promising first
                    yield self._price(family, family.open[0])
            begun += families
            while (chosen := self._next(begun)) is not None:
                yield self._price(*chosen)
        yield from self._confirm_all()

    def _next(self, families: Sequence[Family]) -> tuple[Family, Point] | None:
        """The point to price next: of those that are likely to fit, the one with the lowest bound; else the smallest."""
        least, found = (True, math.inf, 0.0), None
        for family in families:
            for bound, point in self._promising(family):
                peak = self._likely_peak(family, point)
                large = self.memory is not None and peak > self.memory
                rank = (large, peak if large else bound, self._far(point))
                if rank < least:
                    least, found = rank, (family, point)
        return found

    def _far(self, point: Point) -> float:
        """How far the micro-batches of a point with holes are from those of the best candidate."""
        if point.opening is None or self.best is None:
            return 0.0
        return abs(math.log(_microbatches(point) / _microbatches(self.best.point)))

    def _likely_peak(self, family: Family, point: Point) -> float:
        """Bytes that a point may hold: as the nearest that is priced, but for other micro-batches; 0 if none is."""
        priced = [one for one in family.priced if one.price is not None and one.point.opening is None]
        if not priced:
            return 0.0

        def distance(one: Candidate) -> int:
            return sum(abs(a - b) for a, b in zip(family.places[one].ranks, point.ranks, strict=True))

        near = min(priced, key=distance)
        assert near.price is not None
        fixed = near.price.fixed
        return fixed + (near.peak - fixed) * _under_way(point) / _under_way(family.places[near])

    def _promising(self, family: Family) -> list[tuple[float, Point]]:
        """The open points that may fit and be faster than the best, with their bounds."""
        if family.open and len(family.priced) > 1 and family.is_illegal:
            self._price(family, family.open[-1])
            if family.is_illegal:
                family.open.clear()  # the first and the last are illegal for one reason
        most = self._most
        return [(bound, point) for bound, point in self._bounded(family).bounds if bound < most]

    def _bounded(self, family: Family) -> Family:
        """A family with its bounds, as far as it is known, without points that cannot fit."""
        known = [(one.cost is None, one.compiled_peak) for one in family.priced]
        if family.bounded != known:
            out = [family.places[one] for one in family.priced if self._rules_out(one)]
            family.open = [point for point in family.open if not any(one.holds_less(point) for one in out)]
            family.bounds = [(family.bound(point, self.candidates.floor), point) for point in family.open]
            given = [one for one in family.priced if one.is_known and one.least is None]
            pairs = ((a, b) for a, b in itertools.permutations(given, 2) if family.places[b].is_behind(family.places[a]))
            ratios = [b.busiest / a.busiest for a, b in pairs]
            family.order = min(1.0, *ratios) if ratios else None
            family.bounded = known  # last: an interrupt leaves lower bounds, which hold too
        return family

    @property
    def _most(self) -> float:
        """A plan must take fewer seconds than this, by tables, to be worth a look."""
        if self.best is None:
            return math.inf
        seconds = self.best.price.seconds if self.best.price is not None else self.best.seconds
        return seconds * (1 - CLOSE)

    def is_too_large(self, one: Candidate) -> bool:
        """Whether it does not fit for certain."""
        if self.memory is None or not one.is_known:
            return one.none_fits
        if one.cost is not None or one.compiled_peak is not None:
            return not one.fits(self.memory)
        return one.peak > SURELY * self.memory

    def _rules_out(self, one: Candidate) -> bool:
        """Whether points that hold more cannot fit. For a point with holes this needs a proof for all its plans."""
        return one.none_fits if one.point.opening is not None else self.is_too_large(one)

    def _price(self, family: Family, point: Point) -> Candidate:
        one = self.candidates.priced(point, self.memory)
        family.open.remove(point)  # behind its price: an interrupt leaves it open
        family.places[one] = point
        family.priced.append(one)
        if one.is_known and not self.is_too_large(one) and (one.cost is not None or one.seconds < self._most):
            self._confirm(family, one)
        return one

    def _confirm(self, family: Family, one: Candidate) -> None:
        """Ask ``jscaler.cost``, unless it is likely too large, also by costs of its family."""
        ratios = [c.cost.memory.peak / c.price.peak for c in family.priced if c.cost is not None and c.price is not None]
        least = min(ratios, default=1.0)
        if self.memory is not None and one.cost is None and least * one.peak > LIKELY * self.memory:
            return
        self.keep(self.candidates.confirmed(one))

    def keep(self, one: Candidate) -> None:
        """Keep a candidate as the best if it fits and its cost is the lowest."""
        fits = one.cost is not None and not self.is_too_large(one)
        if fits and (self.best is None or one.seconds < self.best.seconds):
            self.best = one

    def _confirm_all(self) -> Iterator[Candidate]:
        """Ask the cost of candidates that may be faster than the best, by tables, while that helps."""
        in_vain = 0
        while in_vain < PATIENCE:
            before, most = self.best, math.inf if self.best is None else self.best.seconds
            left = [one for one in self._open_candidates() if one.seconds * self.below < most]
            if not left:
                return
            one = min(left, key=lambda c: (c.seconds, c.text))
            self.keep(self.candidates.confirmed(one))
            in_vain = in_vain + 1 if self.best is before is not None else 0
            yield one

    def _open_candidates(self) -> list[Candidate]:
        """Candidates that may fit and have no cost yet."""
        return [one for one in self.priced if one.is_known and one.cost is None and not self.is_too_large(one)]

    @property
    def below(self) -> float:
        """Which part of the seconds by tables a plan takes at least: by `ABOVE`, and by all costs that were asked."""
        costs = (one for one in self.priced if one.cost is not None and one.price is not None)
        return min([1 - ABOVE, *(one.seconds / one.price.seconds for one in costs if one.price is not None)])

    @property
    def bound(self) -> float:
        """A lower bound of the seconds of all plans that fit, by tables."""
        floor, surely = self.candidates.floor, self.below
        least = math.inf if self.best is None else self.best.seconds
        for one in self._open_candidates():
            least = min(least, one.seconds * surely)
        filled = [one.least for one in self.priced if one.least is not None]
        least = min([least, *(max(seconds, floor) * surely for seconds in filled)])
        families = [self._bounded(family) for family in self.families]
        lowest = min([1.0, *(family.order for family in families if family.order is not None)])
        for family in families:
            order = lowest if family.order is None else family.order
            least = min([least, *(bound * surely * order for bound, _ in family.bounds)])
        return max(least, floor * surely) if least < math.inf else floor

    def too_large(self, one: Candidate, peak: int) -> None:
        """Drop a candidate that needs ``peak`` bytes by XLA, more than a device has."""
        one.compiled_peak = peak
        self.best = None
        for other in self.priced:
            if other.cost is not None:
                self.keep(other)


def _least_seconds(earlier: Candidate, point: Point) -> float:
    """The least seconds of ``point``, by those of an earlier one of its family."""
    price, stages = earlier.price, point.stages
    if price is None or stages is None:
        return earlier.busiest
    of_kind: dict[BlockKind, float] = {"F": price.forward, "B": price.backward, "I": price.cotangent}
    return max(price.busiest, price.least_busy + stages.least_waits.seconds(of_kind))


def _under_way(point: Point) -> float:
    """The part of a step's forwards that wait for their backwards at a time."""
    stages, alone = point.stages, 1 / _microbatches(point)
    return stages.least_waits.under_way or alone if stages is not None and stages.has_table else alone


def _microbatches(point: Point) -> int:
    """In how many micro-batches a point runs, as far as its arguments say; a guess tells only what is looked at first."""
    count = point.numbers.get("microbatches", 1)
    return count if isinstance(count, int) and count > 0 else 1
