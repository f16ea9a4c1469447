"""``search_graph``: the fastest plan of some spaces that fits, with its bound, its runners-up, and why it is so."""

import itertools
import math
import numbers
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jscaler.clusters import Cluster
from jscaler.collector import no_full_collections
from jscaler.errors import DeviceError, PlanError, shown
from jscaler.ir import Graph
from jscaler.ir.walk import grouped
from jscaler.plan_search.branch_and_bound import BranchAndBound
from jscaler.plan_search.candidates import Candidate, Candidates
from jscaler.plan_search.found import Found, Reason
from jscaler.plan_search.program import Filled
from jscaler.plan_search.program.decisions import decisions
from jscaler.plans.batch import BATCH
from jscaler.plans.batch_size import batch_size
from jscaler.plans.first_layers import count_of
from jscaler.plans.layers import find_layers
from jscaler.primitives import Planner
from jscaler.spaces import Point, Setting
from jscaler.spaces.built_in import AnySpace
from jscaler.text.units import readable_bytes

SMALLEST = 3  # plans whose cost is asked where nothing fits
FOR_REASONS = 0.2  # of the seconds: for what other choices would cost
EQUAL = 1e-6  # of the seconds: plans that differ by less are as fast
DECISIONS = 9  # of a plan that a program filled, of which reasons are told


@dataclass(frozen=True)
class Progress:
    """How far a search is.

    Attributes:
        stage: what it does.
        looked, points: plans that were looked at, and all that there are.
        best: the fastest so far that fits.
        bound: seconds that no plan is below.
    """

    stage: str
    looked: int = 0
    points: int = 0
    best: Candidate | None = None
    bound: float = 0.0


Told = Callable[[Progress], Any]
Compile = Callable[[Candidate], int | None]  # bytes that XLA needs, where it can be asked


@no_full_collections()
def search_graph(
    graph: Graph,
    cluster: Cluster,
    spaces: Sequence[Sequence[AnySpace]],
    *,
    seconds: float = 60.0,
    memory: float | None = None,
    batch: str = BATCH,
    donated: bool = True,
    told: Told = lambda progress: None,
    compiled_peak: Compile | None = None,
    every: bool = False,
    reasons: bool = True,
) -> Found:
    """Search ``spaces`` in turn. Stops after ``seconds`` or at Ctrl-C, with the best plan so far.

    Args:
        memory: bytes that each device may take; all that it has by default.
        batch: path or pattern of the batch among the inputs.
        told: is called with the progress of the search.
        compiled_peak: asks XLA for the peak of the best plan. If that does not fit, the search goes on.
        every: whether ``jscaler.cost`` works out all plans, also those that cannot be the best.
        reasons: whether it is asked what other choices cost.

    Raises:
        DeviceError: the cluster does not say what its devices are.
        UnknownNameError: no input is called as ``batch`` says.
        PlanError: the spaces are empty for so many devices and rows.
    """
    return _Search(graph, cluster, spaces, seconds, memory, batch, donated, told, compiled_peak, every).found(reasons)


