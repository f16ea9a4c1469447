"""``Segment``: what one device group runs between crossings, as it is compiled: one executable."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from jscaler.errors import PlanError
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.program import Program

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """A group's program, with slots and without."""

    program: Program
    flat: FlatProgram


def only(segments: Sequence[T], what: str) -> T:
    """The segment of a step that runs on one device group.

    Raises:
        PlanError: it runs on several; says ``what`` there is of a step on one alone.
    """
    if len(segments) != 1:
        raise PlanError(
            f"the step runs on several device groups, as {len(segments)} executables: {what} is of a step on one; look at "
            "its `segments`, or at `explain()`"
        )
    return segments[0]
