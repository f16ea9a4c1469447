"""``jscaler.simulate``: a step on several device groups in time, without running or compiling anything."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import PlanError, UnknownNameError, check_flag, shown
from jscaler.estimate.block_costs import block_seconds, hop_seconds
from jscaler.estimate.memory import memory_over_time
from jscaler.estimate.query import plan_and_cluster, planned
from jscaler.estimate.timed_step import Sends, check_sends, timed_step
from jscaler.lower.step_plan import StepPlan, step_of
from jscaler.tables.timeline import Timeline


def simulate(
    lowered: Any,
    plan: Any = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    *,
    seconds: Mapping[str, float] | Sequence[float] | None = None,
    hops: Sequence[float] | None = None,
    sends: Sends = "asynchronous",
    donated: bool = True,
) -> Timeline:
    """When each block of a step would run, what waits, and what each device holds.

    Args:
        lowered: a step that is lowered, ``train_step.lower(...)``, or compiled, or its ``.plan``; or, with a plan, a graph.
        plan: as `jscaler.cost` takes it: of a finished step it is left out, ``jscaler.simulate(lowered, cluster)``.
        cluster: whose devices and links the seconds are of: a `Cluster`, a name (``"4x8xH100-80GB"``) or a .toml file.
            Sends slow down the blocks beside them by the interference of its devices; without a cluster by nothing.
        seconds: of one run of each block instead, as measured (``compiled.measure(…).blocks``): by number, or by name
            (``{"0F": 0.01, "0B": 0.02, …}``; others take none).
        hops: seconds of each of the step's transfers; by default by the cluster's links, or none.
        sends: whether they run beside blocks, or (``"rendezvous"``) take the time of both ends.
        donated: whether the step updates its state in place (``donate_argnames``).

    Raises:
        PlanError: neither a cluster nor seconds are given; the cluster does not say what its devices are; the step is not
            lowered, or there are not as many seconds as blocks or transfers; or some are less than 0, or no number.
        UnknownNameError: no block is called so.

    Example:
        >>> found = jscaler.simulate(lowered, "4xH100-80GB")
        >>> found.makespan < 1e-3, found.bubble, found.exposed, found.peak(0) > 0  # seconds, share, seconds, bytes
        (True, 0.0, 0.0, True)
    """
    check_sends(sends)
    check_flag("simulate: donated", donated)
    plan, cluster = plan_and_cluster(lowered, plan, cluster)
    on = cluster if isinstance(cluster, Cluster) or cluster is None else find_cluster(cluster)
    step = step_of("simulate", lowered) if plan is None or on is None else planned(lowered, plan, on)
    blocks, hops = block_seconds_of(step, on, seconds), hop_seconds_of(step, on, hops)
    runs, sent = timed_step(step, blocks, hops, sends, on)
    alone, _ = timed_step(step, blocks, [0.0] * len(hops))
    exposed = max((one.end for one in runs), default=0.0) - max((one.end for one in alone), default=0.0)
    memory = memory_over_time(step, [(one.begin, one.end) for one in runs], donated)
    capacity = {own: on.of(own).memory if on is not None else 0 for own in memory}
    return Timeline(step.name, tuple(runs), tuple(sent), memory, capacity, exposed)


def block_seconds_of(
    step: StepPlan, on: Cluster | None, seconds: Mapping[str, float] | Sequence[float] | None
) -> list[float]:
    """Seconds of a run of each block: as given, else by the cluster; raises as `simulate`."""
    if seconds is not None:
        return _by_number(step, seconds)
    if on is None or on.device is None:
        raise PlanError(
            f"to say how long '{step.name}' takes, say how fast its devices are: give a cluster that has a device kind "
            "('8xH100-80GB'), or seconds= of each block"
        )
    return block_seconds(step, on)


def hop_seconds_of(step: StepPlan, on: Cluster | None, hops: Sequence[float] | None) -> list[float]:
    """Seconds of each transfer: as given, else by the cluster, or none; raises as `simulate`."""
    if hops is None:
        hops = [0.0] * len(step.transfers) if on is None else hop_seconds(step, on)
    return _as_many("hops", hops, [transfer.tensor.name for transfer in step.transfers], "transfers")


def _by_number(step: StepPlan, seconds: Mapping[str, float] | Sequence[float]) -> list[float]:
    names = [step.block_name(number) for number in range(len(step.blocks))]
    if not isinstance(seconds, Mapping):
        return _as_many("seconds", seconds, names, "blocks")
    for name in seconds:
        if name not in names:
            raise UnknownNameError("block", name, names)
    return _as_many("seconds", [seconds.get(name, 0.0) for name in names], names, "blocks")


def _as_many(argument: str, seconds: Any, names: Sequence[str], what: str) -> list[float]:
    """Seconds of each of ``names``; raises PlanError where they are no numbers, or not as many."""
    given = list(seconds) if isinstance(seconds, Iterable) else None
    if given is None or not all(isinstance(one, Real) for one in given):
        raise PlanError(f"{argument}= has the seconds of each of the step's {len(names)} {what}, not {shown(seconds)}")
    if len(given) != len(names):
        raise PlanError(
            f"{argument}= has {len(given)} entries, and the step has {len(names)} {what}: {', '.join(names) or 'none'}"
        )
    wrong = [one for one in given if not 0 <= one < math.inf]
    if wrong:
        raise PlanError(f"{argument}= are numbers from 0 on, not {shown(wrong[0])}")
    return given
