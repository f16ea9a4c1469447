"""The best configuration of each plan for a model on so many GPUs, by estimates alone, those first that may be best.

Nothing is compiled. A configuration is lowered with all of its micro-batches, and simulated: what that takes does not grow
with them, so that nothing has to be extrapolated. Bounds (`bench.paper_bounds`) leave most configurations out. They are
taken from the heap with the lowest bound first; each gets the next, closer bound before it is estimated. A plan is done
when the lowest bound is within ``CLOSE`` of its best. After a few estimates a bound counts times the least that one of them
was above its own, which is likely, and no proof.
"""

import heapq
import json
import math
import sys
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jscaler
from bench.paper_bounds import LEVELS, alike_on_fewer, least
from bench.paper_memory import compiled_peak
from bench.paper_models import CLUSTERS, Model
from bench.paper_plans import ROWS, Config
from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import JscalerError

CLOSE = 0.02  # of a plan's best
LEARNED = 4  # estimates of a plan
KEPT = Path("build/paper.jsonl")


@dataclass(frozen=True)
class Estimate:
    """What a configuration takes; why it cannot be, if it cannot.

    Attributes:
        updating: seconds of the optimizer's ops.
        flops: of products, on each device.
        peak, state, inputs, activations, temporaries: bytes of a device: in all; parameters and optimizer; the batch; what
            forwards leave; what backwards hold.
        memory: who says the peak: the estimate, or XLA.
    """

    seconds: float
    peak: int
    fits: bool
    error: str = ""
    updating: float = 0.0
    flops: float = 0.0
    state: int = 0
    inputs: int = 0
    activations: int = 0
    temporaries: int = 0
    memory: str = "estimate"


def scaled(cluster: Cluster, compute: float = 1.0, links: float = 1.0) -> Cluster:
    """``cluster`` as programs reach it, its devices and links so many times as fast."""
    cluster = cluster.as_reached()
    device = cluster.device
    assert device is not None
    assert device.reached is not None
    old = device.reached
    rates = {name: rate * compute for name, rate in vars(old.products).items()}
    faster = replace(
        old, products=type(old.products)(**rates), bandwidth=old.bandwidth * compute, launch=old.launch / compute
    )
    inside, between = cluster.inside.times(links), cluster.between.times(links)
    return replace(cluster, device=replace(device, reached=faster), inside=inside, between=between)


@dataclass
class Sweep:
    """A model on one cluster.

    Attributes:
        path: of the file that keeps estimates; None for none.
        most: of each plan so many configurations are estimated at most; None for as many as may be best.
        kept: estimates by (model, cluster, plan), which an interrupted run has left.
        estimated: how many plans this run has estimated.
    """

    model: Model
    cluster: Cluster
    path: Path | None = KEPT
    most: int | None = None
    kept: dict[tuple[str, str, str], Estimate] = field(default_factory=dict)
    estimated: int = 0

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                *key, found = json.loads(line)
                self.kept[tuple(key)] = Estimate(**found)

    def estimate(self, text: str, cluster: Cluster | None = None) -> Estimate:
        """Of one plan, by its text; kept for the next run."""
        (found,) = self.estimates(text, [self.cluster if cluster is None else cluster])
        return found

    def estimates(self, text: str, clusters: Sequence[Cluster]) -> list[Estimate]:
        """Of one plan as it is on the first of ``clusters``, on each."""
        keys = [(self.model.shown, _described(cluster, clusters[0]), text) for cluster in clusters]
        if any(key not in self.kept for key in keys):
            found = _estimated(self.model, text, clusters)
            self.kept.update(zip(keys, found, strict=True))
            self.estimated += 1
            self._keep(keys)
        return [self.kept[key] for key in keys]

    def compiled(self, text: str) -> None:
        """Have XLA say the peak of a plan that was estimated."""
        key = (self.model.shown, _described(self.cluster, self.cluster), text)
        peak = compiled_peak(self.model, text, self.cluster)
        self.kept[key] = replace(self.kept[key], peak=peak, fits=peak <= self.cluster.memory, memory="XLA")
        self._keep([key])

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
            if level < LEVELS:
                closer = self.least(one, level)
                if math.isfinite(closer):
                    heapq.heappush(waiting, (max(bound, closer), level + 1, place, one))
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
        text, devices = alike_on_fewer(self.model, config, level)
        found = self.estimate(text, replace(self.cluster, hosts=1, devices_per_host=devices))
        return least(self.model, self.cluster, config, level, found)

    def model_flops(self) -> float:
        """Of the products of a step, none of them twice."""
        one = replace(self.cluster, hosts=1, devices_per_host=1)
        return self.estimate(f"accumulate({self.model.batch // max(ROWS)}, single())", one).flops

    def _keep(self, keys: Sequence[tuple[str, str, str]]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps([*key, vars(self.kept[key])]) + "\n" for key in keys)


def _too_large(found: Estimate) -> bool:
    return not found.fits and not found.error


def _described(cluster: Cluster, planned: Cluster) -> str:
    """What of a cluster a kept estimate depends on, and of that which the plan was made for."""
    rates = [f"{zlib.crc32(repr((one.device, one.inside, one.between)).encode()):08x}" for one in (cluster, planned)]
    return f"{cluster.hosts}x{cluster.devices_per_host} {' for '.join(dict.fromkeys(rates))}"


def _estimated(model: Model, text: str, clusters: Sequence[Cluster]) -> list[Estimate]:
    print(f"{model.shown} on {clusters[0].num_devices}: {text}", file=sys.stderr, flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first = jscaler.cost(model.graph, text, clusters[0])
        except JscalerError as error:
            return [Estimate(math.inf, 0, False, f"{type(error).__name__}: {error}"[:300])] * len(clusters)
        costs = [first, *(jscaler.cost(first.step, None, cluster) for cluster in clusters[1:])]
    memory, found = first.memory, []
    for cost in costs:
        seconds = cost.seconds.total
        assert seconds is not None
        updating = math.fsum(op.seconds or 0.0 for op in cost.by_op.values() if op.kind == "update")
        one = Estimate(
            float(seconds), int(memory.peak), bool(memory.fits), updating=float(updating), flops=float(cost.flops)
        )
        sizes = {name: int(getattr(memory, name)) for name in ("inputs", "activations", "temporaries")}
        found.append(replace(one, state=int(memory.parameters + memory.optimizer), **sizes))
    return found


def cluster_for(gpus: int) -> Cluster:
    """The part of the paper's cluster that so many GPUs are."""
    return scaled(find_cluster(CLUSTERS[gpus]))
