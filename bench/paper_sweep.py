"""The best configuration of each plan for a model on so many GPUs, by estimates alone, those first that may be best.

Nothing is compiled. A configuration is lowered with all of its micro-batches, and simulated: what that takes does not grow
with them, so that nothing has to be extrapolated. Two bounds in closed form leave most configurations out: bytes of state
and of what is kept between layers; and the seconds that one device would take for all, by so many devices, with the
schedule's waiting, and what tensor parallelism sends. As soon as a plan's next bound is above its best, it is done; after
a few estimates the bound counts times the least that one of them was above its own, which is likely, and no proof.
"""

import json
import math
import sys
import warnings
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import jscaler
from bench.paper_memory import compiled_peak
from bench.paper_models import CLUSTERS, Model
from bench.paper_plans import Config
from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import JscalerError

STATE = 12.0  # bytes per parameter: master and two moments
GRADIENT = 2.0  # in float16, at least
LEARNED = 4  # estimates of a plan
KEPT = Path("build/paper.jsonl")


@dataclass(frozen=True)
class Estimate:
    """What a configuration takes; why it cannot be, if it cannot; who says its peak."""

    seconds: float
    peak: int
    fits: bool
    error: str = ""
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
        alone: the seconds that one device takes for all, by how it computes.
        estimated: how many plans this run has estimated.
    """

    model: Model
    cluster: Cluster
    path: Path | None = KEPT
    most: int | None = None
    kept: dict[tuple[str, str, str], Estimate] = field(default_factory=dict)
    alone: dict[tuple[str, int, int], float] = field(default_factory=dict)
    estimated: int = 0

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                *key, found = json.loads(line)
                self.kept[tuple(key)] = Estimate(**found)

    def estimate(self, text: str, cluster: Cluster | None = None, name: str = "") -> Estimate:
        """Of one plan, by its text; kept for the next run."""
        cluster = self.cluster if cluster is None else cluster
        key = (self.model.shown, f"{cluster.name}{name} {_rates(cluster)}", text)
        if key not in self.kept:
            self.kept[key] = _estimated(self.model, text, cluster)
            self.estimated += 1
            self._keep(key)
        return self.kept[key]

    def compiled(self, text: str) -> None:
        """Have XLA say the peak of a plan that was estimated."""
        key = (self.model.shown, f"{self.cluster.name} {_rates(self.cluster)}", text)
        peak = compiled_peak(self.model, text, self.cluster)
        self.kept[key] = replace(self.kept[key], peak=peak, fits=peak <= self.cluster.memory, memory="XLA")
        self._keep(key)

    def best(self, candidates: Iterable[Config]) -> tuple[Config, Estimate] | None:
        """The fastest that fits; None where none does."""
        ordered = sorted((self.floor(one), i, one) for i, one in enumerate(candidates) if self.may_fit(one))
        best: tuple[Config, Estimate] | None = None
        above: list[float] = []
        for floor, _, one in ordered[: self.most]:
            nearest = min(above) if len(above) >= LEARNED else 1.0
            if best is not None and floor * nearest >= best[1].seconds:
                break
            found = self.estimate(one.text)
            above.append(found.seconds / floor)
            if found.fits and (best is None or found.seconds < best[1].seconds):
                best = one, found
        return best

    def floor(self, config: Config) -> float:
        """No step is faster: all that one device would compute, by so many, and what tensor parallelism adds up."""
        if config.alone not in self.alone:
            one = replace(self.cluster, hosts=1, devices_per_host=1)
            device = replace(config, dp=1, tp=1, pp=1, zero=0, sequence=False, microbatches=self.model.batch // config.rows)
            text = device.text.replace("data_parallel()", "single()")
            self.alone[config.alone] = self.estimate(text, one, " alone").seconds
        computing = self.alone[config.alone] / self.cluster.num_devices
        times = 3 if config.saved else 2  # the backward, and the forward again
        sent = 2 * (config.tp - 1) / config.tp * times * self.model.exchanged * self.model.batch / config.dp / config.pp
        return (computing + sent / self.cluster.inside.bandwidth) * config.waiting

    def may_fit(self, config: Config) -> bool:
        """Whether its state, gradients, and what is kept of micro-batches under way, are below a device's memory."""
        own = self.model.parameters / config.tp / config.pp
        state = STATE * own / (config.dp if config.zero else 1)
        gradient = GRADIENT * own / (config.dp if config.zero > 1 else 1)
        row = self.model.exchanged / 2 / (config.tp if config.sequence else 1)  # what enters the layers
        row += 0 if config.saved else self.model.operands / config.tp
        under_way = config.microbatches if config.schedule == "gpipe" else min(config.pp, config.microbatches)
        kept = row / config.pp * config.rows * under_way
        return state + gradient + kept <= self.cluster.memory

    def _keep(self, key: tuple[str, str, str]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*key, vars(self.kept[key])]) + "\n")


def _rates(cluster: Cluster) -> str:
    """What of a cluster a kept estimate depends on."""
    device = cluster.device
    assert device is not None
    return f"{zlib.crc32(repr((device, cluster.inside, cluster.between)).encode()):08x}"


def _estimated(model: Model, text: str, cluster: Cluster) -> Estimate:
    print(f"{model.shown} on {cluster.name}: {text}", file=sys.stderr, flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = jscaler.cost(model.graph, text, cluster)
            seconds, memory = found.seconds.total, found.memory
        except JscalerError as error:
            return Estimate(math.inf, 0, False, f"{type(error).__name__}: {error}"[:300])
    assert seconds is not None
    return Estimate(float(seconds), int(memory.peak), bool(memory.fits))


def cluster_for(gpus: int) -> Cluster:
    """The part of the paper's cluster that so many GPUs are."""
    return scaled(find_cluster(CLUSTERS[gpus]))


def model_flops(model: Model) -> float:
    """Of the products of a step, none of them twice."""
    one = replace(cluster_for(4), hosts=1, devices_per_host=1)
    return jscaler.cost(model.graph, f"accumulate({model.batch}, single())", one).flops
