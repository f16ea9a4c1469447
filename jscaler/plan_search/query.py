"""``jscaler.search``: the fastest plan of some spaces that fits on a target."""

import os
from collections.abc import Callable
from typing import Any

import jax

from jscaler.clusters import Cluster
from jscaler.errors import CaptureError, shown
from jscaler.ir import Graph
from jscaler.lower.step_plan import graph_of
from jscaler.plan_search.at_hand import cluster_at_hand
from jscaler.plan_search.compiled import asked_of_xla
from jscaler.plan_search.engine import limits_checked, search_graph
from jscaler.plan_search.found import Found
from jscaler.plan_search.shown_progress import shown_progress
from jscaler.plans.batch import BATCH
from jscaler.runtime.arguments import Arguments
from jscaler.runtime.step_capture import capture_call
from jscaler.runtime.target import find_target
from jscaler.spaces import as_spaces


def search(
    step: Any,
    *args: Any,
    target: Cluster | str | os.PathLike[str] | None = None,
    space: Any = None,
    seconds: float = 60.0,
    memory: float | None = None,
    batch: str = BATCH,
    confirm: bool | None = None,
    donated: bool = True,
) -> Found:
    """The plan of least seconds among those of ``space`` that fits into the memory of ``target``'s devices.

    Nothing runs and no device need be at hand: plans are priced by tables, and the best by ``jscaler.cost``. Ctrl-C stops
    the search, with the best so far. Equal inputs give equal plans, unless time runs out.

    Args:
        step: a train step as it is, or parallelized, with its arguments behind it; or its graph, or a lowered step.
        args: arrays or ``jax.ShapeDtypeStruct`` objects.
        target: a `Cluster`, a name (``"8xH100-80GB"``) or a .toml file; the devices at hand by default.
        space: a `jscaler.spaces.Space`, the name of a built-in one (``"megatron"``), or several; by default
            those of published plans and ``per_op``.
        seconds: how long the search may take.
        memory: bytes that each device may take; all that it has by default.
        batch: path or pattern of the batch among the step's inputs, whose dim 0 is its rows. Where none is called so, it is
            found in the dataflow.
        confirm: whether XLA compiles the best plan for the target and says what it takes: where it does not fit, the search
            goes on. By default where JAX's CUDA plugin is installed (extra ``aot``).
        donated: whether the step updates its state in place.

    Returns:
        The plan, its cost, a bound of all plans, the reasons for its choices, and those that came next.

    Raises:
        CaptureError: the step cannot be captured.
        DeviceError: the cluster does not say what its devices are.
        PlanError: the space is empty, or is none.
        UnknownNameError: no cluster, space or input has the name.

    Example:
        >>> found = jscaler.search(train_step, state, batch, target="4xH100-80GB", space="zero", confirm=False)
        >>> found.chosen.text, found.bound <= found.cost.seconds.total, found.complete
        ('zero1', True, True)
    """
    spaces, (limit, most) = as_spaces(space), limits_checked(seconds, memory)
    graph = _graph(step, args)
    cluster = cluster_at_hand(jax.devices(), jax.device_count()) if target is None else find_target(target)
    with shown_progress() as told:
        return search_graph(
            graph, cluster, spaces, seconds=limit, memory=most, batch=batch, donated=donated, told=told,
            compiled_peak=asked_of_xla(cluster, confirm),
        )  # fmt: skip


def _graph(step: Any, args: tuple[Any, ...]) -> Graph:
    if not args:
        if callable(step) and not hasattr(step, "plan"):
            raise CaptureError("search takes a train step with its arguments behind it: jscaler.search(step, state, batch)")
        return graph_of("search", step)
    capture: Callable[..., Graph] | None = getattr(step, "graph", None)
    if callable(capture):
        return capture(*args)
    if not callable(step):
        raise CaptureError(f"search takes a train step and its arguments, or its graph, not {shown(step)}")
    arguments = Arguments.of(step, None, None, None, None)
    return capture_call(step, arguments, arguments.bind(args, {}))[0].graph


__all__ = ["Found", "search"]