class _Search:
    """A search from its points to its answer."""

    def __init__(
        self, graph: Graph, cluster: Cluster, spaces: Sequence[Sequence[AnySpace]], seconds: float, memory: float | None,
        batch: str, donated: bool, told: Told, compiled_peak: Compile | None, every: bool,
    ):  # fmt: skip
        if cluster.device is None:
            raise DeviceError(f"cluster '{cluster.name}' does not say what its devices are: seconds have no price")
        self.begun, self.seconds, self.told, self.compiled_peak = time.perf_counter(), seconds, told, compiled_peak
        self.cluster, self.spaces = cluster, spaces
        self.memory = memory if memory is not None else max(kind.memory for kind in cluster.kinds) or None
        told(Progress("pricing one device"))
        self.candidates = Candidates(graph, cluster, donated, batch)
        per_host = min(kind.devices_per_host for kind in cluster.kinds)
        planner = Planner(graph, 1)
        layers = count_of(planner, find_layers(planner, needed=False))
        self.at = Setting(cluster.num_devices, per_host, batch_size(graph, batch), layers, rows_of=batch)
        points = [self._points(space) for space in spaces]
        self.search = BranchAndBound(self.candidates, points, self.memory, every)
        if not self.search.num_points:
            rows = f"{self.at.batch} rows of a batch" if self.at.batch else "a step of which nothing says what the batch is"
            raise PlanError(
                f"search: the space {'; '.join(str(one) for space in spaces for one in space)} has no plan for "
                f"{self.at.devices} devices, {self.at.per_host} of a host, and {rows}"
            )
        self.note, self.interrupted = "", False

    def _points(self, spaces: Sequence[AnySpace]) -> list[Point]:
        return [point for space in spaces for point in space.points(self.at)]

    def _left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def found(self, reasons: bool) -> Found:
        """The answer, with its reasons or without."""
        search = self.search
        try:
            complete = self._exhaust(search, self._left())
            while search.best is not None and not self._agrees(search.best):
                complete = self._exhaust(search, max(self._left(), 1.0)) and complete
            if search.best is None:
                self._confirm_smallest()
            why = tuple(self._reasons(search.best)) if search.best is not None and reasons else ()
        except KeyboardInterrupt:
            complete, why, self.interrupted = False, (), True
        legal = [one for one in search.priced if one.is_known]
        legal.sort(key=lambda one: (one is not search.best, not one.fits(self.memory), one.seconds, one.text))
        illegal = {one.text: one.why for one in search.priced if not one.is_known}
        least = [(one.least_peak, one.text) for one in search.priced if one.least_peak is not None]
        return Found(
            self.cluster, self.memory, search.best, search.bound, why, tuple(legal), illegal, search.num_points,
            time.perf_counter() - self.begun, complete, self.interrupted, self.note,
            min(least, default=None),
        )  # fmt: skip

    def _exhaust(self, search: BranchAndBound, seconds: float, stage: str = "") -> bool:
        """Search until nothing is left or time is over; returns whether it ended by itself."""
        until, last = time.perf_counter() + seconds, 0.0
        self.candidates.until = until
        for one in search.steps():
            now = time.perf_counter()
            if now - last > 0.5:
                last = now
                at = stage or one.text
                self.told(Progress(at, len(search.priced), search.num_points, self.search.best, self.search.bound))
            if now > until:
                return False
        return True

    def _agrees(self, one: Candidate) -> bool:
        """Whether the best plan fits by XLA too; True if XLA is not asked."""
        if self.compiled_peak is None or self.memory is None or one.compiled_peak is not None:
            return True
        self.told(Progress(f"{one.text}: compiling", len(self.search.priced), self.search.num_points, one))
        try:
            peak = self.compiled_peak(one)
        except DeviceError as error:
            self.note, self.compiled_peak = f"not compiled: {error}", None
            return True
        if peak is None or peak <= self.memory:
            one.compiled_peak = peak
            return True
        self.search.too_large(one, peak)
        return False

    def _confirm_smallest(self) -> None:
        """If nothing fits: ask the costs of the smallest plans."""
        known = [one for one in self.search.priced if one.is_known]
        for one in sorted(known, key=lambda one: (one.peak, one.text))[:SMALLEST]:
            self.candidates.confirmed(one)

    def _reasons(self, best: Candidate) -> Iterator[Reason]:
        """Constraints that bind, then the cost of each other choice, while time allows."""
        begun, least = time.perf_counter(), FOR_REASONS * self.seconds
        until = begun + max(self._left(), least)
        yield from self._binding(best, (begun + until) / 2)
        begun = time.perf_counter()
        until = min(until, begun + least)
        yield from self._arguments(best, (begun + until) / 2)
        if best.filled is not None:
            yield from self._decided(best, best.filled, until)

    def _arguments(self, best: Candidate, until: float) -> Iterator[Reason]:
        """For each argument the best plan with another value; where time is over, the best of those that were looked at."""
        points = [self._points(space) for space in self.spaces]
        fitting = [one for one in self.search.priced if one.is_known and not self.search.is_too_large(one)]
        fitting.sort(key=lambda one: (one.seconds, one.text))
        left = len(best.point.numbers)
        for name, value in best.point.numbers.items():
            others = [[p for p in own if p.numbers.get(name, value) != value] for own in points]
            search = BranchAndBound(self.candidates, others, self.memory)
            keys = {point.key for own in others for point in own}
            if time.perf_counter() > until:
                return
            for one in fitting:
                if search.best is None and one.point.key in keys:
                    search.keep(self.candidates.confirmed(one))
            self._exhaust(search, (until - time.perf_counter()) / left, f"without {name}={value}")
            left -= 1
            if search.best is not None and search.best.seconds > best.seconds:
                said = f"{name.removeprefix('plan.')}={value}"
                yield Reason(said, search.best.text, search.best.seconds - best.seconds, search.best.peak)

    def _decided(self, best: Candidate, filled: Filled, until: float) -> Iterator[Reason]:
        """Constraints between ops that bind, and what the decisions that weigh most save.

        Not where the best is the faster one by tables alone.
        """
        self.candidates.until = until
        for text in filled.filling.program.constraints:
            if time.perf_counter() > until:
                return
            self.told(Progress(f"without {text}", len(self.search.priced), self.search.num_points, best))
            free = self.candidates.instead(best, text, self.memory)
            if free.cost is not None and free.fits(self.memory) and free.seconds < best.seconds * (1 - EQUAL):
                yield Reason(text, free.text, free.seconds - best.seconds, free.peak)
        for decision in itertools.islice(decisions(filled), DECISIONS):
            if time.perf_counter() > until:
                return
            self.told(Progress(f"why {decision.of(filled)}", len(self.search.priced), self.search.num_points, best))
            other = self.candidates.instead(best, decision, self.memory)
            if other.none_fits and other.within == self.memory:
                yield Reason(decision.of(filled), "", math.inf, best.peak)
            if other.filled is None or other.price is None or best.price is None:
                continue
            less = other.seconds - (best.seconds if other.cost is not None else best.price.seconds)
            by = "tables" if other.cost is None else "cost"
            if less > EQUAL * best.seconds and other.fits(self.memory):
                yield Reason(decision.of(filled), decision.name(other.filled), less, other.peak, by)

    def _binding(self, best: Candidate, until: float) -> Iterator[Reason]:
        """Constraints without which the step would be faster: memory, and limits of domains."""
        wider: list[tuple[str, list[list[Point]], float | None]] = []
        if self.memory is not None:
            wider.append((f"memory={readable_bytes(self.memory)}", [self._points(space) for space in self.spaces], None))
        limits = ((text, other) for spaces in self.spaces for space in spaces for text, other in space.unlimited())
        for text, several in grouped(limits).items():  # one limit may stand in several spaces
            wider.append((text, [[*other.points(self.at)] for other in several], self.memory))
        for text, points, memory in wider:
            search = BranchAndBound(self.candidates, points, memory)
            search.best = best
            if not self._exhaust(search, until - time.perf_counter(), f"without {text}"):
                return
            free = search.best
            if free is not best and free.seconds < best.seconds:
                yield Reason(text, free.text, free.seconds - best.seconds, free.peak)


def limits_checked(seconds: Any, memory: Any) -> tuple[float, float | None]:
    """Seconds, and bytes of a device where they are given; raises PlanError where they are no numbers above 0."""
    wanted = (("seconds is how long it may take", seconds), ("memory is bytes of a device", memory))
    for what, value in wanted[: 1 if memory is None else 2]:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > 0:
            raise PlanError(f"search: {what}, a number above 0, not {shown(value)}")
    if seconds == math.inf:
        raise PlanError("search: seconds is how long it may take, a finite number; Ctrl-C ends a search, too")
    return float(seconds), None if memory is None or memory == math.inf else float(memory)
