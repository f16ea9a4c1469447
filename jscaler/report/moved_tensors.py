"""What is moved in front of each op: tensors on their way from one layout to another, and the bytes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jscaler.clusters.transition_kinds import sends
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.program import Adapt, Extend, Program, walk
from jscaler.lower.segment import Segment
from jscaler.text.units import readable_bytes

Moved = Mapping[str, tuple[int, float]]  # kind of collective -> count, bytes that each device sends


@dataclass(frozen=True)
class MovedTensor:
    """What stands in front of an op: a tensor on its way from one layout to another.

    Attributes:
        way: the layouts, in R V D text.
        moved: the collectives, over all iterations of a loop; what stays on its device is left out.
    """

    tensor: str
    way: str
    moved: Moved


def moves_by_reader(segments: Sequence[Segment]) -> dict[str, list[MovedTensor]]:
    """Op path -> what is moved in front of it; "" for the results."""
    table: dict[str, list[MovedTensor]] = {}
    for segment in segments:
        for path, moves in _in_segment(segment.program, segment.flat).items():
            table.setdefault(path, []).extend(moves)
    return table


def _in_segment(program: Program, flat: FlatProgram) -> dict[str, list[MovedTensor]]:
    itemsizes = {t.output: t.tensor.itemsize for t in (*program.adapters, *program.halos)}
    # adapters that moved across a cast carry its narrow side
    itemsizes |= {e.adapt.output: _itemsize(e.input) for e in flat.exchanges}
    kept = {e.adapt.output for e in flat.exchanges}  # equal ones are made once
    table: dict[str, list[MovedTensor]] = {}
    waiting: list[MovedTensor] = []
    for task, times in walk(program.tasks, program.times):
        if isinstance(task, Adapt | Extend):
            waiting += [_move(task, times, itemsizes[task.output])] if task.output in kept else []
        else:
            table.setdefault(task.op.path, []).extend(waiting)
            waiting = []
    table[""] = waiting
    return table


def _move(adapt: Adapt | Extend, times: int, itemsize: int) -> MovedTensor:
    moved: dict[str, tuple[int, float]] = {}
    for kind, nbytes in adapt.sent(itemsize):
        if sends(kind):
            count, sent = moved.get(kind, (0, 0.0))
            moved[kind] = (count + times, sent + times * nbytes)
    if isinstance(adapt, Extend):
        return MovedTensor(adapt.tensor.name, f"{adapt.layout.counts} and the rows around each part", moved)
    return MovedTensor(adapt.tensor.name, f"{adapt.adapter.source.counts} → {adapt.adapter.target.counts}", moved)


def summed(parts: Sequence[Moved]) -> Moved:
    """Counts and bytes of all of ``parts``."""
    total: dict[str, tuple[int, float]] = {}
    for part in parts:
        for kind, (count, sent) in part.items():
            known = total.get(kind, (0, 0.0))
            total[kind] = (known[0] + count, known[1] + sent)
    return total


def moved_text(moved: Moved) -> str:
    """``2× all_reduce 3.0 KiB``."""
    return ", ".join(f"{count}× {kind} {readable_bytes(nbytes)}" for kind, (count, nbytes) in moved.items())


def _itemsize(atom: Any) -> int:
    return atom.aval.dtype.itemsize
