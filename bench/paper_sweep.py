"""The best configuration of each plan for a model on so many GPUs, by estimates alone, those first that may be best.

Nothing is compiled. A configuration is lowered with all of its micro-batches, and simulated: what that takes does not grow
with them, so that nothing has to be extrapolated. Bounds (`bench.paper_bounds`) leave most configurations out. They are
taken from the heap with the lowest bound first; each gets the next, closer bound before it is estimated. The last bound is
its price by tables, less what these may be too high (``TABLES``): so most are never estimated. A plan is done when the
lowest bound is within ``CLOSE`` of its best. After a few estimates a bound counts times the least that one of them
was above its own, which is likely, and no proof.

Until something fits, all that may be best has to be estimated: the leanest configuration of a grid comes first, once one
grid was too large even for that, and a process with nothing to do makes estimates that are due later.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from bench.paper_bounds import LEVELS, alike_on_fewer, least
from bench.paper_estimates import Estimate, Estimates
from bench.paper_memory import compiled_peak
from bench.paper_models import CLUSTERS, Model
from bench.paper_plans import ROWS, Config
from jscaler.clusters import Cluster, find_cluster

CLOSE = 0.02  # of a plan's best
TABLES = 0.93  # of a price by tables, below which no estimate is (`bench.prices`)
LEARNED = 4  # estimates of a plan
SURELY = 2.0  # of a device's memory: what fits has no higher price by tables (bench.prices: at most 1.8 times its peak)
AHEAD = 32  # configurations that a process with nothing to do looks at, for one whose estimate is not known


def scaled(cluster: Cluster, compute: float = 1.0, links: float = 1.0) -> Cluster:
    """``cluster``, its devices and links so many times as fast."""
    device = cluster.device
    assert device is not None
    assert device.reached is not None
    old = device.reached
    products = type(old.products)(**{name: rate * compute for name, rate in vars(old.products).items()})
    faster = replace(old, products=products, bandwidth=old.bandwidth * compute, launch=old.launch / compute)
    inside, between = cluster.inside.times(links), cluster.between.times(links)
    return replace(cluster, device=replace(device, reached=faster), inside=inside, between=between)


@dataclass
class Sweep:
    """A model on one cluster, and the search for the best configuration of one of its plans.

    Attributes:
        estimates: what is known, which sweeps may share.
        most: of each plan so many configurations are estimated at most; None for as many as may be best.
        estimated: how many plans this one has estimated.
        seconds: of CPU that they took.
    """

    model: Model
    cluster: Cluster
    estimates: Estimates = field(default_factory=Estimates)
    most: int | None = None
    estimated: int = 0
    seconds: float = 0.0

    def estimate(self, text: str, cluster: Cluster | None = None) -> Estimate:
        """Of one plan, by its text; kept for the next run."""
        (found,) = self.on(text, [self.cluster if cluster is None else cluster])
        return found

    def on(self, text: str, clusters: Sequence[Cluster]) -> list[Estimate]:
        """Of one plan as it is on the first of ``clusters``, on each."""
        found, seconds = self.estimates.of(self.model, text, clusters)
        self.estimated += seconds > 0
        self.seconds += seconds
        return found

    def compiled(self, text: str) -> None:
        """Have XLA say the peak of a plan that was estimated."""
        self.estimates.measured(self.model, text, self.cluster, compiled_peak(self.model, text, self.cluster))

    def best(self, candidates: Iterable[Config]) -> tuple[Config, Estimate] | None:
        """The fastest that fits; None where none does."""
        every = sorted(candidates, key=lambda one: one.saving)
        leanest = {one.grid: one for one in every}
        full = set[tuple[int, ...]]()  # grids that even their leanest configuration does not fit
        waiting = [(0.0, 0, place, one) for place, one in enumerate(every)]
        best: tuple[Config, Estimate] | None = None
        above: list[float] = []
        while waiting and (self.most is None or len(above) < self.most):
            bound, level, place, one = heapq.heappop(waiting)
            if one.grid in full:
                continue
            nearest = min(above) if len(above) >= LEARNED else 1.0
            if best is not None and bound * nearest >= best[1].seconds * (1 - CLOSE):
                break
            if best is None:
                self._begin([(bound, level, place, one), *heapq.nsmallest(AHEAD, waiting)], leanest, full)
            if level <= LEVELS:
                closer = self.least(one, level) if level < LEVELS else self.priced(one)
                if math.isfinite(closer):
                    heapq.heappush(waiting, (max(bound, closer), level + 1, place, one))
                continue
            if best is None and full and _too_large(self.estimate(leanest[one.grid].text)):
                full.add(one.grid)
                continue
            found = self.estimate(one.text)
            above.append(found.seconds / bound)
            if found.fits and (best is None or found.seconds < best[1].seconds):
                best = one, found
            if not found.fits and _too_large(self.estimate(leanest[one.grid].text)):
                full.add(one.grid)
        return best

    def least(self, config: Config, level: int) -> float:
        """A bound of a configuration's seconds; infinite where it cannot fit."""
        return least(self.model, self.cluster, config, level, self.estimate(*self._asked(config, level)))

    def priced(self, config: Config) -> float:
        """A bound by tables; 0 where these have no price, and infinite where it cannot fit."""
        found = self.estimates.priced(self.model, config.text, self.cluster)
        if found is None:
            return 0.0
        return math.inf if found.peak > SURELY * self.cluster.memory else TABLES * found.seconds

    def _begin(
        self,
        due: Iterable[tuple[float, int, int, Config]],
        leanest: Mapping[tuple[int, ...], Config],
        full: Set[tuple[int, ...]],
    ) -> None:
        """Have as many estimates begun as there are processes with nothing to do."""
        for _, level, _, one in due:
            if one.grid not in full:
                first = leanest[one.grid] if full and level > LEVELS else one
                self.estimates.ahead(self.model, *self._asked(first, level))

    def _asked(self, config: Config, level: int) -> tuple[str, Cluster]:
        """What is estimated for a configuration's bound, or behind the last level for itself."""
        if level >= LEVELS:
            return config.text, self.cluster
        text, devices = alike_on_fewer(self.model, config, level)
        return text, replace(self.cluster, hosts=1, devices_per_host=devices)

    def model_flops(self) -> float:
        """Of the products of a step, none of them twice."""
        one = replace(self.cluster, hosts=1, devices_per_host=1)
        return self.estimate(f"accumulate({self.model.batch // max(ROWS)}, single())", one).flops


def _too_large(found: Estimate) -> bool:
    return not found.fits and not found.error


def cluster_for(gpus: int) -> Cluster:
    """The part of the paper's cluster that so many GPUs are."""
    return scaled(find_cluster(CLUSTERS[gpus]))
