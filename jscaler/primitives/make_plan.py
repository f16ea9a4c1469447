"""A plan from a policy: the policy runs once on a `Planner`, which takes its decisions down."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph
from jscaler.primitives.plan import Decision, Plan
from jscaler.primitives.planner import Planner


def make_plan(
    policy: Callable[..., Any],
    graph: Graph,
    num_devices: int,
    bodies: BodyTable | None = None,
    stores: Sequence[Decision] = (),
    device: Any = None,
) -> Plan:
    """Run ``policy`` on ``graph`` and ``num_devices`` logical devices; ``stores`` are decided before.

    ``bodies`` interns the bodies of fused ops; ``device`` is the kind of the devices, where that is known.
    """
    planner = Planner(graph, num_devices, bodies, stores, device)
    policy(planner, np.arange(num_devices))
    return planner.plan(getattr(policy, "name", getattr(policy, "__name__", "policy")))
