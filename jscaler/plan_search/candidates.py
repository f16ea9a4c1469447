"""The points of spaces as candidates: planned, priced by tables, and confirmed by ``jscaler.cost``, each once."""

import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jscaler.clusters import Cluster
from jscaler.errors import JscalerError, PlanError, PlanWarning
from jscaler.estimate.cost import Cost
from jscaler.estimate.prices import NoPriceError, Price, Prices
from jscaler.estimate.query import cost, price_of
from jscaler.ir import Graph
from jscaler.plan_search.program import Filled, NothingFitsError, UnprovedError
from jscaler.plan_search.program.decisions import Decision
from jscaler.plan_search.program.fill import LESS, Filling, filling_of
from jscaler.plan_search.program.linear import Row
from jscaler.plan_search.stages import CutStages, StageCuts
from jscaler.plans.batch import BATCH
from jscaler.primitives import Plan
from jscaler.spaces import Point
from jscaler.spaces.space import Opening, StageOpening
from jscaler.stages import transform

FILLINGS = 3  # of holes, each within less memory
CUTS = 6  # of stages, each with what is known by then of those that do not fit
SOLVER_SECONDS = 20.0  # for the holes of a point, at most


@dataclass(eq=False)
class Candidate:
    """A point, and what is known of it.

    Attributes:
        plan: None where it is not legal for the step, or was not planned.
        price: by tables; None where these have none.
        cost: by ``jscaler.cost``, where it was asked.
        compiled_peak: bytes that XLA allocates on a device, where it was asked.
        why: why it is not legal; or what planning it warned of.
        least: for a point with holes, a lower bound of the seconds of all its plans, also if none was found.
        none_fits: whether it is proved that no plan of a point with holes fits.
        least_peak: bytes that each of its plans holds, where none fits and that is known.
        filled: of a point with holes, the solution that it is.
        cut: of a point whose stages are cut, the cut.
        within: bytes within which holes were filled, or stages cut.
        flops_ratio: FLOPs of all devices, as a multiple of the step's on one device; known with the cost.
    """

    point: Point
    plan: Plan | None = None
    price: Price | None = None
    cost: Cost | None = None
    compiled_peak: int | None = None
    why: str = ""
    least: float | None = None
    none_fits: bool = False
    least_peak: float | None = None
    filled: Filled | None = None
    cut: CutStages | None = None
    within: float | None = None
    flops_ratio: float | None = None

    @property
    def text(self) -> str:
        """Of the plan."""
        return self.point.text.removesuffix("()") if self.cut is None else self.cut.text

    @property
    def seconds(self) -> float:
        """Seconds of a step: by ``jscaler.cost`` if that was asked, else by tables."""
        if self.cost is not None:
            total = self.cost.seconds.total
            assert total is not None
            return total
        assert self.price is not None
        return self.price.seconds

    @property
    def peak(self) -> float:
        """Bytes on the fullest device: by XLA, else by ``jscaler.cost``, else by tables."""
        if self.compiled_peak is not None:
            return self.compiled_peak
        if self.cost is not None:
            return self.cost.memory.peak
        assert self.price is not None
        return self.price.peak

    def capacity(self, memory: float | None) -> float:
        """``memory``; where devices are of several kinds at most what those have that have the least left."""
        most = math.inf if memory is None else memory
        if self.cost is None or len(self.cost.cluster.kinds) == 1:
            return most
        return min(most, self.cost.memory.capacity or most)

    def fits(self, memory: float | None) -> bool:
        """Whether it fits, as well as that is known; into each device's own memory where they are of several kinds."""
        return self.peak <= self.capacity(memory)

    @property
    def busiest(self) -> float:
        """Seconds of the busiest device without waiting."""
        if self.price is not None:
            return self.price.busiest
        assert self.cost is not None
        assert self.cost.seconds.total is not None
        return self.cost.seconds.total - self.cost.seconds.waiting

    @property
    def is_known(self) -> bool:
        """Whether it is legal, and something says what it costs."""
        return self.cost is not None or self.price is not None


