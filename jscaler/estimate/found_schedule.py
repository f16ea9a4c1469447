"""``jscaler.find_schedule``: the order of a step's blocks that takes the least time, searched for these very blocks."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import PlanError, shown
from jscaler.estimate.query import plan_and_cluster, planned
from jscaler.estimate.searched_order import LIMIT, Searched, most_of, searched_order
from jscaler.estimate.simulation import block_seconds_of, hop_seconds_of
from jscaler.lower.step_plan import step_of


def find_schedule(
    lowered: Any,
    plan: Any = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    *,
    memory: float | None = None,
    seconds: Mapping[str, float] | Sequence[float] | None = None,
    hops: Sequence[float] | None = None,
    limit: float = LIMIT,
    seed: int = 0,
) -> Searched:
    """Search the order in which device groups run the blocks of a step, within each device's memory.

    Blocks, groups, and what is sent stay as they are planned; the order alone changes. The published schedules, and the
    order that the step has, are the first to be tried. Needs ``pip install "jscaler[search]"``.

    Args:
        lowered, plan, cluster, seconds, hops: as for `simulate`: a finished step, or a graph with a plan; whose devices and
            links count; or what was measured (``compiled.measure``).
        memory: bytes that each device has; by default nine tenths of what the cluster's devices have.
        limit: seconds of the solver. They are counted as work, so that equal inputs give equal results.
        seed: of the solver.

    Raises:
        PlanError: as `simulate`; the step has no loop over several device groups, or its table overlaps blocks; no order
            keeps within the memory.
        JscalerError: OR-Tools is not installed.

    Example:
        >>> staged = train_step.under(plans.pipeline(2, 2)).lower(state, batch)
        >>> found = jscaler.find_schedule(staged, "4xH100-80GB")
        >>> found.seconds <= found.before, found.bound <= found.loop.seconds, len(found.table.rows)
        (True, True, 2)
    """
    if not (isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < math.inf):
        raise PlanError(f"find_schedule: limit is the seconds of the solver, a number above 0, not {shown(limit)}")
    plan, cluster = plan_and_cluster(lowered, plan, cluster)
    on = cluster if isinstance(cluster, Cluster) or cluster is None else find_cluster(cluster)
    step = step_of("find_schedule", lowered) if plan is None or on is None else planned(lowered, plan, on)
    most = most_of(on) if memory is None and on is not None else memory
    prices = block_seconds_of(step, on, seconds), hop_seconds_of(step, on, hops)
    return searched_order(step, *prices, most, limit, seed, on)
