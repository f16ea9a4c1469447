"""Which block of a step each op is of: the one place that decides it.

In a phase of the step (`lower.phases`) an op is of a *place* (a group; its layers of a stack apart). It is of a *stage* if
the plan's schedule has some, and of a *kind* where its table asks for blocks of their own: R for what is computed again, F
and B where a stage's forward and backward are apart. Ops of one place, stage and kind are one block: a *visit*. It ends
where it would wait for itself::

    stage 0   F, visit 0 ──┐                                 ┌──► B, visit 1      what it reads comes from behind visit 0
    stage 1                └──► F, loss and B, visit 0 ──────┘                    nothing lies between its F and its B

So the blocks of an iteration are an acyclic graph, whatever the model: an encoder whose gradients come from several stages
of a decoder, tied heads, losses besides, a norm over everything.

In a phase without stages a visit is the number of crossings on the longest way to an op, so that groups run side by side.

What an op sends leaves with its block. An equation that only a later block of its program reads is put off to that
(`lower.block_cuts`), so that what a forward does for its backward alone is not kept in between.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.loop import Item, made_by, reads_of
from jscaler.ir.name import layers_of
from jscaler.ir.op import RecomputeRegion
from jscaler.ir.walk import in_order
from jscaler.lower.block_names import BlockNames, BlockOps
from jscaler.lower.level import AGAIN, START, WHOLE, BlockKey, Level, StageKind, Work
from jscaler.lower.phases import Phase, ops_of
from jscaler.materialize import Completed, DeviceMesh, Layout
from jscaler.tables import BlockKind
from jscaler.tables.cuts import Cuts

Range = tuple[int, int]  # of layers: from one to before another
Place = int  # the number of a group; of its layers of a stack that and how many groups there are


@dataclass(frozen=True)
class BlockId:
    """A block of a phase.

    Attributes:
        stage: of the plan's schedule; None where it has none.
        kind: of a table's cells; None where a block may be of several (a last stage's forward and backward).
        visit: how often its place was with this stage and kind before.
    """

    place: Place
    stage: int | None
    kind: BlockKind | None
    visit: int


@dataclass
class BlockGraph:
    """The blocks of a phase, and which runs before which. It has no circle."""

    blocks: list[BlockId] = field(default_factory=list)
    sources: list[set[int]] = field(default_factory=list)  # those that a block reads
    _before: list[int] = field(default_factory=list)  # all that run before a block, a bit each
    _of_key: dict[tuple[Place, int | None, BlockKind | None], list[int]] = field(default_factory=dict)

    def join(self, place: Place, stage: int | None, kind: BlockKind | None, reads: Iterable[int]) -> int:
        """The first visit that does not run before what is read; a new one, if there is none."""
        reads = set(reads)
        known = self._of_key.setdefault((place, stage, kind), [])
        number = next((n for n in known if not any(self.runs_before(n, other) for other in reads)), None)
        if number is None:
            number = self._new(BlockId(place, stage, kind, len(known)))
            known.append(number)
        for other in reads - {number}:
            self._read(number, other)
        return number

    def runs_before(self, first: int, second: int) -> bool:
        return bool(self._before[second] >> first & 1)

    def _new(self, block: BlockId) -> int:
        self.blocks.append(block)
        self.sources.append(set())
        self._before.append(0)
        return len(self.blocks) - 1

    def _read(self, number: int, other: int) -> None:
        self.sources[number].add(other)
        more = self._before[other] | 1 << other
        if more & ~self._before[number]:
            for n, own in enumerate(self._before):
                if n == number or own >> number & 1:
                    self._before[n] = own | more


At = tuple[Level, Place, Work | None]  # where, and what is done; None for what is there before


def region_of(op: Op) -> RecomputeRegion | None:
    """The region that ``op`` computes again, or stands in front of as a fence."""
    regions = op.again.remat if op.again is not None else op.remat if op.anywhere == "fence" else ()
    return next(iter(regions), None)


@dataclass(frozen=True)
class _PhaseItem:
    """An item of a phase.

    Attributes:
        place: where it runs.
        stage, kind: what is done there.
        is_early: whether only those that read it are of that stage: then it may as well run where they do.
        waits: numbers of the items of the phase that run before it.
        is_far: whether it reads what is there before the phase, on another group.
    """

    item: Item
    ops: Sequence[Op]
    place: Place
    stage: int | None
    is_early: bool
    kind: BlockKind
    waits: Sequence[int]
    is_far: bool

    @property
    def work(self) -> Work:
        """What its block does for it, and for no other."""
        return None if self.is_early else self.stage, self.kind


@dataclass
class OpBlocks:
    """The block of every op of a phase, and of what it makes.

    Attributes:
        of_op: path -> level, place, stage and kind, of this phase.
        in_loop: whether this phase is of a loop over groups.
        of_layers: what layers of a stack make.
        blocks: what ops say of each block of a loop over groups.
    """

    graph: Graph
    completed: Completed
    after: Mapping[str, Sequence[str]]
    cuts: Cuts
    of_op: dict[str, At] = field(default_factory=dict)
    of_tensor: dict[PTensor, At] = field(default_factory=dict)
    blocks: dict[BlockKey, BlockOps] = field(default_factory=dict)
    of_layers: set[PTensor] = field(default_factory=set)
    in_loop: bool = False

    def __post_init__(self) -> None:
        self.number = {group: number for number, group in enumerate(self.completed.groups)}

    def number_of(self, layout: Layout) -> int:
        """The number of the group that ``layout`` is on, in whatever order."""
        return self.number[self.completed.group_of(layout.mesh)]

    def number_at(self, item: Item) -> int:
        """The number of the group that an item is on."""
        return self.number[self.completed.group_of(self.completed.ops[ops_of(item)[0].path].placement.group)]

    def group(self, place: Place) -> DeviceMesh:
        return self.completed.groups[place % len(self.number)]

    def is_layers(self, place: Place) -> bool:
        return place >= len(self.number)

    def places(self, layout: Layout) -> tuple[Place, Place]:
        """The places of the group that ``layout`` is on."""
        number = self.number_of(layout)
        return number, number + len(self.number)

    def find_layers(self, phases: Sequence[Phase]) -> None:
        """Find the ops of a stage's ranges of layers, if another stage has ranges of as many layers, and what these ops
        alone read.

        They are a program of their own, and what a first and a last stage do besides is another: so the layers of all
        stages are one program. A table with W or R keeps a stage in one program in the loop, since halves of a backward
        wait for no other block. So does a stage of which some ranges have their like and others have none: its program
        would be cut in between.
        """
        if len(self.number) == 1:
            return
        in_pieces = self.cuts.weights or self.cuts.recompute
        bounds = {op.path: layers_of(op.path) for phase in phases for item in phase.items for op in ops_of(item)}
        ranges = self._ranges_of_stages(bounds)
        sizes = {own: tuple(sorted(stop - start for start, stop in own)) for own in ranges}
        count = Counter(sizes.values())
        matched = {bound for own in ranges if count[sizes[own]] > 1 for bound in own}
        alike = {path for path, own in bounds.items() if own in matched}
        if not alike:
            return
        loops = self.graph.loops.values()
        ends = {*self.graph.outputs, *(t for loop in loops for t in loop.returned)}
        for phase in (phase for phase in phases if phase.loop is None or not in_pieces):
            made_here = {t for item in phase.items for t in made_by(item)}
            readers: dict[PTensor, list[tuple[bool, int]]] = {}  # of a tensor: whether each is of layers, and where
            for item in reversed(phase.items):
                made, ops = list(made_by(item)), ops_of(item)
                group = self.number_at(item)
                placed = any(self.completed.homes[op.path].stage_by == "plan" for op in ops)
                of_batch = (
                    not placed and isinstance(item, Op) and made_here.isdisjoint(item.inputs) and phase.loop is not None
                )
                here = not of_batch and any(op.path in alike for op in ops)
                if not here and not placed and ends.isdisjoint(made):
                    read = [reader for t in made for reader in readers.get(t, ())]
                    here = bool(read) and all(reader == (True, group) for reader in read)
                if here:
                    self.of_layers.update(made)
                for t in reads_of(item):
                    readers.setdefault(t, []).append((here, group))

    def _ranges_of_stages(self, bounds: Mapping[str, Range | None]) -> set[frozenset[Range]]:
        """The ranges of layers that the plan gives each stage, by the bounds of each op's; others stand alone."""
        of_stage: dict[int, set[Range]] = {}
        for path, own in bounds.items():
            home = self.completed.homes[path]
            if own is not None and home.stage is not None and home.stage_by == "plan":
                of_stage.setdefault(home.stage, set()).add(own)
        alone = {own for own in bounds.values() if own is not None}.difference(*of_stage.values())
        return {frozenset(own) for own in of_stage.values()} | {frozenset([own]) for own in alone}

    def begin(self, number: int, phase: Phase, carried: Mapping[PTensor, Layout]) -> None:
        """A new phase, in which all that earlier ones have made is there; so is what is ``carried``, on its group.

        Arguments of the step leave their group behind the first level; a loop finds them there.
        """
        self.in_loop = phase.loop is not None
        there = carried if self.in_loop else {**self.completed.inputs, **carried}
        self.of_op, self.of_tensor = {}, {t: (START, self.number_of(layout), None) for t, layout in there.items()}
        items = self._phase_items(phase.items)
        by_stages = self.in_loop and any(item.stage is not None for item in items)
        levels = self._by_stages(items) if by_stages else self._by_crossings(items)
        for item, level in zip(items, levels, strict=True):
            at: At = level, item.place, item.work
            if self.in_loop:
                self._add(number, item, level, items, levels)
            self.of_op.update(dict.fromkeys((op.path for op in item.ops), at))
            self.of_tensor.update(dict.fromkeys(made_by(item.item), at))

    def _add(
        self, number: int, item: _PhaseItem, level: Level, items: Sequence[_PhaseItem], levels: Sequence[Level]
    ) -> None:
        """Say what ``item`` says of its block."""
        key = BlockKey(number, item.place, level)
        block = self.blocks.setdefault(key, BlockOps())
        block.works.add(item.work)
        for n in item.waits:
            other = BlockKey(number, items[n].place, levels[n])
            block.reads |= {other} - {key}
            is_sent = self.group(other.place) != self.group(item.place) and levels[n].number + 1 == level.number
            block.takes_activation |= is_sent and items[n].kind == "F"

    def _phase_items(self, items: Sequence[Item]) -> list[_PhaseItem]:
        """The items of a phase."""
        maker = {t: n for n, item in enumerate(items) for t in made_by(item)}
        of_op = {op.path: n for n, item in enumerate(items) for op in ops_of(item)}
        found: list[_PhaseItem] = []
        for item in items:
            ops = ops_of(item)
            place = self.number_at(item) + len(self.number) * any(t in self.of_layers for t in made_by(item))
            operands = list(reads_of(item))
            waits = {maker[t] for t in operands if t in maker}
            waits |= {of_op[p] for op in ops for p in self.after.get(op.path, ()) if p in of_op}
            if self.in_loop and self.of_layers:  # a backward waits for its forward: a constant cotangent is not early
                forward = {of_op[op.forward.path] for op in ops if op.forward is not None and op.forward.path in of_op}
                waits |= {n for n in forward if n < len(found) and found[n].place == place}
            before = sorted(n for n in waits if n < len(found))
            homes = (self.completed.homes[op.path] for op in ops)
            stage, by = next(((home.stage, home.stage_by) for home in homes if home.stage is not None), (None, None))
            there = (self.of_tensor[t][1] for t in operands if t in self.of_tensor)
            is_far = any(self.group(other) != self.group(place) for other in there)
            found.append(_PhaseItem(item, ops, place, stage, by == "readers", self._kind(ops), before, is_far))
        return found

    def _kind(self, ops: Sequence[Op]) -> BlockKind:
        if self.in_loop and self.cuts.recompute and all(map(region_of, ops)):
            return "R"
        return "B" if ops[0].kind == "backward" or ops[0].again is not None else "F"

    def _by_crossings(self, items: Sequence[_PhaseItem]) -> list[Level]:
        """Levels of a phase without stages: the crossings on the longest way to each item."""
        levels: list[Level] = []
        for item in items:
            number = int(item.is_far)
            for n in item.waits:
                other = items[n]
                is_cut = self.in_loop and self._is_cut(other.kind, item.kind)
                number = max(number, levels[n].number + (other.place != item.place or is_cut))
            levels.append(Level(number, AGAIN if item.kind == "R" else WHOLE))
        return levels

    def _is_cut(self, before: BlockKind, kind: BlockKind) -> bool:
        """Whether a block ends between two ops of one place and stage."""
        return (before, kind) == ("R", "B") or (self.cuts.forward and (before, kind) == ("F", "B"))

    def _by_stages(self, items: Sequence[_PhaseItem]) -> list[Level]:
        """Levels of a phase with stages: those of the blocks that these are."""
        graph, numbers = BlockGraph(), list[int]()
        for item in items:
            kind = item.kind if item.kind == "R" or self.cuts.forward else None
            numbers.append(graph.join(item.place, item.stage, kind, (numbers[other] for other in item.waits)))
        far = {number for number, item in zip(numbers, items, strict=True) if item.is_far}
        levels = self._levels(graph, far)
        return [levels[number] for number in numbers]

    def _levels(self, graph: BlockGraph, far: Set[int]) -> list[Level]:
        """A level for each block, behind those of the blocks that it reads; the blocks of a place have different ones."""
        taken: dict[tuple[Place, int], set[int]] = {}
        levels: dict[int, Level] = {}
        for block_number in in_order(dict(enumerate(graph.sources)), key=int):
            block = graph.blocks[block_number]
            part = AGAIN if block.kind == "R" else WHOLE
            least = int(block_number in far)
            for other in graph.sources[block_number]:
                source = graph.blocks[other]
                stays = part == AGAIN and (source.place, source.stage) == (block.place, block.stage)
                least = max(least, levels[other].number + (not stays))
            own = taken.setdefault((block.place, part), set())
            number = next(number for number in itertools.count(least) if number not in own)
            own.add(number)
            levels[block_number] = Level(number, part)
        return [levels[number] for number in range(len(graph.blocks))]

    def handed_over(self, item: Item) -> list[PTensor]:
        """What ``item`` reads of another stage on its own group: that runs there, and not where it is read."""
        _, place, work = self.of_op[ops_of(item)[0].path]
        if not self.in_loop or work is None or work[0] is None:
            return []
        reads = {t: self.of_tensor[t] for t in reads_of(item) if t in self.of_tensor}
        return [
            t
            for t, (_, origin, maker) in reads.items()
            if origin == place and maker is not None and maker[0] not in (None, work[0])
        ]

    def names(
        self, programs: Mapping[tuple[int, Place], Sequence[Level]]
    ) -> dict[tuple[int, Place], dict[Level, tuple[StageKind, ...]]]:
        """The names of the blocks of a loop over groups: number of a phase, place -> level -> what a block is.

        Args:
            programs: number of a phase, place -> the levels at which its program is cut, in order. Ops of other levels run
                where their results are read.
        """

        def where(key: BlockKey) -> BlockKey:
            levels = programs[key.phase, key.place]
            wholes = (level.whole if level.is_weights else level for level in levels)
            return key._replace(level=next((level for level in wholes if level >= key.level), key.level))

        blocks = {key: ops for key, ops in self.blocks.items() if where(key) == key}
        for key, ops in self.blocks.items():
            if (run := where(key)) != key and run in blocks:
                blocks[run] = replace(blocks[run], reads=blocks[run].reads | ops.reads)
        found: dict[tuple[int, Place], dict[Level, tuple[StageKind, ...]]] = {}
        for key, names in BlockNames(blocks, lambda place: place % len(self.number), self.is_layers).names().items():
            found.setdefault((key.phase, key.place), {})[key.level] = names
        return found
