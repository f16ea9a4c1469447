"""Two rivals that are no plans of jscaler, estimated by plans that are: ZeRO-3 with state on hosts, and Alpa's search."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.paper_bounds import LEVELS
from bench.paper_estimates import Estimate
from bench.paper_plans import SAVED, Config, grids_of, spread
from bench.paper_sweep import Sweep

PCIE = 12e9  # bytes per second and device in one direction: PCIe 3.0 x16, of 15.75 GB/s; assumed that no two share one
HOST_ADAM = 28 / 100e9  # seconds per parameter and host: master and moments read and written, at 100 GB/s; assumed
OFFLOAD = "zero3_offload"
BYTES = 2.0  # of a parameter or a gradient in float16


def offloaded(sweep: Sweep, configs: Sequence[Config]) -> tuple[Config, Estimate] | None:
    """The best of ZeRO-3 whose parameters, gradients and optimizer lie on the host (Ren et al., ZeRO-Offload, 2021).

    Each device brings its part of the parameters for every forward and backward, and takes its part of the gradient away,
    while it computes; then hosts update. On the device, the step is that of ``zero3`` without its state and its update.
    """
    saving = [replace(one, plan=OFFLOAD) for one in configs if one.plan == "zero3" and one.saved]
    found = [(one, offload(sweep, one, sweep.estimate(one.text))) for one in saving]
    fitting = [(one, estimate) for one, estimate in found if estimate.fits]
    return min(fitting, key=lambda pair: pair[1].seconds, default=None)


def offload(sweep: Sweep, config: Config, found: Estimate) -> Estimate:
    """What ``found`` is with state on hosts, if ``config`` has it there."""
    if config.plan != OFFLOAD:
        return found
    cluster, parameters = sweep.cluster, sweep.model.parameters
    moved = 3 * BYTES * parameters / cluster.num_devices * config.microbatches / PCIE
    seconds = max(found.seconds - found.updating, moved) + HOST_ADAM * parameters / cluster.hosts
    peak = found.peak - found.state
    return Estimate(seconds, peak, peak <= cluster.memory)


def alpa_like(sweep: Sweep) -> Iterator[Config]:
    """For each number of stages the two mixes of data and tensor parallelism that are cheapest on the devices of one stage,
    by their bounds; stages are then balanced by dynamic programming, as `pipeline` does (Zheng et al., Alpa, 2022).

    Layers are alike, so that one mix is the cheapest in every stage but those with the ends. Alpa computes layers again.
    """
    model, gpus = sweep.model, sweep.cluster.num_devices
    grids = grids_of(model, gpus)
    for pp in sorted({grid[2] for grid in grids}):
        mixes = spread(model, gpus, "alpa_like", False, SAVED[1:], [grid for grid in grids if grid[2] == pp])
        yield from sorted(mixes, key=lambda one: sweep.least(one, LEVELS - 1))[:2]
