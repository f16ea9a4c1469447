"""Instructions: what a step on several device groups does, one thing after another, over numbered slots.

The blocks of a phase without a loop run level by level. Those of a loop over groups run as a *table* says, in one order
for all groups: round by round each group runs its next block if what it waits for was made in rounds before; what the
blocks of a round, or of a level, send goes behind them. A slot is assigned once in a step, and freed behind its last
reader.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from jscaler.ir import Graph, PTensor
from jscaler.lower.level import FRONT, Level, StageKind
from jscaler.lower.loop_blocks import Cell, LoopBlocks, sums_of
from jscaler.lower.merged import merged
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.spanning_loop import CarriedValue, SpanningLoop, Transfer
from jscaler.lower.table_binding import bound_table, in_table_order
from jscaler.materialize import DeviceMesh
from jscaler.tables import BlockKind, Published, Table, TableCell

Slot = int
Parts = tuple[tuple[int, int], ...]  # blocks that are one executable, each with the place of its micro-batch


@dataclass(frozen=True)
class Run:
    """Run a block: ``reads`` are the slots of its imports, ``writes`` those of its results and exports.

    In a loop over groups ``microbatches`` are the numbers of those that it is for: one, or of blocks that are one
    executable one for each place.
    """

    block: int
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    microbatches: tuple[int, ...] = ()
    freed: tuple[Slot, ...] = ()

    @property
    def microbatch(self) -> int | None:
        """The first that it is for; None outside of the loop."""
        return self.microbatches[0] if self.microbatches else None


@dataclass(frozen=True)
class Send:
    """Bring a value to another device group by transfer number ``transfer``; in a loop over groups, of a micro-batch."""

    transfer: int
    source: Slot
    target: Slot
    microbatch: int | None = None
    freed: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Gather:
    """Put what iterations have left behind each other, along a new dim in front."""

    pieces: tuple[Slot, ...]
    target: Slot
    value: int
    freed: tuple[Slot, ...] = ()


Instruction = Run | Send | Gather


def microbatch_text(numbers: Sequence[int]) -> str:
    """``micro-batch 3``; of several ``micro-batches 3 and 1``."""
    return f"micro-batch{'es' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}" if numbers else ""


@dataclass(frozen=True)
class Instructions:
    """What a step does.

    Attributes:
        slots: how many there are; the first are those of the results.
        counts: slots that hold the number of a micro-batch on the group of a value: slot -> (value, number).
        table: of the loop over groups, if there is one.
        names: the number of a block of that loop -> its stage, and what it does, as in the table; of several that are one
            executable one for each.
        places: of such the place of the micro-batch of each name; else all are of one.
        ends: of these blocks what a stage does besides its layers of a stack, which are others: a model's first and last
            end. They run when the layers do.
        groups: those of the table's rows.
    """

    steps: tuple[Instruction, ...]
    slots: int
    counts: Mapping[Slot, tuple[int, int]]
    table: Table | None = None
    names: Mapping[int, Sequence[StageKind]] = field(default_factory=dict)
    places: Mapping[int, Sequence[int]] = field(default_factory=dict)
    ends: Set[int] = frozenset()
    groups: tuple[DeviceMesh, ...] = ()

    def cells(self, run: Run) -> list[TableCell]:
        """The cells of the table that a run stands for; none outside of the loop, and where its stage's layers do."""
        if run.block in self.ends:
            return []
        names = self.names.get(run.block, ())
        places = self.places.get(run.block, (0,) * len(names))
        return [TableCell(*name, run.microbatches[place]) for name, place in zip(names, places, strict=True)]


