"""How long a step on several device groups takes: its instructions, with the seconds of each block and of each hop.

Groups run their blocks in the order of the instructions, each when its group is free and what it reads is there; hops run
beside blocks, those between two groups one after another. What is left of the time, groups wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.lower.instructions import Run, Send, Slot
from jscaler.lower.step_plan import StepPlan


@dataclass(frozen=True)
class TimedRun:
    """A run of a block, and when it begins and ends."""

    run: Run
    begin: float
    end: float


def timed_runs(step: StepPlan, blocks: Sequence[float], hops: Sequence[float]) -> list[TimedRun]:
    """All runs of blocks, in the order of the instructions.

    Args:
        blocks: the seconds of one run of each block.
        hops: the seconds of each transfer.
    """
    free: dict[int, float] = {}  # when a device has done what it was given
    links: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    ready: dict[Slot, float] = {}
    found = []
    for one in step.instructions.steps:
        if isinstance(one, Run):
            devices = step.blocks[one.block].group.devices
            begin = max([ready.get(slot, 0.0) for slot in one.reads] + [free.get(d, 0.0) for d in devices])
            end = begin + blocks[one.block]
            free.update(dict.fromkeys(devices, end))
            ready.update(dict.fromkeys(one.writes, end))
            found.append(TimedRun(one, begin, end))
        elif isinstance(one, Send):
            crossing = step.transfers[one.transfer].crossing
            ends = crossing.source.mesh.devices, crossing.target.mesh.devices
            links[ends] = max(ready.get(one.source, 0.0), links.get(ends, 0.0)) + hops[one.transfer]
            ready[one.target] = links[ends]
        else:
            ready[one.target] = max(ready.get(slot, 0.0) for slot in one.pieces)
    return found


def elapsed(step: StepPlan, blocks: Sequence[float], hops: Sequence[float]) -> float:
    """Seconds from the first block to the last; as `timed_runs`."""
    return max((one.end for one in timed_runs(step, blocks, hops)), default=0.0)
