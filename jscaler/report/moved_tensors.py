"""What is moved in front of each op: tensors on their way from one layout to another, and the bytes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.clusters.transition_kinds import sends
from jscaler.estimate.traffic import Moved, moved_by_reader, summed
from jscaler.lower.program import Adapt, Extend
from jscaler.lower.segment import Segment
from jscaler.text.units import readable_bytes


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
    return {path: [_move(*one) for one in moved] for path, moved in moved_by_reader(segments).items()}


def all_moved(segments: Sequence[Segment]) -> Moved:
    """All collectives of a step."""
    return summed(_moved(*one) for moved in moved_by_reader(segments).values() for one in moved)


def _move(adapt: Adapt | Extend, itemsize: int, times: int) -> MovedTensor:
    moved = _moved(adapt, itemsize, times)
    if isinstance(adapt, Extend):
        return MovedTensor(adapt.tensor.name, f"{adapt.layout.counts} and the rows around each part", moved)
    return MovedTensor(adapt.tensor.name, f"{adapt.adapter.source.counts} → {adapt.adapter.target.counts}", moved)


def _moved(adapt: Adapt | Extend, itemsize: int, times: int) -> Moved:
    return summed({kind: (times, times * nbytes)} for kind, nbytes in adapt.sent(itemsize) if sends(kind))


def moved_text(moved: Moved) -> str:
    """``2× all_reduce 3.0 KiB``."""
    return ", ".join(f"{count}× {kind} {readable_bytes(nbytes)}" for kind, (count, nbytes) in moved.items())