def instructions(
    graph: Graph,
    blocks: Sequence[PlacedBlock],
    transfers: Sequence[Transfer],
    spanning: SpanningLoop | None,
    results: int,
    plan: Published | Table | None = None,
    before: Iterable[tuple[tuple[str, int], tuple[str, int]]] = (),
    is_one: Callable[[Sequence[Sequence[Cell]]], bool] = lambda cells: True,
) -> tuple[list[PlacedBlock], Instructions]:
    """What runs of ``blocks``, and all instructions, in the order of phases and levels.

    Args:
        results: how many results the step has.
        plan: a table for the loop over groups, or a schedule that has one; None for one forward, one backward.
        before: (op, micro-batch) pairs of which the first runs before the second, as ``op_order`` says.
        is_one: whether the cells of an overlapped entry, as blocks at iterations, are one executable.

    Returns:
        The blocks that are run alone, and those that several are one executable of.

    Raises:
        OrderError: blocks would wait for each other.
        PlanError: the table does not go with the blocks.
    """
    if spanning is None:
        writer = _Writer(blocks, transfers, None, results)
        for phase in range(max((block.phase for block in blocks), default=0) + 1):
            writer.straight(phase)
        return [*blocks], Instructions(tuple(_freed(writer.steps, results)), writer.count, writer.counts)
    loop = LoopBlocks.of(blocks, transfers, spanning, list(before))
    table = bound_table(loop, plan)
    rounds = in_table_order(loop, table, is_one)
    order = [[_of_blocks(entry) for entry in entries] for entries in rounds]
    writer = _Writer(blocks, transfers, spanning, results)
    number = writer.run_as({parts for entries in order for parts, _ in entries}, set(graph.inputs))
    for phase in range(max(block.phase for block in blocks) + 1):
        if phase == spanning.phases.start:
            for entries in order:
                writer.round([(number[parts], iterations) for parts, iterations in entries])
            writer.end()
        elif phase not in spanning.phases:
            writer.straight(phase)
    names = {number[parts]: _names(parts, blocks) for parts in number}
    return writer.blocks, Instructions(
        tuple(_freed(writer.steps, results)),
        writer.count,
        writer.counts,
        table,
        {n: [name for name, _ in own] for n, own in names.items()},
        {n: [place for _, place in own] for n, own in names.items()},
        _ends(writer.blocks, names),
        tuple(loop.rows),
    )


def _ends(blocks: Sequence[PlacedBlock], names: Mapping[int, Sequence[tuple[StageKind, int]]]) -> Set[int]:
    """The blocks of stages whose layers of a stack are blocks of their own."""
    of_layers = {(blocks[n].phase, name) for n, own in names.items() if blocks[n].of_layers for name, _ in own}
    rest = [n for n in names if not blocks[n].of_layers]
    return {n for n in rest if names[n] and all((blocks[n].phase, name) in of_layers for name, _ in names[n])}


def _of_blocks(entry: tuple[Cell, ...]) -> tuple[Parts, tuple[int, ...]]:
    """An entry as the blocks of an executable, and the iterations that it runs them for."""
    iterations = tuple(dict.fromkeys(iteration for _, iteration in entry))
    return tuple((number, iterations.index(iteration)) for number, iteration in entry), iterations


def _names(parts: Parts, blocks: Sequence[PlacedBlock]) -> list[tuple[StageKind, int]]:
    """What an executable does, and the place of the micro-batch of each; both halves of a backward are one."""
    every = [(name, place) for number, place in parts for name in blocks[number].names]
    whole: list[tuple[StageKind, int]] = []
    for (stage, kind), place in every:
        other: BlockKind | None = "W" if kind == "I" else "I" if kind == "W" else None
        both = other is not None and ((stage, other), place) in every
        whole.append(((stage, "B" if both else kind), place))
    return list(dict.fromkeys(whole))


def _freed(steps: Sequence[Instruction], results: int) -> list[Instruction]:
    """``steps``, each with the slots that nobody reads behind it."""
    later: set[Slot] = set(range(results))
    found: list[Instruction] = []
    for step in reversed(steps):
        reads = step.reads if isinstance(step, Run) else (step.source,) if isinstance(step, Send) else step.pieces
        writes = step.writes if isinstance(step, Run) else (step.target,)
        last = tuple(s for s in dict.fromkeys((*reads, *writes)) if s not in later)
        later.update(reads)
        found.append(replace(step, freed=last) if last else step)
    return found[::-1]


