"""When the blocks of a step on several device groups run, by its instructions and the seconds of each block and of each
hop.

Groups run their blocks in the order of the instructions, each when its devices are free and what it reads is there. Sends
between two groups follow one another, beside the blocks of both, which they slow down by the devices' interference; or, as
a *rendezvous*, they take both ends' time.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

from jscaler.clusters import Cluster
from jscaler.errors import PlanError, shown
from jscaler.lower.instructions import Run, Send, Slot
from jscaler.lower.step_plan import StepPlan
from jscaler.tables.tasks import Task, times_of
from jscaler.tables.timeline import Devices, TimedRun, TimedSend

Sends = Literal["asynchronous", "rendezvous"]


def check_sends(sends: Any) -> None:
    """Raises PlanError where ``sends`` are of no kind that there is."""
    if sends not in get_args(Sends):
        raise PlanError(f"sends are {' or '.join(map(repr, get_args(Sends)))}, not {shown(sends)}")


def timed_step(
    step: StepPlan,
    blocks: Sequence[float],
    hops: Sequence[float],
    sends: Sends = "asynchronous",
    on: Cluster | None = None,
) -> tuple[list[TimedRun], list[TimedSend]]:
    """All runs of blocks, and all sends, in the order of the instructions.

    Args:
        blocks: the seconds of one run of each block.
        hops: the seconds of each transfer.
        on: whose devices say how many times as long a block takes while something is sent from or to them; by default once.
    """
    tasks, here = step_tasks(step, blocks, hops, sends), step.instructions.steps or (Run(0, (), ()),)
    runs = (step.blocks[one.block].group.devices if isinstance(one, Run) else () for one in here)
    beside = 1.0 if on is None else [on.of(own).interference if own else 1.0 for own in runs]
    return with_times(step, tasks, times_of(tasks, beside))


def step_tasks(step: StepPlan, blocks: Sequence[float], hops: Sequence[float], sends: Sends = "asynchronous") -> list[Task]:
    """A task for each instruction of a step on several groups; of a step on one, for its block."""
    tasks: list[Task] = []
    maker: dict[Slot, int] = {}
    for one in step.instructions.steps or (Run(0, (), ()),):
        places: tuple[Hashable, ...] = ()
        slows: tuple[Hashable, ...] = ()
        if isinstance(one, Run):
            reads, writes, places, taken = one.reads, one.writes, step.blocks[one.block].group.devices, blocks[one.block]
        elif isinstance(one, Send):
            source, target = _ends(step, one)
            reads, writes, taken = (one.source,), (one.target,), hops[one.transfer]
            places, slows = ((source, target),), (*source, *target)
            if sends == "rendezvous":
                places, slows = (*places, *slows), ()
        else:
            reads, writes, taken = one.pieces, (one.target,), 0.0
        tasks.append(Task(places, taken, tuple({maker[slot] for slot in reads if slot in maker}), slows))
        maker.update(dict.fromkeys(writes, len(tasks) - 1))
    return tasks


def with_times(
    step: StepPlan, tasks: Sequence[Task], times: Sequence[tuple[float, float]]
) -> tuple[list[TimedRun], list[TimedSend]]:
    """The runs of blocks, and the sends, of instructions that begin and end at ``times``."""
    steps = step.instructions.steps or (Run(0, (), ()),)
    runs: list[TimedRun] = []
    sent: list[TimedSend] = []
    free: dict[int, float] = {}
    for one, task, (begin, end) in zip(steps, tasks, times, strict=True):
        if isinstance(one, Run):
            devices = step.blocks[one.block].group.devices
            makers = [m for n in task.waits for m in (tasks[n].waits if isinstance(steps[n], Send) else (n,))]
            others = [times[m][1] for m in makers]
            ready = max([*others, *(free.get(d, 0.0) for d in devices)], default=0.0)
            cells = tuple(step.instructions.cells(one))
            runs.append(TimedRun(devices, step.block_name(one.block), cells, begin, end, max(begin - ready, 0.0)))
            free.update(dict.fromkeys(devices, end))
        elif isinstance(one, Send):
            transfer = step.transfers[one.transfer]
            nbytes = transfer.crossing.sent * transfer.tensor.itemsize
            sent.append(TimedSend(*_ends(step, one), transfer.tensor.name, one.microbatch, begin, end, nbytes))
    return runs, sent


def _ends(step: StepPlan, send: Send) -> tuple[Devices, Devices]:
    crossing = step.transfers[send.transfer].crossing
    return crossing.source.mesh.devices, crossing.target.mesh.devices
