"""Two rivals that are no plans of jscaler, estimated by plans that are: ZeRO-3 with state on hosts, and Alpa's search."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jscaler
from bench.paper_plans import SAVED, Config, grids_of, spread
from bench.paper_sweep import Estimate, Sweep

PCIE = 12e9  # bytes per second and device in one direction: PCIe 3.0 x16, of 15.75 GB/s; assumed that no two share one
HOST_ADAM = 28 / 100e9  # seconds per parameter and host: master and moments read and written, at 100 GB/s; assumed
BYTES = 2.0  # of a parameter or a gradient in float16


def offloaded(sweep: Sweep, configs: Sequence[Config]) -> tuple[Config, Estimate] | None:
    """The best of ZeRO-3 whose parameters, gradients and optimizer lie on the host (Ren et al., ZeRO-Offload, 2021).

    Each device brings its part of the parameters for every forward and backward, and takes its part of the gradient away,
    while it computes; then hosts update. On the device, the step is that of ``zero3`` without its state and its update.
    """
    found = [(one, _offloaded(sweep, one)) for one in configs if one.plan == "zero3" and one.saved]
    fitting = [(one, estimate) for one, estimate in found if estimate.fits]
    return min(fitting, key=lambda pair: pair[1].seconds, default=None)


def _offloaded(sweep: Sweep, config: Config) -> Estimate:
    cluster, model = sweep.cluster, sweep.model
    found = jscaler.cost(model.graph, config.text, cluster)
    assert found.seconds.compute is not None
    updates = math.fsum(op.seconds or 0.0 for op in found.by_op.values() if op.kind == "update")
    own = model.parameters / cluster.num_devices
    moved = 3 * BYTES * own * config.microbatches / PCIE
    seconds = max(found.seconds.compute - updates + found.seconds.communication, moved)
    seconds += HOST_ADAM * model.parameters / cluster.hosts
    peak = found.memory.peak - found.memory.parameters - found.memory.optimizer
    return Estimate(float(seconds), int(peak), peak <= cluster.memory)


def alpa_like(sweep: Sweep) -> Iterator[Config]:
    """For each number of stages the mix of data and tensor parallelism that is cheapest on the devices of one stage, with
    all layers on them; stages are then balanced by dynamic programming, as `pipeline` does (Zheng et al., Alpa, 2022).

    Layers are alike, so that one mix is the cheapest in every stage but those with the ends. Alpa computes layers again.
    """
    model, cluster = sweep.model, sweep.cluster
    grids = grids_of(model, cluster.num_devices)
    for pp in sorted({grid[2] for grid in grids}):
        stage = replace(cluster, **_hosts(cluster.num_devices // pp, cluster.devices_per_host))
        own = [grid for grid in grids if grid[2] == pp]
        mixes = list(spread(model, cluster.num_devices, "alpa_like", False, SAVED[1:], own))
        costs = [sweep.estimate(replace(one, pp=1).text, stage).seconds for one in mixes]
        yield from (mixes[i] for i in sorted(range(len(mixes)), key=costs.__getitem__)[:2])


def _hosts(devices: int, per_host: int) -> dict[str, int]:
    return {"hosts": max(1, devices // per_host), "devices_per_host": min(devices, per_host)}