class _Writer:
    """Writes instructions; values of iterations have a slot for each iteration."""

    def __init__(
        self, blocks: Sequence[PlacedBlock], transfers: Sequence[Transfer], spanning: SpanningLoop | None, results: int
    ):
        self.blocks, self.transfers, self.spanning = [*blocks], transfers, spanning
        self.read = {v for block in blocks for v in block.imports}  # an op's body may not read all that the op does
        for transfer in reversed(transfers):
            self.read |= {transfer.source} if transfer.target in self.read else set()
        self.steps: list[Instruction] = []
        self.slots: dict[tuple[int, int | None], Slot] = {(number, None): number for number in range(results)}
        self.count = results
        self.counts: dict[Slot, tuple[int, int]] = {}
        self.carries: dict[int, CarriedValue] = {}
        self.leaving: dict[int, list[CarriedValue]] = {}  # what leaves a block of the loop -> the carries that it is of
        self.behind: dict[int, list[int]] = {}  # what leaves a block of the loop -> what crosses then
        self.repeated: set[int] = set()  # values that each iteration has for itself
        if spanning is not None:
            body = [block for block in blocks if block.phase in spanning.phases]
            self.repeated = {v for block in body for v in block.exports} | spanning.indices.keys()
            self.repeated |= {t.target for t in transfers if t.phase in spanning.phases}
            self.carries = {c.inside: c for c in spanning.carries}
            for carry in spanning.carries:
                self.leaving.setdefault(carry.out, []).append(carry)
            self.sums = sums_of(body, spanning)
            for number, transfer in enumerate(transfers):
                if transfer.phase in spanning.phases and transfer.level != FRONT:
                    self.behind.setdefault(transfer.source, []).append(number)
            own = ((n, t) for n, t in enumerate(transfers) if t.phase in spanning.phases and t.level == FRONT)
            self.handed = {t.target: n for n, t in own}
        self.sofar: dict[int, list[Slot]] = {}  # carry by its ``inside`` -> its slots, oldest first
        self.ends: dict[int, tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]] = {}  # of blocks of the loop

    def _slot(self, value: int, iteration: int | None = None) -> Slot:
        key = value, iteration if value in self.repeated else None
        slot = self.slots.setdefault(key, self.count)
        if slot == self.count:
            if self.spanning is not None and value in self.spanning.indices:
                assert iteration is not None
                self.counts[slot] = value, iteration * len(self.spanning.phases) + self.spanning.indices[value]
            self.count += 1
        return slot

    def run_as(self, executables: Iterable[Parts], inputs: Set[PTensor]) -> dict[Parts, int]:
        """Have the loop's blocks run as these ``executables``; returns the number of each among all blocks."""
        assert self.spanning is not None
        sums = {c.out: c.inside for c in self.spanning.carries if c.inside in self.sums}
        repeated = self.repeated | (self.carries.keys() - self.sums)
        crossing = {t.source for t in self.transfers} | {s.piece for s in self.spanning.stacks}
        crossing |= {c.out for c in self.spanning.carries}
        reading: dict[int, set[int]] = {}
        for place, block in enumerate(self.blocks):
            for value in block.imports:
                reading.setdefault(value, set()).add(place)
        found: list[PlacedBlock] = []
        number: dict[Parts, int] = {}
        by_last: dict[int, list[Parts]] = {}
        for parts in sorted(executables):
            by_last.setdefault(parts[-1][0], []).append(parts)
        for last, block in enumerate(self.blocks):
            if block.phase not in self.spanning.phases:
                found.append(block)
            for parts in by_last.get(last, ()):
                number[parts] = len(found)
                readers = {
                    (v, place): {(n, place) for n in reading.get(v, ())}
                    for n, place in parts
                    for v in self.blocks[n].exports
                }
                own = [(self.blocks[n], place) for n, place in parts]
                read = {
                    (v, place) for b, place in own for v in b.exports if v in crossing or not readers[v, place] <= {*parts}
                }
                found.append(own[0][0] if len(own) == 1 else merged(own, sums, repeated, read, inputs))
        self.blocks = found
        return number

    def straight(self, phase: int) -> None:
        """The blocks of a phase, level by level."""
        self._sent(phase, FRONT)
        here = [(number, block) for number, block in enumerate(self.blocks) if block.phase == phase]
        for level, blocks in itertools.groupby(
            sorted(here, key=lambda pair: pair[1].level), key=lambda pair: pair[1].level
        ):
            for number, block in blocks:
                writes = tuple(self._slot(v) for v in (*block.results, *block.exports))
                self.steps.append(Run(number, tuple(self._slot(v) for v in block.imports), writes))
            self._sent(phase, level)

    def _sent(self, phase: int, level: Level) -> None:
        """What crosses behind ``level``."""
        for number, transfer in enumerate(self.transfers):
            if transfer.phase == phase and transfer.level == level:
                self._send(number)

    def _send(self, number: int, iteration: int | None = None) -> None:
        transfer = self.transfers[number]
        if transfer.target not in self.read:
            return
        source = self._inside(transfer.source, iteration)
        microbatch = None
        if self.spanning is not None and iteration is not None:
            microbatch = self.spanning.microbatch(transfer.phase, iteration)
        self.steps.append(Send(number, source, self._slot(transfer.target, iteration), microbatch))

    def _ends_of(self, number: int) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """What a block of the loop takes, and what it leaves, each with the place of its micro-batch."""
        if number not in self.ends:
            self.ends[number] = self.blocks[number].taken, self.blocks[number].left
        return self.ends[number]

    def round(self, runs: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Blocks that run at once, each for its iterations; then what they send."""
        assert self.spanning is not None
        for number, iterations in runs:
            block = self.blocks[number]
            taken, left = ([(value, iterations[place]) for value, place in ends] for ends in self._ends_of(number))
            for value, iteration in taken:  # a state that another group has left, to its first reader
                if value in self.handed and (value, iteration) not in self.slots:
                    self._send(self.handed[value], iteration)
            reads = tuple([(self._inside if v in self.carries else self._slot)(v, i) for v, i in taken])
            writes = tuple([self._slot(v, i) for v, i in left])
            microbatches = tuple([self.spanning.microbatch(block.phase, i) for i in iterations])
            self.steps.append(Run(number, reads, writes, microbatches))
            for value, iteration in left:
                for carry in self.leaving.get(value, ()):
                    self.sofar.setdefault(carry.inside, []).append(self._slot(carry.out, iteration))
        for number, iterations in runs:
            for value, place in self._ends_of(number)[1]:
                for transfer in self.behind.get(value, ()):
                    self._send(transfer, iterations[place])

    def _inside(self, value: int, iteration: int | None) -> Slot:
        """The slot of what is read; of a sum what there is so far, of a state what the iteration before has left."""
        carry = self.carries.get(value)
        if carry is None:
            return self._slot(value, iteration)
        left = self.sofar.get(value, [])
        if value in self.sums:
            return left[-1] if left else self._slot(carry.init)
        assert iteration is not None
        return self._slot(carry.out, iteration - 1) if iteration else self._slot(carry.init)

    def end(self) -> None:
        """Behind the last iteration: what it has left, and stacks of what all have."""
        assert self.spanning is not None
        for carry in self.spanning.carries:
            self.slots[carry.final, None] = self.sofar[carry.inside][-1]
        for stacked in self.spanning.stacks:
            pieces = tuple(self._slot(stacked.piece, i) for i in range(self.spanning.loop.length))
            self.steps.append(Gather(pieces, self._slot(stacked.stack), stacked.stack))
