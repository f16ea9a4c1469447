"""Instructions: what a step on several device groups does, one thing after another, over numbered slots.

The blocks of a phase without a loop run level by level. Those of a loop over groups run as a *table* says, in one order
for all groups: round by round each group runs its next block if what it waits for was made in rounds before; what the
blocks of a round, or of a level, send goes behind them. A slot is assigned once in a step, and freed behind its last
reader.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from jscaler.errors import OrderError, PlanError, listing
from jscaler.ir import Graph
from jscaler.ir.op import turn_mark
from jscaler.lower.blocks import FRONT, CarriedValue, SpanningLoop, Transfer
from jscaler.lower.flat_program import all_items
from jscaler.lower.flat_program import results as results_of
from jscaler.lower.segment import PlacedBlock
from jscaler.primitives.table import BlockKind, Table, TableCell, gpipe

Slot = int
Cell = tuple[int, int]  # number of a block, iteration


@dataclass(frozen=True)
class Run:
    """Run a block: ``reads`` are the slots of its imports, ``writes`` those of its results and exports.

    In a loop over groups ``microbatch`` is the number of that which it is for.
    """

    block: int
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    microbatch: int | None = None
    freed: tuple[Slot, ...] = ()


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


@dataclass(frozen=True)
class Instructions:
    """What a step does.

    Attributes:
        slots: how many there are; the first are those of the results.
        counts: slots that hold the number of a micro-batch on the group of a value: slot -> (value, number).
        table: of the loop over groups, if there is one.
        names: the number of a block of that loop -> its stage, and what it does, as in the table.
    """

    steps: tuple[Instruction, ...]
    slots: int
    counts: Mapping[Slot, tuple[int, int]]
    table: Table | None = None
    names: Mapping[int, Sequence[tuple[int, BlockKind]]] = field(default_factory=dict)


def instructions(
    graph: Graph,
    blocks: Sequence[PlacedBlock],
    transfers: Sequence[Transfer],
    spanning: SpanningLoop | None,
    results: int,
    plan: Callable[[int, int], Table] | Table | None = None,
    before: Iterable[tuple[tuple[str, int], tuple[str, int]]] = (),
) -> Instructions:
    """All instructions of a step with ``blocks``, in the order of phases and levels.

    Args:
        results: how many results the step has.
        plan: a table for the loop over groups, or one for as many stages as there are; None for one forward, one backward.
        before: (op, micro-batch) pairs of which the first runs before the second, as ``op_order`` says.

    Raises:
        OrderError: blocks would wait for each other.
        PlanError: the table does not go with the blocks.
    """
    writer = _Writer(blocks, transfers, spanning, results)
    table, names = None, {}
    for phase in range(max((block.phase for block in blocks), default=0) + 1):
        if spanning is not None and phase == spanning.phases.start:
            rounds = Rounds(graph, blocks, transfers, spanning, list(before))
            table, names = rounds.table(plan), rounds.names
            for cells in rounds.order(table):
                writer.round(cells)
            writer.end()
        elif spanning is None or phase not in spanning.phases:
            writer.straight(phase)
    return Instructions(tuple(_freed(writer.steps, results)), writer.count, writer.counts, table, names)


def _freed(steps: Sequence[Instruction], results: int) -> list[Instruction]:
    """``steps``, each with the slots that nobody reads behind it."""
    later: set[Slot] = set(range(results))
    found: list[Instruction] = []
    for step in reversed(steps):
        reads = step.reads if isinstance(step, Run) else (step.source,) if isinstance(step, Send) else step.pieces
        writes = step.writes if isinstance(step, Run) else (step.target,)
        last = tuple(s for s in dict.fromkeys((*reads, *writes)) if s not in later)
        later.update(reads)
        found.append(replace(step, freed=last))
    return found[::-1]


def _sums(body: Sequence[PlacedBlock], spanning: SpanningLoop) -> set[int]:
    """The carries to which blocks add in any order: what a block takes it leaves. Others go from iteration to iteration."""
    readers = {c.inside: [block for block in body if c.inside in block.imports] for c in spanning.carries}
    return {c.inside for c in spanning.carries if c.is_sum and all(c.out in block.exports for block in readers[c.inside])}


class _Writer:
    """Writes instructions; values of iterations have a slot for each iteration."""

    def __init__(
        self, blocks: Sequence[PlacedBlock], transfers: Sequence[Transfer], spanning: SpanningLoop | None, results: int
    ):
        self.blocks, self.transfers, self.spanning = blocks, transfers, spanning
        self.read = {v for block in blocks for v in block.imports}  # an op's body may not read all that the op does
        for transfer in reversed(transfers):
            self.read |= {transfer.source} if transfer.target in self.read else set()
        self.steps: list[Instruction] = []
        self.slots: dict[tuple[int, int | None], Slot] = {(number, None): number for number in range(results)}
        self.count = results
        self.counts: dict[Slot, tuple[int, int]] = {}
        self.carries: dict[int, CarriedValue] = {}
        self.behind: dict[int, list[int]] = {}  # what leaves a block of the loop -> what crosses then
        self.repeated: set[int] = set()  # values that each iteration has for itself
        if spanning is not None:
            body = [block for block in blocks if block.phase in spanning.phases]
            self.repeated = {v for block in body for v in block.exports} | spanning.indices.keys()
            self.repeated |= {t.target for t in transfers if t.phase in spanning.phases}
            self.carries = {c.inside: c for c in spanning.carries}
            self.sums = _sums(body, spanning)
            for number, transfer in enumerate(transfers):
                if transfer.phase in spanning.phases and transfer.level != FRONT:
                    self.behind.setdefault(transfer.source, []).append(number)
            own = ((n, t) for n, t in enumerate(transfers) if t.phase in spanning.phases and t.level == FRONT)
            self.handed = {t.target: n for n, t in own}
        self.sofar: dict[int, list[Slot]] = {}  # carry by its ``inside`` -> its slots, oldest first

    def _slot(self, value: int, iteration: int | None = None) -> Slot:
        key = value, iteration if value in self.repeated else None
        if key not in self.slots:
            self.slots[key] = self.count
            if self.spanning is not None and value in self.spanning.indices:
                assert iteration is not None
                self.counts[self.count] = value, iteration * len(self.spanning.phases) + self.spanning.indices[value]
            self.count += 1
        return self.slots[key]

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

    def _sent(self, phase: int, level: int) -> None:
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

    def round(self, cells: Sequence[Cell]) -> None:
        """Blocks that run at once, each for an iteration; then what they send."""
        assert self.spanning is not None
        for number, iteration in cells:
            block = self.blocks[number]
            for value in block.imports:  # a state that another group has left, to its first reader
                if value in self.handed and (value, iteration) not in self.slots:
                    self._send(self.handed[value], iteration)
            reads = tuple(self._inside(v, iteration) for v in block.imports)
            writes = tuple(self._slot(v, iteration) for v in (*block.results, *block.exports))
            self.steps.append(Run(number, reads, writes, self.spanning.microbatch(block.phase, iteration)))
            for carry in self.carries.values():
                if carry.out in block.exports:
                    self.sofar.setdefault(carry.inside, []).append(self._slot(carry.out, iteration))
        for number, iteration in cells:
            for value in self.blocks[number].exports:
                for transfer in self.behind.get(value, ()):
                    self._send(transfer, iteration)

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


class Rounds:
    """The blocks of a loop over groups in time.

    Attributes:
        own: the numbers of its blocks.
        names: block -> the cells of a table that it stands for: forward and backward of a last stage are one block.
    """

    def __init__(
        self,
        graph: Graph,
        blocks: Sequence[PlacedBlock],
        transfers: Sequence[Transfer],
        spanning: SpanningLoop,
        before: Sequence[tuple[tuple[str, int], tuple[str, int]]] = (),
    ):
        self.graph, self.blocks = graph, blocks
        self.spanning, self.iterations, self.turns = spanning, spanning.loop.length, len(spanning.phases)
        self.own = [number for number, block in enumerate(blocks) if block.phase in spanning.phases]
        self.rows: dict[object, list[int]] = {}
        for number in sorted(self.own, key=lambda n: (blocks[n].phase, blocks[n].level)):
            self.rows.setdefault(blocks[number].group, []).append(number)
        self._wait(transfers, spanning)
        self._name(transfers)
        self._ordered(before)

    def _wait(self, transfers: Sequence[Transfer], spanning: SpanningLoop) -> None:
        """What each block waits for: blocks of its iteration, and of the one before that leave a state."""
        maker = {v: n for n in self.own for v in self.blocks[n].exports}
        for transfer in transfers:
            if transfer.source in maker:
                maker[transfer.target] = maker[transfer.source]
        sums = _sums([self.blocks[n] for n in self.own], spanning)
        states = {c.inside: maker[c.out] for c in spanning.carries if c.inside not in sums and c.out in maker}
        for transfer in transfers:
            if transfer.source in states:
                states[transfer.target] = states[transfer.source]
        self.waits: dict[Cell, set[Cell]] = {}
        for number in self.own:
            imports = self.blocks[number].imports
            now = {maker[v] for v in imports if v in maker}
            last = {states[v] for v in imports if v in states}
            for i in range(self.iterations):
                self.waits[number, i] = {(n, i) for n in now} | ({(n, i - 1) for n in last} if i else set())

    def _name(self, transfers: Sequence[Transfer]) -> None:
        """Forward stages are numbered from the first level on. Backward ones go back from the last: first stages whose
        parameters are frozen have none."""
        backward = [n for n in self.own if any(map(self._is_backward, self._ops(n)))]
        arrive = {t.target: t for t in transfers}
        forward = [n for n in self.own if n not in backward or self._goes_forward(n, arrive)]
        self.names: dict[int, list[tuple[int, BlockKind]]] = {n: [] for n in self.own}
        for phase in self.spanning.phases:
            ahead = sorted((n for n in forward if self.blocks[n].phase == phase), key=lambda n: (self.blocks[n].level, n))
            back = sorted((n for n in backward if self.blocks[n].phase == phase), key=lambda n: (-self.blocks[n].level, n))
            for stage, number in enumerate(ahead):
                self.names[number].append((stage, "F"))
            for stage, number in enumerate(back, max(len(ahead) - len(back), 0)):
                self.names[number].append((stage, "B"))

    def _is_backward(self, path: str) -> bool:
        """Whether an op is of the backward pass; what is computed again is."""
        op = self.graph.by_path.get(path)
        return op is not None and (op.kind == "backward" or op.again is not None)

    def _goes_forward(self, number: int, arrive: Mapping[int, Transfer]) -> bool:
        """Whether a block of the backward pass takes an activation on, too: it is its group's first, or waits for one."""
        block = self.blocks[number]
        if self.rows[block.group][0] == number:
            return True
        came = [arrive[v] for v in block.imports if v in arrive]
        makers = [self.graph.producer.get(t.tensor) for t in came if t.level + 1 == block.level]
        return any(maker is not None and maker.kind == "forward" for maker in makers)

    def _ordered(self, before: Sequence[tuple[tuple[str, int], tuple[str, int]]]) -> None:
        of_op = {path: n for n in self.own for path in self._ops(n)}

        def cell(path: str, microbatch: int) -> Cell:
            iteration, turn = divmod(microbatch, self.turns)
            if path + turn_mark(turn) not in of_op:
                raise OrderError(
                    f"'{path}' runs in no block of the loop over micro-batches, and cannot be put in order there"
                )
            return of_op[path + turn_mark(turn)], iteration

        for first, second in before:
            one, other = cell(*first), cell(*second)
            if one != other:
                self.waits[other].add(one)

    def _ops(self, number: int) -> list[str]:
        flat = self.blocks[number].flat
        made = (v for item in all_items(flat.items) for v in results_of(item))
        return list(dict.fromkeys(flat.origins.op[v] for v in made if v in flat.origins.op))

    # -- tables

    def table(self, plan: Callable[[int, int], Table] | Table | None) -> Table:
        """The table that is asked for, if it goes with the blocks; by default one forward, one backward.

        Published schedules are for a chain of stages; on any other shape they are the like.

        Raises:
            PlanError: a block is missing, stands twice, or stands in another group's row.
        """
        if plan is None:
            return self._as_table(self._one_forward_one_backward())
        if not isinstance(plan, Table) and self.turns > 1:
            raise PlanError(
                f"'{getattr(plan, '__name__', plan)}' has a row for each stage, and stages of {self.turns} turns lie on "
                "other devices: give a table (its text, say), or none"
            )
        stages = max(stage for names in self.names.values() for stage, _ in names) + 1
        if isinstance(plan, Table):
            return self._checked(plan)
        try:
            return self._checked(self._of_own(plan(stages, self.spanning.loop.parts)))
        except PlanError:
            return self._as_table(self._one_forward_one_backward(self._all if plan is gpipe else self._enough))

    def _checked(self, table: Table) -> Table:
        rows = list(self.rows.values())
        if len(table.rows) != len(rows):
            raise PlanError(f"the table has {len(table.rows)} rows, and the loop's ops lie on {len(rows)} device groups")
        for at, (cells, own) in enumerate(zip(table.rows, rows, strict=True)):
            wanted = [cell for n in own for i in range(self.iterations) for cell in self._cells((n, i))]
            missing = [str(c) for c in wanted if c not in cells]
            more = [str(c) for c in dict.fromkeys(cells) if c not in wanted or cells.count(c) > 1]
            if missing or more:
                problems = [f"lacks {listing(missing)}"] if missing else []
                problems += [f"has {listing(more)}, twice or where it does not run"] if more else []
                devices = list(self.blocks[own[0]].group.devices)
                raise PlanError(
                    f"row {at} of the table, that of devices {devices}, {' and '.join(problems)}; it runs "
                    f"{listing(list(map(self._runs, own)))}"
                )
        return table

    def _of_own(self, table: Table) -> Table:
        """A published table without what this step lacks: an evaluation goes forward alone."""
        known = {name for names in self.names.values() for name in names}
        return Table(tuple(tuple(cell for cell in row if (cell.stage, cell.kind) in known) for row in table.rows))

    def _as_table(self, rows: Sequence[Sequence[Cell]]) -> Table:
        return Table(tuple(tuple(found for cell in row for found in self._cells(cell)) for row in rows))

    def _cells(self, cell: Cell) -> list[TableCell]:
        number, iteration = cell
        microbatch = self.spanning.microbatch(self.blocks[number].phase, iteration)
        return [TableCell(stage, kind, microbatch) for stage, kind in self.names[number]]

    def _runs(self, number: int) -> str:
        """Which cells a block stands for."""
        which = ", ".join(f"{stage}{kind}" for stage, kind in self.names[number])
        first, last = (self.spanning.microbatch(self.blocks[number].phase, i) for i in (0, self.iterations - 1))
        return f"{which} for micro-batches {first} to {last}" + (f", one in {self.turns}" if self.turns > 1 else "")

    def order(self, table: Table) -> list[list[Cell]]:
        """The blocks round by round, in the order of ``table``.

        Raises:
            OrderError: they would wait for each other.
        """
        of_cell = {cell: (n, i) for n in self.own for i in range(self.iterations) for cell in self._cells((n, i))}
        rows = [list(dict.fromkeys(of_cell[cell] for cell in row)) for row in table.rows]
        at, done, found = [0] * len(rows), set[Cell](), list[list[Cell]]()
        while any(i < len(row) for i, row in zip(at, rows, strict=True)):
            heads = [(g, row[at[g]]) for g, row in enumerate(rows) if at[g] < len(row)]
            ready = [(g, cell) for g, cell in heads if self.waits[cell] <= done]
            if not ready:
                raise OrderError(f"blocks wait for each other: {self._stuck([cell for _, cell in heads], done)}")
            for g, _ in ready:
                at[g] += 1
            done |= {cell for _, cell in ready}
            found.append([cell for _, cell in ready])
        return found

    def _stuck(self, heads: Sequence[Cell], done: Set[Cell]) -> str:
        lines = []
        for cell in heads:
            missing = sorted(self.waits[cell] - done)
            waits = ", ".join(self._text(other) for other in missing)
            lines.append(f"{self._text(cell)} ({listing(self._ops(cell[0])[:3])}) is next on devices "
                         f"{list(self.blocks[cell[0]].group.devices)} and waits for {waits}")  # fmt: skip
        return "; ".join(lines)

    def _text(self, cell: Cell) -> str:
        return "+".join(map(str, self._cells(cell)))

    def _one_forward_one_backward(self, most: Callable[[Iterable[int]], int] | None = None) -> list[list[Cell]]:
        """On a chain of stages `one_f_one_b`; else the same idea: as few micro-batches at once as keep all groups busy.

        Args:
            most: how many are under way on a group with such blocks at one turn, if not so few.

        Where micro-batches take turns, each turn is a chain of its own, and a group runs the oldest that is ready.
        """
        most = most or self._enough
        rows = [self._by_turn(own) for own in self.rows.values()]
        done, found = set[Cell](), [list[Cell]() for _ in rows]
        while any(cells for turns in rows for left in turns for cells in left.values()):
            ready = [self._oldest(turns, done, most) for turns in rows]
            if not any(ready):
                ready = [self._oldest(turns, done, self._all) for turns in rows]
            if not any(ready):
                heads = [(n, cells[0]) for turns in rows for left in turns for n, cells in left.items() if cells]
                raise OrderError(f"blocks wait for each other: {self._stuck(heads[:4], done)}")
            for g, cell in enumerate(ready):
                if cell is not None:
                    found[g].append(cell)
                    next(left for left in rows[g] if cell[0] in left)[cell[0]].remove(cell[1])
            done |= {cell for cell in ready if cell is not None}
        return found

    def _by_turn(self, own: Sequence[int]) -> list[dict[int, list[int]]]:
        """For each turn the blocks of a group, each with the iterations that are left."""
        turns = itertools.groupby(own, key=lambda n: self.blocks[n].phase)
        return [{n: list(range(self.iterations)) for n in blocks} for _, blocks in turns]

    def _all(self, blocks: Iterable[int]) -> int:
        """As many as there are."""
        return self.iterations

    def _enough(self, blocks: Iterable[int]) -> int:
        """How many micro-batches under way keep a group busy at one turn."""
        levels = [self.blocks[n].level for n in blocks]
        return (levels[-1] - levels[0]) // 2 + 1

    def _oldest(
        self, turns: Sequence[dict[int, list[int]]], done: Set[Cell], most: Callable[[Iterable[int]], int]
    ) -> Cell | None:
        ready = [cell for left in turns if (cell := self._next(left, done, most(left))) is not None]
        return min(ready, key=lambda cell: (cell[1], -self.blocks[cell[0]].level), default=None)

    def _next(self, left: dict[int, list[int]], done: Set[Cell], most: int) -> Cell | None:
        """A new micro-batch if not too many are under way, else what has come furthest."""
        first, last = next(iter(left)), next(reversed(left))
        ready = {n: next((i for i in cells if self.waits[n, i] <= done), None) for n, cells in left.items()}
        if first != last and len(left[last]) - len(left[first]) >= most:
            ready[first] = None
        number = first if ready[first] is not None else next((n for n in reversed(ready) if ready[n] is not None), first)
        place = ready[number]
        return None if place is None else (number, place)
