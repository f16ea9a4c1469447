"""What a configuration takes at least: bounds that are cheaper than an estimate, the closest last.

A bound follows from an estimate of fewer devices that do the same, which many configurations share: by level that of

    0    one device that saves everything, with the most rows at once: no device does the same work faster
    1    one device that saves as much as the configuration, with as many rows
    2    the devices of one tensor-parallel group, with all layers

Their seconds are divided by the devices, and are as much longer as the schedule waits. What tensor parallelism adds up in
front of level 2, what data parallelism does once a step or for every micro-batch, and state, are in closed form.
"""

import math
from dataclasses import replace
from typing import Protocol

from bench.paper_models import Model
from bench.paper_plans import ROWS, Config
from jscaler.clusters import Cluster

LEVELS = 3
STATE = 12.0  # bytes per parameter: master and two moments
GRADIENT = 2.0  # in float16, at least; and of a parameter that is fetched
COPIES = 6.0  # bytes per parameter, at most, of what an estimate calls temporary: casts, and gradients on their way
TIMES = (2, 2, 1, 3)  # by ZeRO's stage: a gradient is joined, and it or the parameter is fetched; for every micro-batch
# the gradient is scattered, and parameters are fetched forwards and backwards


class Found(Protocol):
    """What a bound needs of an estimate."""

    @property
    def seconds(self) -> float: ...
    @property
    def updating(self) -> float: ...
    @property
    def inputs(self) -> int: ...
    @property
    def activations(self) -> int: ...
    @property
    def temporaries(self) -> int: ...


def alike_on_fewer(model: Model, config: Config, level: int) -> tuple[str, int]:
    """The plan whose estimate a bound of this level follows from, and its devices."""
    tp = config.tp if level == 2 else 1
    one = replace(config, dp=1, tp=tp, pp=1, zero=0, schedule="1f1b", sequence=config.sequence and tp > 1)
    one = one if level else replace(one, rows=max(ROWS), saved="", parts=1)
    text = replace(one, microbatches=model.batch // one.rows).text
    return text.replace("data_parallel()", "single()"), tp


def least(model: Model, cluster: Cluster, config: Config, level: int, found: Found) -> float:
    """Seconds; infinite where ``config`` cannot fit.

    Args:
        found: the estimate of `alike_on_fewer`.
    """
    share = config.tp * config.pp if level < 2 else config.pp
    if not may_fit(model, cluster, config, beside_state(model, config, level, found) if level else 0.0):
        return math.inf
    devices = config.dp * share
    times = 3 if config.saved else 2  # the backward, and the forward again
    sent = 2 * (config.tp - 1) / config.tp * times * model.exchanged * model.batch / config.dp / config.pp
    added = sent / cluster.inside.bandwidth if level < 2 else 0.0
    working = ((found.seconds - found.updating) / devices + added) * config.waiting
    return working + found.updating / devices + synchronizing(model, cluster, config)


def beside_state(model: Model, config: Config, level: int, found: Found) -> float:
    """Bytes of some device: of the batch, of what forwards leave, and of what the layer holds that needs most.

    Only the ends of an interlaced model are spread over its stages; a layer is on one.
    """
    tp, alike = (1, config.tp) if level == 2 else (config.tp, 1)
    held = max(0.0, found.temporaries - COPIES * model.parameters / alike)
    held /= config.pp if config.schedule == "interlaced" else 1
    return (found.inputs / config.dp + found.activations / config.pp + held) / tp


def may_fit(model: Model, cluster: Cluster, config: Config, beside: float) -> bool:
    """Whether state, gradients, and what is kept of micro-batches under way, are below a device's memory."""
    own = model.parameters / config.tp / config.pp
    state = STATE * own / (config.dp if config.zero else 1)
    gradient = GRADIENT * own / (config.dp if config.zero > 1 else 1)
    row = model.exchanged / 2 / (config.tp if config.sequence else 1)  # what enters the layers
    row += 0 if config.saved else model.operands / config.tp
    under_way = config.microbatches if config.schedule == "gpipe" else min(config.pp, config.microbatches)
    return state + gradient + max(beside, row / config.pp * config.rows * under_way) <= cluster.memory


def synchronizing(model: Model, cluster: Cluster, config: Config) -> float:
    """Seconds in which gradients are added up over ``dp``, and parameters fetched.

    A device sends and receives its part of each but for what it holds; of several hosts, each host all but what it holds.
    """
    own = GRADIENT * model.parameters / config.tp / config.pp
    times = TIMES[config.zero] * (config.microbatches if config.zero > 1 else 1)
    hosts = math.ceil(config.dp * config.tp / cluster.devices_per_host)
    if hosts > 1:
        return times * own * config.tp * (hosts - 1) / hosts / cluster.between.bandwidth
    return times * own * (config.dp - 1) / config.dp / cluster.inside.bandwidth
