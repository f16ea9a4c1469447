"""``jscaler.cost``: seconds, bytes per link and memory per device of a plan, without XLA."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from jscaler import plans
from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import PlanError
from jscaler.estimate.cost import Cost, OpCost
from jscaler.estimate.traffic import Traffic, sum_of, traffic_by_reader
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.program import Compute, walk
from jscaler.lower.segment import only
from jscaler.lower.step_plan import StepPlan
from jscaler.primitives import Plan
from jscaler.primitives.planner import Planner
from jscaler.stages import Captured, lower, transform
from jscaler.xla_model.work import Work, work_of


def cost(
    graph: Any,
    plan: Plan | Callable[..., Any] | str | None,
    cluster: Cluster | str | os.PathLike[str],
    *,
    devices: int | None = None,
    donated: bool = True,
) -> Cost:
    """What ``plan`` would cost on ``cluster``: nothing is compiled, nothing runs, and no device need be at hand.

    Bodies and placements that were asked about before are not worked out again: after a change of one op's placement,
    that op and its neighbours' adapters are new. Inside a policy ``jscaler.cost(graph, None, cluster)`` is the cost of the
    decisions so far, with what they leave open filled in.

    Args:
        graph: a train step's graph, ``train_step.graph(state, batch)``; what a policy gets; or a finished step, as
            ``train_step.lower(...)`` or its ``.plan``.
        plan: a policy, a built-in plan's name or a `Plan`. None inside a policy and for a finished step.
        cluster: a `Cluster`, a name (``"h100"``, ``"4x8xV100-32GB"``) or a .toml file. Adapters are chosen for its links,
            as ``parallelize(plan, cluster=...)`` does; a finished step has its own.
        devices: how many, where ``plan`` does not say; all of the cluster's by default.
        donated: whether the step updates its state in place (``donate_argnames``).

    Raises:
        PlanError: no plan is given, or one for a finished step; or what `parallelize` would raise for it.
        DeviceError: the plan is for another number of devices.
        UnknownNameError: no cluster or plan has the name.

    Example:
        >>> found = jscaler.cost(train_step.graph(state, batch), "data_parallel", "8xH100-80GB")  # doctest: +SKIP
        >>> found.seconds.total, found.sent.between, found.memory.peak  # doctest: +SKIP
    """
    on = cluster if isinstance(cluster, Cluster) else find_cluster(os.fspath(cluster))
    step = _step(graph, plan, on, devices)
    only(step.segments, "the estimate of seconds")
    moved = traffic_by_reader(step.segments, on)
    return Cost(step.name, on, step, _by_op(step, moved, on), sum_of(moved.values()), donated)


def _step(graph: Any, plan: Any, cluster: Cluster, devices: int | None) -> StepPlan:
    """The step completed, from wherever it has got to."""
    done = graph if isinstance(graph, StepPlan) else getattr(graph, "plan", None)  # of a Lowered or Compiled
    if isinstance(done, StepPlan):
        if plan is not None:
            raise PlanError(f"the step is planned by '{done.name}' already; give its graph to ask for another plan")
        return done
    if isinstance(graph, Planner):
        captured = Captured.of(graph.source)
        devices = devices or graph.num_devices
        policy = plan if plan is not None else graph.plan("decisions so far")
    else:
        given: Any = graph
        captured = given if isinstance(given, Captured) else Captured.of(given)
        policy = plan
    if policy is None:
        raise PlanError("a graph costs nothing without a plan: give a policy, a built-in plan's name or a Plan")
    policy = plans.by_name(policy) if isinstance(policy, str) else policy
    count = devices or (policy.num_devices if isinstance(policy, Plan) else cluster.num_devices)
    return lower(captured, transform(captured, policy, count, cost=cluster), cluster)


def _by_op(step: StepPlan, moved: Mapping[str, Traffic], cluster: Cluster) -> dict[str, OpCost]:
    table: dict[str, OpCost] = {}
    none = Traffic()
    every = ((one.flat, task, times) for one in step.segments for task, times in walk(one.program.tasks, one.program.times))
    for flat, task, times in every:
        if not isinstance(task, Compute):
            continue
        work = _work(step, flat, task)
        sent = moved.get(task.op.path, none)
        seconds = None if cluster.device is None else times * work.seconds(cluster.device)
        table[task.op.path] = OpCost(
            task.op.kind, times * work.flops, times * work.read, times * work.written, seconds, sent.total, sent.seconds,
            times * work.launches,
        )  # fmt: skip
    return table


def _work(step: StepPlan, flat: FlatProgram, task: Compute) -> Work:
    """Worked out once for all ops of one body, one placement, and one share of what others have done before."""
    book: Any = step.graph.rules
    done = flat.origins.done[task.op.path]
    key = ("work", task.jaxpr, done)
    if key not in book.memo:
        book.memo[key] = work_of(task.jaxpr, done)
    return book.memo[key]
