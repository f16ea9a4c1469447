"""``jscaler.cost``: seconds, bytes per link and memory per device of a plan, without XLA."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jscaler import plans
from jscaler.clusters import Cluster, find_cluster
from jscaler.collector import no_full_collections
from jscaler.errors import DeviceError, JscalerError, PlanError, check_flag, shown
from jscaler.estimate.block_costs import BlockCost, block_costs, hop_seconds
from jscaler.estimate.cost import Cost, DeviceShare, OpCost, Profiled
from jscaler.estimate.profile import Profile, load_profile
from jscaler.estimate.searched_order import with_searched_schedule
from jscaler.estimate.timed_step import timed_step
from jscaler.estimate.traffic import Traffic, sum_of, traffic_by_reader, traffic_of_hop
from jscaler.estimate.waiting import devices_alike
from jscaler.estimate.works import computed
from jscaler.ir import Graph
from jscaler.lower.instructions import Send
from jscaler.lower.step_plan import StepPlan, decisions_of
from jscaler.primitives import Plan
from jscaler.primitives.planner import Planner
from jscaler.stages import Captured, lower, transform
from jscaler.xla_model.work import KernelWork, Work


@no_full_collections()
def cost(
    graph: Any,
    plan: Any = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    *,
    devices: int | None = None,
    donated: bool = True,
    profile: Profile | str | os.PathLike[str] | None = None,
) -> Cost:
    """What ``plan`` would cost on ``cluster``: nothing is compiled, nothing runs, and no device need be at hand.

    Seconds are those of the kernels that XLA is expected to make, by what is reached of the cluster's devices and links;
    ``bound`` are those at their peaks. Placements that were asked about before are not worked out again. Inside a policy
    ``jscaler.cost(graph, None, cluster)`` is the cost of the decisions so far, with what they leave open filled in.

    Args:
        graph: a train step's graph, ``train_step.graph(state, batch)``; what a policy gets; or a finished step: lowered,
            compiled, or its ``.plan``.
        plan: a policy, a built-in plan's name, a `Plan`, or another step's ``.plan``. Of a finished step it is left out,
            ``jscaler.cost(lowered, cluster)``, and inside a policy it may be.
        cluster: a `Cluster`, a name (``"h100"``, ``"4x8xV100-32GB"``) or a .toml file. Adapters are chosen for its links,
            as ``parallelize(plan, cluster=...)`` does; a finished step has its own.
        devices: how many, where ``plan`` does not say; all of the cluster's by default.
        donated: whether the step updates its state in place (``donate_argnames``).
        profile: seconds that were measured (``jscaler profile``), or the file that has them: they stand in place of the
            model's. What it does not have, the model prices; ``profiled`` counts both.

    Raises:
        PlanError: no plan or no cluster is given, or a plan for a finished step; or what `parallelize` would raise for it.
        DeviceError: the plan is for another number of devices; the profile cannot be read, or the cluster does not say
            what its devices are.
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
    known = None if profile is None else profile if isinstance(profile, Profile) else load_profile(Path(profile))
    if known is not None and on.device is None:
        raise DeviceError(f"a profile is of a kind of device, and cluster '{on.name}' does not say what its devices are")
    step = planned(graph, plan, on, devices)
    blocks = block_costs(step, on, known)
    elapsed, bound = _elapsed(step, blocks, on)
    profiled = None if known is None else _profiled(blocks)
    by_op, shares = _by_op(step, blocks, on), _shares(step, blocks, on)
    return Cost(step.name, on, step, by_op, shares, elapsed, bound, donated, profiled, tuple(blocks))


def plan_and_cluster(given: Any, plan: Any, cluster: Any) -> tuple[Any, Any]:
    """What was given behind a graph, or behind a finished step, of which the cluster is the first."""
    if cluster is None and not isinstance(given, Graph | Captured):
        return None, plan
    return plan, cluster


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
    made = with_searched_schedule(
        captured, transform(captured, policy, count, cost=cluster, price=price_of(captured, count, cluster)), cluster
    )
    return lower(captured, made, cluster)


