"""``jscaler.cost``: seconds, bytes per link and memory per device of a plan, without XLA."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jscaler import plans
from jscaler.clusters import Cluster, find_cluster
from jscaler.collector import no_full_collections
from jscaler.errors import PlanError, check_flag, shown
from jscaler.estimate.cost import Cost, DeviceShare, OpCost
from jscaler.estimate.timed_step import timed_step
from jscaler.estimate.traffic import RESULTS, Traffic, sum_of, traffic_by_reader, traffic_of_hop
from jscaler.estimate.waiting import devices_alike
from jscaler.estimate.works import works_of
from jscaler.ir import Graph
from jscaler.lower.instructions import Send
from jscaler.lower.segment import PlacedBlock, Segment
from jscaler.lower.step_plan import StepPlan, decisions_of
from jscaler.materialize.crossing import hop_price
from jscaler.primitives import Plan
from jscaler.primitives.planner import Planner
from jscaler.stages import Captured, lower, transform
from jscaler.xla_model.flops import flops_of

PER_ELEMENT = 300.0  # FLOPs of products that take as long as one of elementwise arithmetic, which waits for memory


def cost(
    graph: Any,
    plan: Any = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    *,
    devices: int | None = None,
    donated: bool = True,
) -> Cost:
    """What ``plan`` would cost on ``cluster``: nothing is compiled, nothing runs, and no device need be at hand.

    Bodies and placements that were asked about before are not worked out again: after a change of one op's placement,
    that op and its neighbours' adapters are new. Inside a policy ``jscaler.cost(graph, None, cluster)`` is the cost of the
    decisions so far, with what they leave open filled in.

    Args:
        graph: a train step's graph, ``train_step.graph(state, batch)``; what a policy gets; or a finished step: lowered,
            compiled, or its ``.plan``.
        plan: a policy, a built-in plan's name, a `Plan`, or another step's ``.plan``. Of a finished step it is left out,
            ``jscaler.cost(lowered, cluster)``, and inside a policy it may be.
        cluster: a `Cluster`, a name (``"h100"``, ``"4x8xV100-32GB"``) or a .toml file. Adapters are chosen for its links,
            as ``parallelize(plan, cluster=...)`` does; a finished step has its own.
        devices: how many, where ``plan`` does not say; all of the cluster's by default.
        donated: whether the step updates its state in place (``donate_argnames``).

    Raises:
        PlanError: no plan or no cluster is given, or a plan for a finished step; or what `parallelize` would raise for it.
        DeviceError: the plan is for another number of devices.
        UnknownNameError: no cluster or plan has the name.

    Example:
        >>> found = jscaler.cost(train_step.graph(state, batch), "data_parallel", "8xH100-80GB")
        >>> found.seconds.total < 1e-3, found.sent.between, found.memory.peak < 1e8  # seconds, bytes, bytes
        (True, 0.0, True)
    """
    plan, cluster = plan_and_cluster(graph, plan, cluster)
    if cluster is None:
        raise PlanError("cost is asked of a cluster: jscaler.cost(graph, plan, cluster), or jscaler.cost(lowered, cluster)")
    on = cluster if isinstance(cluster, Cluster) else find_cluster(cluster)
    check_flag("cost: donated", donated)
    step = planned(graph, plan, on, devices)
    by_op: dict[str, OpCost] = {}
    blocks: list[_BlockCost] = []
    for costs, own in _by_segment(step, on):
        for path, one in costs.items():
            by_op[path] = by_op[path].plus(one) if path in by_op else one
        blocks += own
    elapsed = None
    if len(step.blocks) > 1 and on.device is not None:
        runs, _ = timed_step(step, _seconds(step, blocks), hop_seconds(step, on))
        elapsed = max(one.end for one in runs)
    return Cost(step.name, on, step, by_op, _shares(step, blocks, on), elapsed, donated)


def plan_and_cluster(given: Any, plan: Any, cluster: Any) -> tuple[Any, Any]:
    """What was given behind a graph, or behind a finished step, of which the cluster is the first."""
    if cluster is None and not isinstance(given, Graph | Captured):
        return None, plan
    return plan, cluster


def block_seconds(step: StepPlan, cluster: Cluster) -> list[float]:
    """The seconds of one run of each block, with what is moved within its group, by the peaks of a cluster's devices."""
    return _seconds(step, [one for _, own in _by_segment(step, cluster) for one in own])


def hop_seconds(step: StepPlan, cluster: Cluster) -> list[float]:
    """The seconds of each transfer."""
    ends = [(t.crossing.leave.target, t.crossing.arrive.source, t.tensor.itemsize) for t in step.transfers]
    return [hop_price(*end, cluster) for end in ends]


def _by_segment(step: StepPlan, on: Cluster) -> Iterator[tuple[dict[str, OpCost], list["_BlockCost"]]]:
    for segment in step.segments:
        moved = traffic_by_reader([segment], on)
        costs = _by_op(step, segment, moved, on)
        yield costs, list(_of_blocks(segment, costs, moved.get(RESULTS, Traffic())))


