"""Estimates of plans of the paper's models: each is made once, by several processes at a time, and kept for the next run.

Plans of a sweep do not depend on one another: each asks for its estimates in a thread of its own, and waits for them.
"""

import functools
import gc
import json
import math
import multiprocessing
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jscaler
from bench.paper_models import Model
from jscaler.clusters import Cluster
from jscaler.errors import JscalerError
from jscaler.estimate.prices import Price, Prices

KEPT = Path("build/paper.jsonl")
SELDOM = 200_000, 100, 100  # when Python looks for circles, which graphs of many ops have few of: a sixth less time
Key = tuple[str, str, str]  # of a model, a cluster, a plan


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


_Made = Future[tuple[list[Estimate], float]]


class Estimates:
    """Those that have been made, by whomever, and those under way.

    Args:
        path: of the file that keeps them, which an interrupted run has left; None for none.
        workers: processes that make them; one makes them in this process.
    """

    def __init__(self, path: Path | None = None, workers: int = 1):
        self.kept: dict[Key, Estimate] = {}
        self._path, self._lock = path, threading.Lock()
        self._workers = workers
        self._prices: dict[tuple[Model, str], Prices] = {}
        self._pricing = threading.Lock()
        self._under_way: dict[tuple[Key, ...], _Made] = {}
        self._ahead = set[tuple[Key, ...]]()  # of those, what nobody has asked for yet
        self._makers: Executor
        if workers > 1:
            self._makers = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), gc.set_threshold, SELDOM)
        else:
            self._makers = ThreadPoolExecutor(1)
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                model, cluster, plan, found = json.loads(line)
                self.kept[model, cluster, plan] = Estimate(**found)

    def of(self, model: Model, text: str, clusters: Sequence[Cluster]) -> tuple[list[Estimate], float]:
        """Of one plan as it is on the first of ``clusters``, on each; and the CPU's seconds, of the first who asks."""
        keys = tuple(_key(model, text, cluster, clusters[0]) for cluster in clusters)
        with self._lock:
            if all(key in self.kept for key in keys):
                return [self.kept[key] for key in keys], 0.0
            first = keys not in self._under_way or keys in self._ahead
            self._ahead.discard(keys)
            made = self._begun(keys, model, text, clusters)
        found, seconds = made.result()
        if first:
            with self._lock:
                anew = {key: one for key, one in zip(keys, found, strict=True) if key not in self.kept}  # XLA's word stays
            self._keep(anew)
        return found, seconds if first else 0.0

    def ahead(self, model: Model, text: str, cluster: Cluster) -> None:
        """Begin one that may be asked for next, if there is a process with nothing to do."""
        keys = (_key(model, text, cluster, cluster),)
        with self._lock:
            busy = sum(not made.done() for made in self._under_way.values())
            if busy < self._workers and keys not in self._under_way and keys[0] not in self.kept:
                self._ahead.add(keys)
                self._begun(keys, model, text, [cluster])

    def priced(self, model: Model, text: str, cluster: Cluster) -> Price | None:
        """By tables, in this process; None where these have no price, or the plan is not legal."""
        key = model, f"{cluster.hosts}x{cluster.devices_per_host} {cluster.device} {cluster.inside} {cluster.between}"
        with self._pricing, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if key not in self._prices:
                self._prices[key] = Prices(_own(model).graph, cluster)
            try:
                return self._prices[key].of(text)
            except JscalerError:
                return None

    def measured(self, model: Model, text: str, cluster: Cluster, peak: int) -> None:
        """XLA has said the peak of a plan that was estimated."""
        key = _key(model, text, cluster, cluster)
        self._keep({key: replace(self.kept[key], peak=peak, fits=peak <= cluster.memory, memory="XLA")})

    def close(self) -> None:
        """Begin no more, and end the processes."""
        self._makers.shutdown(cancel_futures=True)

    def _begun(self, keys: tuple[Key, ...], model: Model, text: str, clusters: Sequence[Cluster]) -> _Made:
        if keys not in self._under_way:
            self._under_way[keys] = self._makers.submit(_made, model, text, clusters)
        return self._under_way[keys]

    def _keep(self, found: dict[Key, Estimate]) -> None:
        with self._lock:
            self.kept.update(found)
            if self._path is not None:
                self._path.parent.mkdir(exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps([*key, vars(one)]) + "\n" for key, one in found.items())


def _key(model: Model, text: str, cluster: Cluster, planned: Cluster) -> Key:
    """What of a cluster an estimate depends on, and of that which the plan was made for."""
    rates = [f"{zlib.crc32(repr((one.device, one.inside, one.between)).encode()):08x}" for one in (cluster, planned)]
    return model.shown, f"{cluster.hosts}x{cluster.devices_per_host} {' for '.join(dict.fromkeys(rates))}", text


@functools.cache
def _own(model: Model) -> Model:
    """The one that has been captured in this process, of all that are equal."""
    return model


def _made(model: Model, text: str, clusters: Sequence[Cluster]) -> tuple[list[Estimate], float]:
    """The estimates, and the CPU's seconds that they took."""
    started = time.thread_time()
    return _estimated(_own(model), text, clusters), time.thread_time() - started


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
