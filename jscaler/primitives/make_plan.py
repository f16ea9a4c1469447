"""A plan from a policy: the policy runs once on a `Planner`, which takes its decisions down."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jscaler.capture.bodies import BodyTable
from jscaler.capture.fuse import fuse
from jscaler.capture.loop_ranges import with_ranges
from jscaler.ir import Graph
from jscaler.primitives.plan import Decision, Fuse, LoopRanges, Plan, Store
from jscaler.primitives.planner import Planner


def restructured(graph: Graph, decisions: Iterable[Decision], bodies: BodyTable) -> Graph:
    """``graph`` with the ops fused that ``decisions`` fuse, and the loops in the ranges that they say."""
    for decision in decisions:
        if isinstance(decision, Fuse):
            graph = fuse(graph, decision.ops, decision.path, bodies)
        elif isinstance(decision, LoopRanges):
            graph = with_ranges(graph, decision.loop, decision.sizes, bodies)
    return graph


def make_plan(
    policy: Callable[..., Any],
    graph: Graph,
    num_devices: int,
    bodies: BodyTable | None = None,
    stores: Sequence[Store] = (),
    device: Any = None,
) -> Plan:
    """Run ``policy`` on ``graph`` and ``num_devices`` logical devices; ``stores`` are decided before.

    ``bodies`` interns the bodies of fused ops; ``device`` is the kind of the devices, where that is known.
    """
    planner = Planner(graph, num_devices, bodies, stores, device)
    policy(planner, np.arange(num_devices))
    return planner.plan(getattr(policy, "name", getattr(policy, "__name__", "policy")))
