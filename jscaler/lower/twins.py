"""Twins: programs that are one but for their devices, names and numbers, as those of the middle stages of a stack are.

The first is flattened, run through passes and cut; of its blocks a twin has copies, in which each task is its own, and
each equation the first one's, under its name. So work grows with the different stages, and not with all.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from jscaler.ir.name import general
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item, Origins
from jscaler.lower.level import START, Level
from jscaler.lower.positions import Positions
from jscaler.lower.program import Adapt, Compute, Extend, Program, Repeat, Task, all_tasks
from jscaler.lower.segment import PlacedBlock, Segment
from jscaler.materialize import Layout


def twin_key(program: Program) -> Hashable:
    """What only twins share."""
    positions = Positions(program.group)
    brought = set(program.tensors[len(program.tensors) - len(program.imports) :])

    def of(task: Task) -> Hashable:
        if isinstance(task, Compute):  # equal ops hold one body
            return general(task.op.path), id(task.jaxpr), task.inputs, task.outputs, task.parts, task.after
        if isinstance(task, Repeat):
            loop, inside = task.loop, tuple(map(of, task.tasks))
            ends = task.carries, task.xs, task.ys, task.after
            return loop.length, loop.reverse, loop.unroll, bool(loop.time), inside, ends
        rest = (task.adapter, task.reduce_dtype) if isinstance(task, Adapt) else (task.layout, task.edges)
        name = "" if task.tensor in brought else general(task.tensor.name)  # another stage's: its own for each
        return name, positions.of(rest), task.input, task.output

    place = _places(program)
    levels = (
        None if level is None else (place[level.number], level.part)
        for level in (*program.import_levels, *program.export_levels, program.last_level)
    )
    pinned = sorted((general(path), place[level.number], level.part) for path, level in program.pinned.items())
    return (
        tuple(pinned), positions.of(program.group), program.phase, program.times, tuple(map(of, program.tasks)),
        positions.of((program.inputs, program.outputs)), tuple(t.aval for t in program.tensors), _first(program.tensors),
        len(program.imports), len(program.results), _first(_numbers(program)), tuple(levels),
    )  # fmt: skip


def twin_of(segment: Segment, program: Program, count: int) -> tuple[Segment, int]:
    """What ``program`` is, as the twin of a segment's, and how many numbers of values are taken then.

    Args:
        count: how many are taken.
    """
    own = _Own(segment, program, count)
    blocks = tuple(own.block(block) for block in segment.blocks)
    return Segment(program, own.flat(segment.flat), blocks), next(own.fresh)


class _Own:
    """What the things of one program are in its twin."""

    def __init__(self, segment: Segment, program: Program, count: int):
        self.program, theirs = program, segment.program
        self.fresh = itertools.count(count)
        pairs = list(zip(all_tasks(theirs.tasks), all_tasks(program.tasks), strict=True))
        self.tasks = {id(a): b for a, b in pairs}
        self.loops = {id(a.loop): b.loop for a, b in pairs if isinstance(a, Repeat) and isinstance(b, Repeat)}
        ops = [(a.op, b.op) for a, b in pairs if isinstance(a, Compute) and isinstance(b, Compute)]
        self.paths = {a.path: b.path for a, b in ops}
        self.tensors = dict(zip(theirs.tensors, program.tensors, strict=True))
        for a, b in pairs:
            self.tensors.update(zip(_tensors(a), _tensors(b), strict=True))
        self.numbers = dict(zip(_numbers(theirs), _numbers(program), strict=True))
        ends = zip((*theirs.inputs, *theirs.outputs), (*program.inputs, *program.outputs), strict=True)
        self.layouts: dict[Layout | None, Layout | None] = {None: None} | {a: b for (_, a), (_, b) in ends}
        self.levels = dict(zip(_places(theirs), _places(program), strict=True))
        self.block_levels = {self._level(block.level) for block in segment.blocks}

    def _level(self, theirs: Level) -> Level:
        return Level(self.levels[theirs.number], theirs.part)

    def block(self, block: PlacedBlock) -> PlacedBlock:
        level = self._level(block.level)
        return PlacedBlock(
            self.program.group,
            block.phase,
            level,
            self.flat(block.flat),
            tuple(self.tensors[t] for t in block.takes),
            tuple(map(self._number, block.imports)),
            tuple(map(self._number, block.results)),
            tuple(map(self._number, block.exports)),
            tuple(map(self.layouts.__getitem__, block.inputs)),
            tuple(map(self.layouts.__getitem__, block.outputs)),
            of_layers=self.program.of_layers,
            names=self.program.names_at(level, self.block_levels),
            like=block,
        )

    def _number(self, theirs: int) -> int:
        if theirs not in self.numbers:  # what blocks of the program hand on to each other
            self.numbers[theirs] = next(self.fresh)
        return self.numbers[theirs]

    def flat(self, flat: FlatProgram) -> FlatProgram:
        of = flat.origins
        origins = Origins(
            {v: self.paths[path] for v, path in of.op.items()},
            {v: self.tensors[t] for v, t in of.tensor.items()},
            {self.paths[path]: done for path, done in of.done.items()},
        )
        return dataclasses.replace(flat, items=self._items(flat.items), origins=origins)

    def _items(self, items: Iterable[Item]) -> tuple[Item, ...]:
        return tuple(map(self._item, items))

    def _item(self, item: Item) -> Item:
        if isinstance(item, Exchange):
            adapt = self.tasks[id(item.adapt)]
            assert isinstance(adapt, Adapt | Extend)
            return dataclasses.replace(item, adapt=adapt)
        if isinstance(item, FlatLoop):
            return dataclasses.replace(item, loop=self.loops[id(item.loop)], items=self._items(item.items))
        return item


def _tensors(task: Task) -> tuple[Any, ...]:
    if isinstance(task, Compute):
        return task.op.outputs
    return task.loop.results if isinstance(task, Repeat) else (task.tensor,)


def _numbers(program: Program) -> tuple[int, ...]:
    return (*program.imports, *program.exports, *program.results)


def _first(things: Iterable[Hashable]) -> tuple[int, ...]:
    """For each of ``things`` the place of the first that is equal."""
    place: dict[Hashable, int] = {}
    return tuple(place.setdefault(thing, number) for number, thing in enumerate(things))


def _places(program: Program) -> Mapping[int, int]:
    """The numbers of levels behind which something arrives, runs or leaves, each with its place among them."""
    ends = (*program.import_levels, *program.export_levels)
    levels = (START, *ends, *program.pinned.values(), program.last_level)
    numbers = sorted({level.number for level in levels if level is not None})
    return {number: place for place, number in enumerate(numbers)}
