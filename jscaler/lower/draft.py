"""``Draft``: the program of a group in one phase while it is written."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jscaler.ir import Op, PTensor
from jscaler.lower.level import START, Level
from jscaler.lower.program import Program, Slot, Writer
from jscaler.materialize import DeviceMesh, Layout


class ProgramKey(NamedTuple):
    """A program: the number of its phase, and its place (`lower.op_blocks`)."""

    phase: int
    place: int


class Taken(NamedTuple):
    """An argument or a constant that a program takes, or a value of another program, which arrives behind ``level``."""

    tensor: PTensor
    slot: Slot
    layout: Layout
    value: int = -1  # its number; none of an argument
    level: Level = START


class Left(NamedTuple):
    """A value that a program leaves, by the block at ``level``; None for the block that makes it."""

    slot: Slot
    layout: Layout
    level: Level | None


@dataclass
class Draft:
    """A program that is being written.

    Attributes:
        numbers: the numbers of values that are not taken yet.
        given: slots that are not its own: the argument, or the number of the value.
        results: numbers of the step's results that it leaves.
        reused: the number of a value that several programs may be left.
    """

    key: ProgramKey
    group: DeviceMesh
    writer: Writer
    numbers: Iterator[int]
    given: dict[Slot, PTensor | int] = field(default_factory=dict)
    arguments: list[Taken] = field(default_factory=list)
    imports: list[Taken] = field(default_factory=list)
    exports: list[tuple[int, Left]] = field(default_factory=list)
    results: list[tuple[int, Left]] = field(default_factory=list)
    reused: dict[Left, int] = field(default_factory=dict)
    last_level: Level = START
    pinned: dict[str, Level] = field(default_factory=dict)

    def take(self, tensor: PTensor, layout: Layout) -> None:
        """Take an argument of the step, or a constant."""
        slot = self._defined(tensor, layout)
        self.arguments.append(Taken(tensor, slot, layout))
        self.given[slot] = tensor

    def import_value(self, tensor: PTensor, layout: Layout, value: int, level: Level = START) -> None:
        """Take value number ``value`` of another program."""
        slot = self._defined(tensor, layout)
        self.imports.append(Taken(tensor, slot, layout, value, level))
        self.given[slot] = value

    def _defined(self, tensor: PTensor, layout: Layout) -> Slot:
        inside, self.writer.tasks = self.writer.tasks, self.writer.outermost
        slot = self.writer.define(tensor, layout)
        self.writer.tasks = inside
        return slot

    def leave(self, tensor: PTensor, layout: Layout, level: Level | None) -> int:
        """The number of ``tensor`` in ``layout``, which it leaves behind ``level``: one for all that read it."""
        left = Left(self.writer.read(tensor, layout), layout, level)
        if left not in self.reused:
            self.reused[left] = self.leave_alone(tensor, layout, level)
        return self.reused[left]

    def leave_alone(self, tensor: PTensor, layout: Layout, level: Level | None, value: int | None = None) -> int:
        """The same under a number of its own: ``value``, if that is given."""
        slot = self.writer.read(tensor, layout)
        number = next(self.numbers) if value is None else value
        self.exports.append((number, Left(slot, layout, level)))
        return number

    def leave_result(self, tensor: PTensor, layout: Layout, number: int) -> None:
        """Leave a result of the step."""
        self.results.append((number, Left(self.writer.read(tensor, layout), layout, None)))

    def run(self, op: Op, level: Level, is_pinned: bool) -> None:
        """Note that ``op`` is of the block at ``level``; pinned, it must run there and no later."""
        self.last_level = max(self.last_level, level)
        if is_pinned:
            self.pinned[op.path] = level

    def program(self, constants: Container[PTensor], times: int, of_layers: bool) -> Program:
        """The program as it is written so far.

        Args:
            times: how often it runs.
            of_layers: whether it is what a group does for its layers of a stack.
        """
        taken = [*sorted(self.arguments, key=lambda end: end.tensor in constants), *self.imports]  # constants last
        left = [*self.results, *self.exports]
        return Program(
            self.group,
            tuple(self.writer.tasks),
            tuple((end.slot, end.layout) for end in taken),
            tuple((end.slot, end.layout) for _, end in left),
            tuple(end.tensor for end in taken),
            tuple(number for number, _ in self.results),
            self.key.phase,
            tuple(end.value for end in self.imports),
            tuple(number for number, _ in self.exports),
            tuple(end.level for end in self.imports),
            tuple(end.level for _, end in self.exports),
            self.last_level,
            self.pinned,
            times,
            of_layers,
        )
