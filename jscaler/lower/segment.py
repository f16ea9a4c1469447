"""``Segment``: what one device group runs, as it is compiled: one executable."""

from dataclasses import dataclass

from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.program import Program


@dataclass(frozen=True)
class Segment:
    """A group's program, with slots and without."""

    program: Program
    flat: FlatProgram
