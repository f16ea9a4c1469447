"""``SpanningLoop``: a loop whose body lies on several device groups; ``Transfer``: a value that crosses between groups."""

from collections.abc import Mapping
from dataclasses import dataclass

from jscaler.ir import Loop, PTensor
from jscaler.lower.level import BlockKey, Level
from jscaler.materialize.crossing import Crossing


@dataclass(frozen=True)
class Transfer:
    """A value that crosses from group to group.

    Attributes:
        source, target: the numbers of the value that leaves, and of the one that arrives.
        block: the block behind which it crosses; of level ``FRONT``, before all of its phase.
        crossing: its ends are how the value leaves and arrives; what is done inside of the groups, blocks do.
    """

    tensor: PTensor
    source: int
    target: int
    crossing: Crossing
    block: BlockKey

    @property
    def phase(self) -> int:
        return self.block.phase

    @property
    def level(self) -> Level:
        return self.block.level


@dataclass(frozen=True)
class CarriedValue:
    """The numbers of a carry's values: in front of the loop, taken and left by an iteration, and behind the last."""

    init: int
    inside: int
    out: int
    final: int
    is_sum: bool


@dataclass(frozen=True)
class StackedValue:
    """The numbers of what iterations leave, and of the stack of all of these."""

    piece: int
    stack: int


@dataclass(frozen=True)
class SpanningLoop:
    """A loop whose body lies on several groups.

    Attributes:
        phases: those of its body, one for each turn of an iteration.
        indices: the numbers of the values that are the micro-batch's number, on each group that reads it, and whose turn
            it is.
    """

    loop: Loop
    phases: range
    carries: tuple[CarriedValue, ...]
    stacks: tuple[StackedValue, ...]
    indices: Mapping[int, int]

    def microbatch(self, phase: int, iteration: int) -> int:
        """The number of the micro-batch that an iteration's ``phase`` is for."""
        return iteration * len(self.phases) + phase - self.phases.start