@no_full_collections()
def planned(graph: Any, plan: Any, cluster: Cluster, devices: int | None = None) -> StepPlan:
    """The step completed, from wherever it has got to, without StableHLO; raises as `cost`."""
    done = graph if isinstance(graph, StepPlan) else getattr(graph, "plan", None)  # of a Lowered or Compiled
    if isinstance(done, StepPlan):
        if plan is not None:
            raise PlanError(f"the step is planned by '{done.name}' already; give its graph to ask for another plan")
        return done
    if isinstance(graph, Planner):
        captured = Captured.of(graph.source)
        devices = devices or graph.num_devices
        policy = plan if plan is not None else graph.plan("decisions so far")
    elif isinstance(graph, Captured | Graph):
        captured = graph if isinstance(graph, Captured) else Captured.of(graph)
        policy = plan
    else:
        raise PlanError(
            "cost takes a step's graph, train_step.graph(state, batch), or a lowered step, train_step.lower(state, batch), "
            f"not {shown(graph)}"
        )
    if policy is None:
        raise PlanError("a graph costs nothing without a plan: give a policy, a built-in plan's name or a Plan")
    policy = plans.by_name(policy) if isinstance(policy, str) else decisions_of(policy)
    if not callable(policy) and not isinstance(policy, Plan):
        raise PlanError(f"a plan is a policy, a plan's name or a Plan, not {shown(policy)}")
    count = devices or (policy.num_devices if isinstance(policy, Plan) else cluster.num_devices)
    return lower(captured, transform(captured, policy, count, cost=cluster), cluster)


def _by_op(step: StepPlan, segment: Segment, moved: Mapping[str, Traffic], cluster: Cluster) -> dict[str, OpCost]:
    """The ops of one segment."""
    table: dict[str, OpCost] = {}
    none = Traffic()
    for op, times, work in works_of(step, segment):
        sent = moved.get(op.path, none)
        seconds = None if cluster.device is None else times * work.seconds(cluster.device)
        table[op.path] = OpCost(
            op.kind, times * work.flops, times * work.read, times * work.written, seconds, sent,
            times * work.launches,
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class _BlockCost:
    """The ops of one block, and what is moved for results behind them, all its runs of a step together."""

    block: PlacedBlock
    runs: int
    ops: tuple[OpCost, ...]
    results: Traffic

    @property
    def compute(self) -> float | None:
        known = [op.seconds for op in self.ops if op.seconds is not None]
        return math.fsum(known) if len(known) == len(self.ops) else None

    @property
    def sent(self) -> Traffic:
        return sum_of([*(op.moved for op in self.ops), self.results])


def _of_blocks(segment: Segment, costs: Mapping[str, OpCost], results: Traffic) -> Iterator[_BlockCost]:
    """The blocks of a segment. An op that several make is shared by what they compute of it (a layer's backward by I and
    W), and what is moved for it goes to the first."""
    work = [_work_by_op(block) for block in segment.blocks]
    whole = {path: sum(own.get(path, 0.0) for own in work) for path in costs}
    homeless = [cost for path, cost in costs.items() if not whole[path]]
    seen = set[str]()
    for place, (block, own) in enumerate(zip(segment.blocks, work, strict=True)):
        last = place == len(work) - 1
        paths = [path for path in own if whole.get(path)]
        parts = tuple(costs[path].part(own[path] / whole[path], path not in seen) for path in paths)
        seen.update(paths)
        yield _BlockCost(
            block, segment.program.times, (*parts, *(homeless if last else ())), results if last else Traffic()
        )


def _work_by_op(block: PlacedBlock) -> dict[str, float]:
    """How much a block computes of each op, in FLOPs of products."""
    found: dict[str, float] = {}
    for eqn in block.flat.equations:
        path = next((block.flat.origins.op[v] for v in eqn.outvars if v in block.flat.origins.op), None)
        if path is not None:
            count, unit = flops_of(eqn)
            found[path] = found.get(path, 0.0) + count * (PER_ELEMENT if unit == "vector" else 1.0)
    return found


def _shares(step: StepPlan, blocks: Sequence[_BlockCost], cluster: Cluster) -> tuple[DeviceShare, ...]:
    """What the devices do, those that are of the same groups together."""
    sends = Counter(one.transfer for one in step.instructions.steps if isinstance(one, Send))
    hops = {number: traffic_of_hop(step.transfers[number], times, cluster) for number, times in sends.items()}
    found = []
    for devices in devices_alike(step):
        own = [cost for cost in blocks if devices[0] in cost.block.group.devices]
        compute = [one.compute for one in own if one.compute is not None]
        senders = ((step.transfers[number].crossing.source.mesh.devices, sent) for number, sent in hops.items())
        sent = [*(one.sent for one in own), *(sent for group, sent in senders if devices[0] in group)]
        ops = [op for one in own for op in one.ops]
        seconds = math.fsum(compute) if len(compute) == len(own) else None
        moved, launches = sum(op.read + op.written for op in ops), sum(op.launches for op in ops)
        found.append(DeviceShare(devices, sum(op.flops for op in ops), seconds, moved, launches, sum_of(sent)))
    return tuple(found)


def _seconds(step: StepPlan, blocks: Sequence[_BlockCost]) -> list[float]:
    """The seconds of one run of each executable, which may be several blocks."""
    of = {id(one.block): ((one.compute or 0.0) + one.sent.seconds) / one.runs for one in blocks}
    return [sum(of[id(part)] for part, _ in block.parts or ((block, 0),)) for block in step.blocks]