class Candidates:
    """Plans, prices and costs of points; each is worked out once."""

    def __init__(self, graph: Graph, cluster: Cluster, donated: bool = True, batch: str = BATCH):
        self.graph, self.cluster, self.donated, self.batch = graph, cluster, donated, batch
        self.prices = Prices(graph, cluster)
        self.until = math.inf  # the moment at which a solver ends, too
        self.stages = StageCuts(self.prices, self.batch)
        self._known: dict[object, Candidate] = {}

    @cached_property
    def floor(self) -> float:
        """A lower bound for all plans: the products of the step, divided among the devices without loss."""
        kinds = self.cluster.kinds
        alone = (replace(kind, hosts=1, devices_per_host=1) for kind in kinds)
        prices = [self.prices] if len(kinds) == 1 else [Prices(self.graph, one) for one in alone]
        return 1 / sum(kind.num_devices / max(1e-12, one.products) for kind, one in zip(kinds, prices, strict=True))

    def priced(self, point: Point, memory: float | None) -> Candidate:
        """``point``, planned and priced; by ``jscaler.cost`` where tables have no price.

        Args:
            memory: bytes within which holes are filled.
        """
        key = point.key, memory if point.opening is not None else None
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Candidate(point)
            opening = point.opening
            work = functools.partial(self._fill, opening, memory) if isinstance(opening, Opening) else self._price
            if isinstance(opening, StageOpening):
                work = functools.partial(self._cut, opening, memory)
            self._heeded(found, work)
        return found

    def confirmed(self, candidate: Candidate) -> Candidate:
        """``candidate`` with its cost."""
        if candidate.cost is None and candidate.plan is not None:
            self._heeded(candidate, self._cost)
            if isinstance(candidate.point.opening, StageOpening):
                self._heeded(candidate, functools.partial(self._cut_smaller, candidate.point.opening))
        return candidate

    def _price(self, candidate: Candidate) -> None:
        captured, count = self.prices.captured, self.cluster.num_devices
        several = len(self.cluster.kinds) > 1
        price = price_of(captured, count, self.cluster) if several else None
        plan = transform(captured, candidate.point.make(), count, cost=self.cluster, price=price)
        candidate.plan = replace(plan, name=candidate.text)
        if several:  # tables know one kind of devices
            self._cost(candidate)
            return
        try:
            candidate.price = self.prices.of(candidate.plan)
        except NoPriceError:
            self._cost(candidate)

    def _fill(self, opening: Opening, memory: float | None, candidate: Candidate) -> None:
        """Fill holes. If the plan does not fit by ``jscaler.cost``, fill them again within less memory."""
        candidate.within = memory
        recompute = memory is not None
        filling = filling_of(self.prices, opening.policy, opening.mesh, opening.microbatches, recompute, opening.batch)
        for _ in range(FILLINGS):
            try:
                self._solve(filling, candidate)
            except (NothingFitsError, UnprovedError):
                if candidate.cost is None:
                    raise
                return  # the plan at hand is too large; ``least`` bounds all others
            self._cost(candidate)
            if memory is None or candidate.within is None or candidate.peak <= memory:
                return
            candidate.within *= LESS * memory / candidate.peak

    def _solve(
        self, filling: Filling, candidate: Candidate, like: Filled | None = None, rows: Sequence[Row] = (),
        without: str = "",
    ) -> None:  # fmt: skip
        seconds = min(SOLVER_SECONDS, max(1.0, self.until - time.perf_counter()))
        found = filling.best(candidate.within, seconds, like, rows, without)
        candidate.least = found.bound if candidate.least is None else candidate.least
        plan = transform(self.prices.captured, found.policy, self.cluster.num_devices, cost=self.cluster)
        candidate.plan, candidate.price, candidate.filled = replace(plan, name=candidate.text), found.price, found
        candidate.cost = None

    def instead(self, chosen: Candidate, decision: Decision | str, memory: float | None) -> Candidate:
        """The best plan that decides one thing otherwise, within the memory that the chosen one was filled in.

        Args:
            decision: what it does not do; or a constraint between ops, as it was written, that does not count.

        Confirmed by ``jscaler.cost``, and filled again within less where it holds too much by that; unless time is over.
        """
        assert chosen.filled is not None
        found = Candidate(chosen.point, within=chosen.within)
        how = {"without": decision} if isinstance(decision, str) else {"rows": [decision.forbidden]}
        work = functools.partial(self._solve, chosen.filled.filling, like=chosen.filled, **how)
        for _ in range(FILLINGS):
            self._heeded(found, work)
            if found.filled is None or found.plan is None:
                return found
            said = f"without {decision}" if isinstance(decision, str) else decision.of(found.filled)
            text = f"{chosen.point.text}, {said}"
            found.point = replace(chosen.point, text=text)
            found.plan = replace(found.plan, name=text)
            if time.perf_counter() > self.until or self.confirmed(found).fits(memory):
                return found
            assert found.within is not None
            assert memory is not None
            found.within *= LESS * memory / found.peak
        return found

    def _cut(self, opening: StageOpening, memory: float | None, candidate: Candidate) -> None:
        """Cut stages so that they fit, as far as that is known."""
        if len(self.cluster.kinds) > 1:
            raise PlanError("stages are cut over tables of one kind of devices, and the cluster has several")
        found = self.stages.cut(opening, memory)
        candidate.least = found.bound if candidate.least is None else candidate.least
        try:
            plan = transform(self.prices.captured, found.policy, self.cluster.num_devices, cost=self.cluster)
        except JscalerError as error:  # other cuts may be legal
            raise UnprovedError(f"'{found.text}': {error}", candidate.least) from error
        candidate.plan, candidate.price, candidate.cost = replace(plan, name=found.text), found.price, None
        candidate.cut, candidate.within = found, memory

    def _cut_smaller(self, opening: StageOpening, candidate: Candidate) -> None:
        """While stages do not fit by ``jscaler.cost``, cut others: the tables of the fullest are too low."""
        for _ in range(CUTS):
            cut, cost = candidate.cut, candidate.cost
            if cut is None or cost is None or candidate.fits(candidate.within):
                return
            self.stages.heed(cut, cost.held.devices[0], candidate.peak)
            self._cut(opening, candidate.within, candidate)
            if candidate.text == cut.text:
                candidate.cost = cost
                return
            self._cost(candidate)

    def _cost(self, candidate: Candidate) -> None:
        found = candidate.cost = cost(self.graph, candidate.plan, self.cluster, donated=self.donated)
        candidate.flops_ratio = found.total_flops / self.prices.flops if self.prices.flops else 1.0

    def _heeded(self, candidate: Candidate, work: Callable[[Candidate], None]) -> None:
        """Do ``work``, and note why a plan is illegal or what it was warned of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PlanWarning)
            try:
                work(candidate)
            except JscalerError as error:
                candidate.plan = candidate.price = candidate.cost = None
                candidate.why = f"{type(error).__name__}: {error}"
                candidate.none_fits = isinstance(error, NothingFitsError)
                candidate.least_peak = error.least if isinstance(error, NothingFitsError) else None
                candidate.least = error.bound if isinstance(error, UnprovedError) else None
                return
            except Exception as error:
                error.add_note(f"while planning '{candidate.text}'")
                raise
        said = [str(one.message) for one in caught if issubclass(one.category, PlanWarning)]
        candidate.why = "; ".join(dict.fromkeys([candidate.why, *said] if candidate.why else said))
