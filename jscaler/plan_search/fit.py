"""``jscaler.fit``: which plans fit into a device's memory, the fastest first."""

import os
from collections.abc import Iterable
from typing import Any

from jscaler.clusters import Cluster
from jscaler.errors import PlanError, check_flag, shown
from jscaler.lower.step_plan import graph_of
from jscaler.plan_search.compiled import asked_of_xla
from jscaler.plan_search.engine import search_graph
from jscaler.plan_search.found import Found
from jscaler.plan_search.shown_progress import shown_progress
from jscaler.runtime.target import find_target
from jscaler.spaces import memory
from jscaler.spaces.given_plans import GivenPlans


def fit(
    graph: Any,
    cluster: Cluster | str | os.PathLike[str],
    plans: Iterable[str] | None = None,
    *,
    every: bool = False,
    donated: bool = True,
    confirm: bool | None = False,
) -> Found:
    """The plans that fit into the memory of ``cluster``'s devices, the fastest first, then those that do not.

    It is `jscaler.search` in the space ``jscaler.spaces.memory``, without a limit of time and without reasons.

    Args:
        graph: a train step's, ``train_step.graph(state, batch)``; or a step that is lowered, or compiled, or its ``.plan``,
            whose own plan does not count.
        cluster: a `Cluster`, a name (``"V100-32GB"``, ``"8xH100-80GB"``) or a .toml file.
        plans: what to try in place of that space; all of them are worked out.
        every: whether ``jscaler.cost`` works out all plans. Else tables of prices tell those that cannot be the fastest.
        donated: whether the step updates its state in place.
        confirm: whether XLA compiles the fastest that fits, as for `jscaler.search`.

    Raises:
        DeviceError: the cluster does not say what its devices are.
        UnknownNameError: no cluster or plan has the name.
        PlanError: a plan's arguments are not those that it takes; or ``graph`` is none.

    Example:
        >>> found = jscaler.fit(train_step.graph(state, batch), "V100-32GB")
        >>> found.chosen.text, found.headroom(found.chosen) > 30e9  # bytes to spare
        ('single', True)
    """
    graph = graph_of("fit", graph)
    if plans is not None and (isinstance(plans, str) or not isinstance(plans, Iterable)):
        raise PlanError(f"fit: plans are names in a list, such as ['single', 'zero3()'], not {shown(plans)}")
    check_flag("fit: every", every)
    on = find_target(cluster)
    space = memory() if plans is None else [GivenPlans(tuple(plans))]
    with shown_progress() as told:
        return search_graph(
            graph, on, [space], seconds=float("inf"), donated=donated, told=told, reasons=False,
            every=every or plans is not None, compiled_peak=asked_of_xla(on, confirm),
        )  # fmt: skip
