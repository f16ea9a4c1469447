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
from jscaler.plan_search.engine import limits_checked, search_graph
from jscaler.plan_search.found import Found, nothing_fits
from jscaler.plan_search.shown_progress import shown_progress
from jscaler.plans.batch import BATCH
from jscaler.primitives import Plan
from jscaler.spaces import as_spaces

FAILED = "failed: "  # what the process that searches says in place of a plan


@dataclass(frozen=True)
class Auto:
    """A plan that is searched for the step at hand when that is first planned, as `jscaler.search` does.

    Attributes:
        space: a `jscaler.spaces.Space`, the name of a built-in one, or several; by default those of published
            plans and ``per_op``.
        seconds: how long the search may take.
        memory: bytes that each device may take; all that it has by default.
        batch: path or pattern of the batch among the step's inputs.
        name: what the plan is called before it is found.

    Example:
        >>> fast = jscaler.parallelize(jscaler.Auto(space="zero"), devices=4, cluster="8xH100-80GB")(train_step.fun)
        >>> fast.lower(state, batch).plan.name
        'zero1'
    """

    space: Any = None
    seconds: float = 60.0
    memory: float | None = None
    batch: str = BATCH
    name: str = "auto"

    def __post_init__(self) -> None:
        as_spaces(self.space)
        limits_checked(self.seconds, self.memory)


def searched_plan(auto: Auto, graph: Graph, num_devices: int, cost: CostModel, donated: bool) -> Plan:
    """Search for a plan. In a job of several processes only the first searches; the others get its plan.

    Args:
        donated: whether the step updates its state in place.

    Raises:
        PlanError: nothing fits; on processes that do not search, also where that failed otherwise.
        KeyboardInterrupt: Ctrl-C stopped the search.
    """
    if jax.process_index():
        text = _to_all("")
        if text.startswith(FAILED):
            raise PlanError(f"process 0, which searches, ended with {text.removeprefix(FAILED)}")
        return Plan.from_json(text)
    try:
        found = _found(auto, graph, num_devices, cost, donated)
        if found.interrupted:
            raise KeyboardInterrupt
        if found.plan is None:
            raise PlanError("auto: " + "; ".join(nothing_fits(found)))
    except BaseException as error:  # the others wait
        _to_all(f"{FAILED}{type(error).__name__}: {error}")
        raise
    _to_all(found.plan.to_json())
    return found.plan


def _found(auto: Auto, graph: Graph, num_devices: int, cost: CostModel, donated: bool) -> Found:
    """The result of a search on ``num_devices`` of a cluster, or of the devices at hand."""
    given = isinstance(cost, Cluster)
    cluster = of_devices(cost, num_devices) if given else cluster_at_hand(jax.devices(), num_devices)
    with shown_progress() as told:
        return search_graph(
            graph, cluster, as_spaces(auto.space), seconds=auto.seconds, memory=auto.memory, batch=auto.batch,
            donated=donated, told=told, compiled_peak=asked_of_xla(cluster),
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
