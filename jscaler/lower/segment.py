"""``Segment``: a group's program in one phase, with slots and without; and its blocks, each of which is one executable."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from jscaler.errors import PlanError
from jscaler.ir import Graph, PTensor
from jscaler.ir.passes import Pass
from jscaler.lower.flat_program import FlatProgram, all_items, results
from jscaler.lower.level import Level, StageKind
from jscaler.lower.program import Program
from jscaler.materialize import DeviceMesh, Layout

T = TypeVar("T")


@dataclass(frozen=True)
class PlacedBlock:
    """What a group runs between crossings: one executable, in a loop the same for all iterations.

    Attributes:
        level: where it stands in its phase.
        flat: takes ``takes`` and then ``imports``, and leaves ``results`` and then ``exports``.
        takes: inputs of the step, and constants.
        imports, exports: the numbers of values that come from other blocks, and of those that go to them.
        results: the numbers of the step's results.
        inputs, outputs: how each of these lies; None for what only blocks of this group hand on: what each device has.
        parts: of several blocks that are one executable: these, each with the place of its micro-batch among the run's.
        import_places, export_places: of these, the place of the micro-batch of each import and export; else all are of one.
        of_layers: whether it is of its group's layers of a stack, and of nothing that the group does besides.
        names: the cells of a table that it is, for each micro-batch: forward and backward of a last stage may be one block.
        like: the block of another group's program that it is the twin of (`lower.twins`), if it is one.
    """

    group: DeviceMesh
    phase: int
    level: Level
    flat: FlatProgram
    takes: tuple[PTensor, ...]
    imports: tuple[int, ...]
    results: tuple[int, ...]
    exports: tuple[int, ...]
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    parts: tuple[tuple["PlacedBlock", int], ...] = ()
    import_places: tuple[int, ...] = ()
    export_places: tuple[int, ...] = ()
    of_layers: bool = False
    names: tuple[StageKind, ...] = ()
    like: "PlacedBlock | None" = field(default=None, compare=False, repr=False)

    @property
    def taken(self) -> tuple[tuple[int, int], ...]:
        """The imports, each with the place of its micro-batch among the run's."""
        return tuple(zip(self.imports, self.import_places or (0,) * len(self.imports), strict=True))

    @property
    def left(self) -> tuple[tuple[int, int], ...]:
        """The exports, each with the place of its micro-batch among the run's."""
        return tuple(zip(self.exports, self.export_places or (0,) * len(self.exports), strict=True))


def own_ops(graph: Graph, block: PlacedBlock) -> list[str]:
    """The paths of the ops that a block runs; of those with a source line, where it has any."""
    paths = made_by(block)
    return [path for path in paths if path in graph.by_path and graph[path].source] or paths


def made_by(block: PlacedBlock) -> list[str]:
    """The paths of all ops of which a block makes something."""
    of = block.flat.origins.op
    return list(dict.fromkeys(of[v] for item in all_items(block.flat.items) for v in results(item) if v in of))


@dataclass(frozen=True)
class Segment:
    """A group's program in one phase of the step, with slots and without, and the blocks that it runs as."""

    program: Program
    flat: FlatProgram
    blocks: tuple[PlacedBlock, ...]


@dataclass(frozen=True)
class CutProgram:
    """A program as the blocks that it runs as."""

    blocks: tuple[PlacedBlock, ...]

    def num_items(self) -> int:
        """Of all blocks, those of loops too."""
        return sum(1 for block in self.blocks for _ in all_items(block.flat.items))

    def __str__(self) -> str:
        return "\n\n".join(str(block.flat) for block in self.blocks)


def in_each_block(one: Pass[FlatProgram]) -> Pass[CutProgram]:
    """A pass over a flat program, over each block's."""

    @functools.wraps(one)
    def in_each(cut: CutProgram) -> CutProgram:
        return CutProgram(tuple(dataclasses.replace(block, flat=one(block.flat)) for block in cut.blocks))

    return in_each


def only(segments: Sequence[T], what: str) -> T:
    """The segment, or block, of a step that runs on one device group.

    Raises:
        PlanError: it runs on several; says ``what`` there is of a step on one alone.
    """
    if len(segments) != 1:
        raise PlanError(
            f"the step runs on several device groups, as {len(segments)} executables: {what} is of a step on one; look at "
            "its `segments`, or at `explain()`"
        )
    return segments[0]