def price_of(captured: Captured, devices: int, cluster: Any) -> Callable[[Any], tuple[float, float]] | None:
    """What policies for ``captured`` take on a cluster: bytes beyond the memory of its devices, and seconds.

    None where the cluster does not say what its devices are.
    """
    if not isinstance(cluster, Cluster) or cluster.device is None:
        return None

    def price(policy: Any) -> tuple[float, float]:
        try:
            found = cost(lower(captured, transform(captured, policy, devices, cost=cluster), cluster), None, cluster)
        except JscalerError:
            return math.inf, math.inf
        beyond = sum(max(0, -one.memory.headroom) for one in found.by_devices if one.memory.capacity)
        return float(beyond), found.seconds.total or 0.0

    return price


def _profiled(blocks: Sequence[BlockCost]) -> Profiled:
    every = [one.priced for one in blocks]
    by_model = sum(one.runs * one.priced.by_model for one in blocks)
    total = sum(one.runs * one.priced.total for one in blocks)
    pieces, ops, modelled = (sum(getattr(one, name) for one in every) for name in ("pieces", "ops", "modelled"))
    return Profiled(pieces, ops, modelled, by_model / total if total else 0.0)


def _elapsed(step: StepPlan, blocks: Sequence[BlockCost], cluster: Cluster) -> tuple[float | None, float | None]:
    """Seconds of a step on several groups, and of any step at the peaks of devices and links; None where nobody knows."""
    if cluster.device is None:
        return None, None
    bound = cluster.at_peaks()
    at_peaks = [one.on(bound) for one in blocks]
    if len(blocks) == 1:
        return None, at_peaks[0].seconds
    found = []
    for own, on in ((blocks, cluster), (at_peaks, bound)):
        runs, _ = timed_step(step, [one.seconds for one in own], hop_seconds(step, on), on=on)
        found.append(max(one.end for one in runs))
    return found[0], found[1]


def _by_op(step: StepPlan, blocks: Sequence[BlockCost], cluster: Cluster) -> dict[str, OpCost]:
    """Each op of the program: its kernels on each device group that runs it, and what is moved in front of it."""
    kernels: dict[str, list[KernelWork]] = {}
    taken: dict[str, float] = {}
    for one in blocks:
        seconds = one.priced.seconds or itertools.repeat(0.0)
        for kernel, each in zip(one.work.kernels, seconds, strict=False):
            times = kernel.times * one.runs
            kernels.setdefault(kernel.op, []).append(replace(kernel, times=times))
            taken[kernel.op] = taken.get(kernel.op, 0.0) + times * each
    moved, none = traffic_by_reader(step.segments, cluster), Traffic()
    table: dict[str, OpCost] = {}
    for op in dict.fromkeys(task.op for _, task, _ in computed(step)):
        work = Work(tuple(kernels.pop(op.path, ())))
        seconds = None if cluster.device is None else taken.get(op.path, 0.0)
        sent = moved.get(op.path, none)
        table[op.path] = OpCost(op.kind, work.flops, work.read, work.written, seconds, sent, work.launches)
    assert not kernels or kernels.keys() == {""}, f"kernels of no op: {', '.join(kernels)}"
    return table


def _shares(step: StepPlan, blocks: Sequence[BlockCost], cluster: Cluster) -> tuple[DeviceShare, ...]:
    """What the devices do, those that are of the same groups together."""
    sends = Counter(one.transfer for one in step.instructions.steps if isinstance(one, Send))
    hops = {number: traffic_of_hop(step.transfers[number], times, cluster) for number, times in sends.items()}
    found = []
    for devices in devices_alike(step):
        own = [one for one in blocks if devices[0] in one.block.group.devices]
        senders = ((step.transfers[number].crossing.source.mesh.devices, sent) for number, sent in hops.items())
        sent = [*(one.sent.repeated(one.runs) for one in own), *(sent for group, sent in senders if devices[0] in group)]
        seconds = None if cluster.device is None else math.fsum(one.runs * one.priced.total for one in own)
        flops, moved, launches = (
            sum(one.runs * of(one.work) for one in own)
            for of in (lambda work: work.flops, lambda work: work.read + work.written, lambda work: work.launches)
        )
        hidden = math.fsum(one.runs * one.hidden for one in own)
        found.append(DeviceShare(devices, flops, seconds, moved, launches, sum_of(sent), hidden))
    return tuple(found)
