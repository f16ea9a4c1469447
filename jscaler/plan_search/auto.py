"""``"auto"`` in the place of a plan: it is searched when the step is first planned."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jscaler.clusters import Cluster, CostModel
from jscaler.errors import PlanError
from jscaler.ir import Graph
from jscaler.plan_search.at_hand import cluster_at_hand, of_devices
from jscaler.plan_search.compiled import asked_of_xla
from jscaler.plan_search.engine import search_graph, seconds_checked
from jscaler.plan_search.found import Found, nothing_fits
from jscaler.plan_search.shown_progress import shown_progress
from jscaler.primitives import Plan
from jscaler.spaces import as_spaces


@dataclass(frozen=True)
class Auto:
    """A plan that is searched for the step at hand when that is first planned, as `jscaler.search` does.

    Attributes:
        space: a `jscaler.spaces.Space`, the name of a built-in one, or several; all built-in ones by default.
        seconds: how long the search may take.
        memory: bytes that each device may take; all that it has by default.
        name: what the plan is called before it is found.

    Example:
        >>> fast = jscaler.parallelize(jscaler.Auto(space="zero"), devices=4, cluster="8xH100-80GB")(train_step.fun)
        >>> fast.lower(state, batch).plan.name
        'zero1'
    """

    space: Any = None
    seconds: float = 60.0
    memory: float | None = None
    name: str = "auto"

    def __post_init__(self) -> None:
        as_spaces(self.space)
        seconds_checked(self.seconds)


def searched_plan(auto: Auto, graph: Graph, num_devices: int, cost: CostModel) -> Plan:
    """The plan that is found. Of a job of several processes the first searches, and all others get its plan.

    Raises:
        PlanError: nothing fits.
    """
    found = _found(auto, graph, num_devices, cost) if jax.process_index() == 0 else None
    plan = found.plan if found is not None else None
    text = _to_all(plan.to_json() if plan is not None else "")
    if not text:
        raise PlanError("auto: " + ("; ".join(nothing_fits(found)) if found is not None else "nothing fits"))
    return Plan.from_json(text) if plan is None else plan


def _found(auto: Auto, graph: Graph, num_devices: int, cost: CostModel) -> Found:
    """What a search finds for ``num_devices`` of a cluster; by default of those at hand."""
    given = isinstance(cost, Cluster)
    cluster = of_devices(cost, num_devices) if given else cluster_at_hand(jax.devices(), num_devices)
    with shown_progress() as told:
        return search_graph(
            graph, cluster, as_spaces(auto.space), seconds=auto.seconds, memory=auto.memory, told=told,
            compiled_peak=asked_of_xla(cluster),
        )  # fmt: skip


def _to_all(text: str) -> str:
    """What the first process says, on all."""
    if jax.process_count() == 1:
        return text
    letters = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(letters))))
    padded = np.zeros(size, np.uint8)
    padded[: len(letters)] = letters[:size]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)).decode()
