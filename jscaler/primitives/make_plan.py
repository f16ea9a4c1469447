"""A plan from a policy: the policy runs once on a `Planner`, which takes its decisions down."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError, shown
from jscaler.ir import Graph
from jscaler.ir.overview import clipped
from jscaler.primitives.plan import Decision, Plan, Schedule, Trans
from jscaler.primitives.planner import Planner


def make_plan(
    policy: Callable[..., Any],
    graph: Graph,
    num_devices: int,
    bodies: BodyTable | None = None,
    stores: Sequence[Decision] = (),
    cluster: Any = None,
    price: Callable[..., tuple[float, float]] | None = None,
) -> Plan:
    """Run ``policy`` on ``graph`` and ``num_devices`` logical devices; ``stores`` are decided before.

    ``bodies`` interns the bodies of fused ops; ``cluster`` has the devices, where that is known, and
    ``price`` says what another policy for the same takes: bytes beyond the memory of devices, and seconds.

    Raises:
        PlanError: the policy takes other arguments than the graph and the devices; it has a schedule, and nothing in time;
            and what its decisions raise.
    """
    _check_policy(policy)
    planner = Planner(graph, num_devices, bodies, stores, cluster, price)
    made = policy(planner, np.arange(num_devices))
    planner.over = True
    name = getattr(policy, "__name__", "policy")
    if callable(made):
        raise PlanError(f"'{name}' has decided nothing and returned a policy: it makes one, so call it first: {name}(…)")
    plan = planner.plan(getattr(policy, "name", name))
    if made is not None and len(plan.decisions) == len(stores):
        raise PlanError(
            f"'{name}' has decided nothing and returned {shown(made)}: a policy calls graph.op_trans and graph.op_assign, "
            "and what it returns is not read"
        )
    _check_schedule(plan)
    return plan


def _check_schedule(plan: Plan) -> None:
    """Raises PlanError for a schedule of no micro-batches; a policy may name it before it cuts the batch."""
    said = next((d for d in reversed(plan.decisions) if isinstance(d, Schedule)), None)
    in_time = any(axis.time for d in plan.decisions if isinstance(d, Trans) for axis in d.axes)
    if said is not None and not in_time:
        raise PlanError(
            f"{clipped(said.table)!r} is the order of micro-batches on groups of devices, and no op of '{plan.name}' runs "
            "in several: cut the batch in time (plans.accumulate(4, policy), or graph.op_trans(op, TimeSplit('a', 4))), or "
            "leave the schedule out"
        )


def _check_policy(policy: Callable[..., Any]) -> None:
    """Raises PlanError for what cannot be called with a graph and devices."""
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):
        return  # not every callable can say
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(policy, "__name__", type(policy).__name__)
        raise PlanError(
            f"a policy is a function of (graph, devices), and '{name}' takes {signature}: {error}; a built-in plan that "
            "takes arguments is called first, as in plans.accumulate(4)"
        ) from None
