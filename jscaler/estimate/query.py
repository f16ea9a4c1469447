"""``jscaler.cost``: seconds, bytes per link and memory per device of a plan, without XLA."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from jscaler import plans
from jscaler.cost import Cluster, find_cluster
from jscaler.errors import PlanError
from jscaler.estimate.memory import Memory, MemoryEstimate, estimated_memory
from jscaler.estimate.traffic import Traffic, sum_of, traffic_by_reader
from jscaler.estimate.work import Work, work_of
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.program import Compute, walk
from jscaler.primitives import Plan
from jscaler.primitives.planner import Planner
from jscaler.stages import Captured, StepPlan, lower, transform


@dataclass(frozen=True)
class OpCost:
    """One op on each device, all iterations of its loops together.

    Attributes:
        kind: ``forward``, ``backward`` or ``update``.
        flops: of its products (dots, convolutions).
        read, written: bytes of the device's memory, elementwise work fused.
        seconds: of computing; None where the cluster does not say what its devices are.
        sent: what is moved in front of it: bytes that each device sends.
        sending: seconds of that.
        launches: kernels.
    """

    kind: str
    flops: float
    read: int
    written: int
    seconds: float | None
    sent: float = 0.0
    sending: float = 0.0
    launches: int = 0


@dataclass(frozen=True)
class Seconds:
    """A step by the peaks of its devices and links: no step is faster, and communication hides behind nothing.

    Attributes:
        compute: every kernel at the device's peak; None where the cluster does not say what its devices are.
        communication: every collective, one after the other.
    """

    compute: float | None
    communication: float

    @property
    def total(self) -> float | None:
        return None if self.compute is None else self.compute + self.communication


@dataclass(frozen=True)
class Cost:
    """What a plan costs on a cluster.

    Attributes:
        plan: the plan's name.
        cluster: whose links and devices the figures are of.
        step: the completed plan and its program.
        by_op: path -> cost of one op, in the order of the program. Ops that the plan re-opened stand as their pieces.
        sent: bytes per class of links.
    """

    plan: str
    cluster: Cluster
    step: StepPlan
    by_op: Mapping[str, OpCost]
    sent: Traffic
    donated: bool = True

    @property
    def num_devices(self) -> int:
        return self.step.plan.num_devices

    @property
    def flops(self) -> float:
        """Of all products, on each device."""
        return sum(op.flops for op in self.by_op.values())

    @property
    def launches(self) -> int:
        """Kernels and collectives of each device."""
        kernels = sum(op.launches for op in self.by_op.values())
        return kernels + sum(count for count, _ in self.sent.kinds.values())

    @cached_property
    def seconds(self) -> Seconds:
        known = [op.seconds for op in self.by_op.values() if op.seconds is not None]
        return Seconds(math.fsum(known) if len(known) == len(self.by_op) else None, self.sent.seconds)

    @cached_property
    def held(self) -> MemoryEstimate:
        """What a device holds, and when. Worked out when it is asked for: its lifetimes are those of the whole program."""
        return estimated_memory(self.step.graph, self.step.segments, self.donated, self.cluster.memory)

    @property
    def memory(self) -> Memory:
        return self.held.memory

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into a device's memory; None where the cluster does not say how much it has."""
        return self.memory.fits

    def as_json(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts; the timeline left out."""
        memory = {**self.memory.as_json(), "live": [asdict(tensor) for tensor in self.held.live]}
        seconds = {**asdict(self.seconds), "total": self.seconds.total}
        return {
            "plan": self.plan, "devices": self.num_devices, "cluster": self.cluster.name, "seconds": seconds,
            "flops": self.flops, "launches": self.launches, "sent": asdict(self.sent), "memory": memory, "fits": self.fits,
            "by_op": {path: asdict(op) for path, op in self.by_op.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        from jscaler.report.cost_text import cost_text  # report stands right of this package

        return cost_text(self)


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
    return lower(captured, transform(captured, policy, count), cluster)


def _by_op(step: StepPlan, moved: Mapping[str, Traffic], cluster: Cluster) -> dict[str, OpCost]:
    table: dict[str, OpCost] = {}
    none = Traffic()
    every = ((one.flat, task, times) for one in step.segments for task, times in walk(one.program.tasks))
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
