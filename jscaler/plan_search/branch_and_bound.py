"""Branch and bound over the points of spaces, by tables: which are worth a look, and what none of the others is below.

Points of one family differ by arguments that are in order: more micro-batches, say, or a later schedule. None of them
computes or sends less than those in front of it. What the busiest devices have to do in one point bounds all behind it,
and a point that does not fit rules out all that hold more.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from jscaler.plan_search.candidates import Candidate, Candidates
from jscaler.spaces import Point

SURELY = 1.6  # of a device's memory: what fits has no higher price by tables (bench.prices: at most 1.45 times its peak)
ABOVE = 0.03  # tables may price a plan higher than jscaler.cost does by this part (bench.search)
CLOSE = 0.002  # a plan that is faster by less is not looked for


@dataclass
class Family:
    """The points that differ by ordered arguments alone.

    Attributes:
        open: those of which nothing is known, those in front first.
        looked: those that were priced.
    """

    open: list[Point]
    looked: list[Candidate] = field(default_factory=list)

    @property
    def is_illegal(self) -> bool:
        """Whether all that were priced are not legal, for one reason."""
        return not any(one.is_known for one in self.looked) and len({one.why for one in self.looked}) == 1

    def bound(self, point: Point, floor: float) -> float:
        """Seconds that ``point`` is not below, by those that it stands behind."""
        known = [one for one in self.looked if one.is_known and one.least is None]  # others chose what fits
        busy = (one.busiest for one in known if point.is_behind(one.point))
        return max(busy, default=floor)


class Search:
    """A search that can be asked for one step after another.

    Attributes:
        memory: bytes of a device; None where it does not count.
        best: the fastest plan that fits, by its cost.
    """

    def __init__(self, candidates: Candidates, spaces: Iterable[Iterable[Point]], memory: float | None):
        self.candidates, self.memory = candidates, memory
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
    def looked(self) -> list[Candidate]:
        """All candidates that were priced."""
        return [one for family in self.families for one in family.looked]

    def steps(self) -> Iterator[Candidate]:
        """Look at one point after another, until no other can be faster; each is given when it is known.

        Of one space after the other the first points of all families are looked at, and then what they leave open.
        """
        begun: list[Family] = []
        for families in self._of_spaces:
            for family in families:
                if not family.looked and family.open[0].opening is None:  # to fill holes takes longer: best first
                    yield self._look(family, family.open[0])
            begun += families
            while (chosen := self._next(begun)) is not None:
                yield self._look(*chosen)
        yield from self._confirm_all()

    def _next(self, families: Sequence[Family]) -> tuple[Family, Point] | None:
        """The point to look at: of the family with the lowest bound the one in the middle."""
        least, found = (math.inf, 0.0), None
        for family in families:
            worth = self._worth(family)
            bound = min((bound for bound, _ in worth), default=math.inf)
            chosen = min((point for _, point in worth), key=self._far, default=None)
            if chosen is not None and (bound, self._far(chosen)) < least:
                middle = worth[len(worth) // 2][1] if chosen.opening is None else chosen
                least, found = (bound, self._far(chosen)), (family, middle)
        return found

    def _far(self, point: Point) -> float:
        """How far a point with holes is from the best in its number of micro-batches."""
        if point.opening is None or self.best is None:
            return 0.0
        return abs(math.log(point.opening.microbatches / self.best.point.numbers.get("microbatches", 1)))

    def _worth(self, family: Family) -> list[tuple[float, Point]]:
        """The open points of a family that may be faster than the best and may fit, with their bounds."""
        floor, most = self.candidates.floor, self._most
        found = []
        if family.open and len(family.looked) > 1 and family.is_illegal:
            self._look(family, family.open[-1])
            if family.is_illegal:
                family.open.clear()  # what is wrong with the first and the last has nothing to do with the numbers
        for point in [*family.open]:
            if any(one.point.holds_less(point) for one in family.looked if self.is_too_large(one)):
                family.open.remove(point)
                continue
            bound = family.bound(point, floor)
            if bound < most:
                found.append((bound, point))
        return found

    @property
    def _most(self) -> float:
        """Seconds by tables below which a plan is looked for."""
        if self.best is None:
            return math.inf
        seconds = self.best.price.seconds if self.best.price is not None else self.best.seconds
        return seconds * (1 - CLOSE)

    def is_too_large(self, one: Candidate) -> bool:
        """Whether it surely does not fit."""
        if self.memory is None or not one.is_known:
            return one.none_fits
        if one.cost is not None or one.compiled_peak is not None:
            return not one.fits(self.memory)
        return one.peak > SURELY * self.memory

    def _look(self, family: Family, point: Point) -> Candidate:
        one = self.candidates.priced(point, self.memory)
        family.open.remove(point)  # behind its price: an interrupt leaves it open
        family.looked.append(one)
        if one.is_known and not self.is_too_large(one) and one.seconds < self._most:
            self._confirm(family, one)
        return one

    def _confirm(self, family: Family, one: Candidate) -> None:
        """Ask ``jscaler.cost`` of one that seems faster, unless others of its family say that it is too large."""
        ratios = [c.cost.memory.peak / c.price.peak for c in family.looked if c.cost is not None and c.price is not None]
        if self.memory is not None and one.cost is None and ratios and min(ratios) * one.peak > 1.1 * self.memory:
            return
        self.take(self.candidates.confirmed(one))

    def take(self, one: Candidate) -> None:
        """Note a candidate whose cost is known: the best, if it fits and is the fastest."""
        fits = one.cost is not None and not self.is_too_large(one)
        if fits and (self.best is None or one.seconds < self.best.seconds):
            self.best = one

    def _confirm_all(self) -> Iterator[Candidate]:
        """Those that by tables may be faster than the best."""
        while True:
            most = math.inf if self.best is None else self.best.seconds
            left = [one for one in self._open_candidates() if one.seconds * (1 - ABOVE) < most]
            if not left:
                return
            one = min(left, key=lambda c: (c.seconds, c.text))
            self.take(self.candidates.confirmed(one))
            yield one

    def _open_candidates(self) -> list[Candidate]:
        """Those that may fit and have no cost yet."""
        return [one for one in self.looked if one.is_known and one.cost is None and not self.is_too_large(one)]

    @property
    def order(self) -> float:
        """1 where all that was looked at kept the order; else the part of another's seconds that one behind it takes."""
        kept = 1.0
        for family in self.families:
            known = [one for one in family.looked if one.is_known and one.least is None]
            for first, second in itertools.permutations(known, 2):
                if second.point.is_behind(first.point):
                    kept = min(kept, second.busiest / first.busiest)
        return kept

    @property
    def bound(self) -> float:
        """Seconds that no plan of the spaces that fits is below, by tables."""
        floor = self.candidates.floor
        least = math.inf if self.best is None else self.best.seconds
        for one in self._open_candidates():
            least = min(least, one.seconds * (1 - ABOVE))
        filled = [one.least for one in self.looked if one.least is not None and one.is_known]
        least = min([least, *(seconds * (1 - ABOVE) for seconds in filled)])
        below = (1 - ABOVE) * self.order
        for family in self.families:
            for point in family.open:
                least = min(least, family.bound(point, floor) * below)
        return max(least, floor * (1 - ABOVE)) if least < math.inf else floor

    def too_large(self, one: Candidate, peak: int) -> None:
        """XLA needs ``peak`` bytes for a candidate, which is more than a device has: another is the best."""
        one.compiled_peak = peak
        self.best = None
        for other in self.looked:
            if other.cost is not None:
                self.take(other)
