"""``Rounds``: the blocks of a loop over groups in time, as a table has them.

A table's cells stand for blocks: a forward, what is computed again, a backward, or the two halves of one. What it runs as
one executable (an overlapped entry; a backward whose halves, or what it computes again, are blocks by themselves) is an
entry of several blocks.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from jscaler.errors import OrderError, PlanError, PlanWarning, ScheduleWarning, listing, warn
from jscaler.ir import Graph
from jscaler.ir.name import turn_mark
from jscaler.ir.walk import circle_of, grouped
from jscaler.lower.blocks import SpanningLoop, Transfer
from jscaler.lower.level import FRONT, WHOLE, Level
from jscaler.lower.segment import PlacedBlock, made_by
from jscaler.materialize import DeviceMesh
from jscaler.tables import BlockKind, Published, Table, TableCell
from jscaler.tables.legal import check_cells, in_order, whole_of

Cell = tuple[int, int]  # number of a block, iteration
Name = tuple[int, BlockKind]


def sums_of(body: Sequence[PlacedBlock], spanning: SpanningLoop) -> set[int]:
    """The carries to which blocks add in any order: what a block takes it leaves. Others go from iteration to iteration."""
    readers = {c.inside: [block for block in body if c.inside in block.imports] for c in spanning.carries}
    return {c.inside for c in spanning.carries if c.is_sum and all(c.out in block.exports for block in readers[c.inside])}


class Rounds:
    """The blocks of a loop over groups in time.

    Attributes:
        own: the numbers of its blocks.
        names: block -> the cells of a table that it stands for: forward and backward of a last stage may be one block.
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
        self.rows: dict[DeviceMesh, list[int]] = {}
        for number in sorted(self.own, key=lambda n: (blocks[n].phase, blocks[n].level, blocks[n].of_layers)):
            self.rows.setdefault(blocks[number].group, []).append(number)
        self._hops = {t.level.whole for t in transfers if t.phase in spanning.phases and t.level != FRONT}
        self._wait(transfers, spanning)
        self.names = self._by_marks() or self._by_levels(transfers)
        for number, reader in self._again.items():
            self.names[number] = [(stage, "R") for stage, kind in self.names[reader] if kind == "B"]
        self._halve()
        self._ordered(before)

    def _wait(self, transfers: Sequence[Transfer], spanning: SpanningLoop) -> None:
        """What each block waits for: blocks of its iteration, and of the one before that leave a state."""
        maker = {v: n for n in self.own for v in self.blocks[n].exports}
        for transfer in transfers:
            if transfer.source in maker:
                maker[transfer.target] = maker[transfer.source]
        sums = sums_of([self.blocks[n] for n in self.own], spanning)
        states = {c.inside: maker[c.out] for c in spanning.carries if c.inside not in sums and c.out in maker}
        for transfer in transfers:
            if transfer.source in states:
                states[transfer.target] = states[transfer.source]
        now = {n: {maker[v] for v in self.blocks[n].imports if v in maker} for n in self.own}
        assert (circle := circle_of(now)) is None, (
            f"blocks of an iteration wait for each other: {circle}"
        )  # `lower.op_blocks`
        self.waits: dict[Cell, set[Cell]] = {}
        for number in self.own:
            last = {states[v] for v in self.blocks[number].imports if v in states}
            for i in range(self.iterations):
                self.waits[number, i] = {(n, i) for n in now[number]} | ({(n, i - 1) for n in last} if i else set())

    def _by_marks(self) -> dict[int, list[Name]] | None:
        """The stages that the plan gives to ops; None where it gives none, or where a stage is in more blocks than one, its
        layers of a stack in one, and all else in one."""
        found: dict[int, list[Name]] = {}
        for number in self.own:
            stages: list[Name] = [(stage, kind) for stage, kind in self.blocks[number].marks if stage is not None]
            found[number] = sorted(stages, key=lambda name: (name[0], name[1] == "B"))
        # what reads nothing of other stages (a second pass's embedding) could run early, but does where it is read
        places = Counter((*self._kind(n), *name) for n in self._whole for name in found[n])
        for number in self._whole:
            alone = [name for name in found[number] if places[*self._kind(number), *name] == 1]
            found[number] = alone or found[number]
        every = [(*self._kind(n), *name) for n in self._whole for name in found[n]]
        return found if all(found[n] for n in self._whole) and len(set(every)) == len(every) else None

    def _kind(self, number: int) -> tuple[int, bool]:
        return self.blocks[number].phase, self.blocks[number].of_layers

    @functools.cached_property
    def _whole(self) -> list[int]:
        """The blocks without those that compute again, or make gradients of weights behind another, which makes that of the
        input."""
        found = [n for n in self.own if n not in self._again]
        return [n for n in found if self.blocks[n].level.part == WHOLE or self._at(n, WHOLE) is None]

    @functools.cached_property
    def _again(self) -> dict[int, int]:
        """The blocks of what is computed again, and of each the first that reads it."""
        own = [n for n in self.own if self.blocks[n].level.is_again]
        readers = {n: [m for m in self.own if (n, 0) in self.waits[m, 0]] for n in own}
        return {n: min(readers[n], key=lambda m: self.blocks[m].level) for n in own}

    def _at(self, number: int, part: int) -> int | None:
        """The block that is another part of a block's level."""
        block = self.blocks[number]
        return self._places.get((block.phase, block.group, block.of_layers, Level(block.level.number, part)))

    @functools.cached_property
    def _places(self) -> dict[tuple[int, DeviceMesh, bool, Level], int]:
        return {(b.phase, b.group, b.of_layers, b.level): n for n in self.own for b in [self.blocks[n]]}

    def _by_levels(self, transfers: Sequence[Transfer]) -> dict[int, list[Name]]:
        """Forward stages are numbered from the first level on. Backward ones go back from the last: first stages whose
        parameters are frozen have none."""
        backward = [n for n in self._whole if any(map(self._is_backward, made_by(self.blocks[n])))]
        arrive = {t.target: t for t in transfers}
        forward = [n for n in self._whole if n not in backward or self._goes_forward(n, arrive)]
        found: dict[int, list[Name]] = {n: [] for n in self.own}
        for phase in self.spanning.phases:
            ahead = sorted((n for n in forward if self.blocks[n].phase == phase), key=lambda n: (self.blocks[n].level, n))
            back = sorted(
                (n for n in backward if self.blocks[n].phase == phase), key=lambda n: (-self.blocks[n].level.number, n)
            )
            for stage, number in enumerate(ahead):
                found[number].append((stage, "F"))
            for stage, number in enumerate(back, max(len(ahead) - len(back), 0)):
                found[number].append((stage, "B"))
        return found

    def _halve(self) -> None:
        """A backward block behind which gradients of weights are made is I, and that which makes them is W. Where no stage
        waits for a gradient (of tokens, say), W is all there is."""
        for number in self.own:
            if self.blocks[number].level.is_weights:
                inputs = self._at(number, WHOLE)
                inputs = number if inputs is None else inputs
                names = self.names[inputs]
                self.names[inputs] = [(stage, "I" if kind == "B" else kind) for stage, kind in names]
                self.names[number] = [(stage, "W") for stage, kind in names if kind == "B"]

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
        makers = [self.graph.producer.get(t.tensor) for t in came if t.level.number + 1 == block.level.number]
        return any(maker is not None and maker.kind == "forward" for maker in makers)

    def _ordered(self, before: Sequence[tuple[tuple[str, int], tuple[str, int]]]) -> None:
        of_op = {path: n for n in self.own for path in made_by(self.blocks[n])}

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

    # -- tables

    def table(self, plan: Published | Table | None) -> Table:
        """The table that is asked for, if it goes with the blocks; by default one forward, one backward.

        Published schedules are for a chain of stages; on any other shape one forward, one backward does. A
        `ScheduleWarning` says so where neither that nor GPipe was asked for.

        Raises:
            PlanError: a block is missing, stands twice, or stands in another group's row.
        """
        if plan is None:
            return self._as_table(self._one_forward_one_backward())
        if isinstance(plan, Published):
            if self.turns > 1 and plan.lies_turned is None:
                raise PlanError(
                    f"'{plan.name}' has a row for each stage, and stages of {self.turns} turns lie on other devices: "
                    "give a table (its text, say), or none"
                )
            try:
                return self._checked(self._of_own(plan, published_table(plan, len(self.rows), self._stages, self.spanning)))
            except PlanError as error:
                return self._instead(plan, str(error))
        return self._checked(plan)

    def _instead(self, plan: Published, why: str) -> Table:
        """The table that runs instead of a published one that does not go with the blocks."""
        if plan.name not in ("1f1b", "gpipe"):
            warn(
                f"the schedule '{plan.name}' does not go with this step, which runs one forward, one backward, as soon as "
                f"each block can: {why}",
                ScheduleWarning,
            )
        return self._as_table(self._one_forward_one_backward(self._all if plan.name == "gpipe" else self._enough))

    @property
    def _stages(self) -> int:
        return max(stage for names in self.names.values() for stage, _ in names) + 1

    def _checked(self, table: Table) -> Table:
        rows, names, runs = [], [], []
        for own in self.rows.values():
            cells = (cell for n in own for i in range(self.iterations) for cell in self._cells((n, i)))
            rows.append({whole_of(cell) for cell in cells})
            names.append(f"devices {list(self.blocks[own[0]].group.devices)}")
            runs.append(list(map(self._runs, own)))
        check_cells(table, rows, names, runs)
        return table

    def _of_own(self, plan: Published, table: Table) -> Table:
        """A published table without what this step lacks: an evaluation goes forward alone, and some stages compute nothing
        again.

        A `PlanWarning` says what else is left out: a stage whose parameters are frozen has no backward.
        """
        known = {whole_of(TableCell(stage, kind, 0)) for names in self.names.values() for stage, kind in names}
        cells = {replace(cell, microbatch=0) for cell in table.cells() if cell.kind != "R"}
        lacking = {(cell.stage, cell.kind) for cell in cells if whole_of(cell) not in known}
        if lacking and any(cell.kind == "B" for cell in known):
            names = ", ".join(f"{stage}{kind}" for stage, kind in sorted(lacking))
            warn(
                f"the schedule '{plan.name}' has {names}, for which this step has no block: these stages have no such work "
                "(nothing in them is trained, say); the rest of the schedule runs as it is published",
                PlanWarning,
            )
        rows = []
        for row in table.rows:
            kept = [[c for c in entry.cells if whole_of(TableCell(c.stage, c.kind, 0)) in known] for entry in row]
            rows.append(tuple(e if len(own) == len(e.cells) else own[0] for e, own in zip(row, kept, strict=True) if own))
        return Table(tuple(rows))

    def _as_table(self, rows: Sequence[Sequence[Cell]]) -> Table:
        return Table(tuple(tuple(dict.fromkeys(found for cell in row for found in self._cells(cell))) for row in rows))

    def _cells(self, cell: Cell) -> list[TableCell]:
        number, iteration = cell
        microbatch = self.spanning.microbatch(self.blocks[number].phase, iteration)
        return [TableCell(stage, kind, microbatch) for stage, kind in self.names[number]]

    def _runs(self, number: int) -> str:
        """Which cells a block stands for."""
        which = ", ".join(f"{stage}{kind}" for stage, kind in self.names[number])
        first, last = (self.spanning.microbatch(self.blocks[number].phase, i) for i in (0, self.iterations - 1))
        return f"{which} for micro-batches {first} to {last}" + (f", one in {self.turns}" if self.turns > 1 else "")

    def order(self, table: Table) -> list[list[tuple[Cell, ...]]]:
        """What runs round by round, in the order of ``table``: blocks for an iteration each; several are one executable.

        Raises:
            OrderError: they would wait for each other.
        """
        own = sorted(self.own, key=lambda n: self.blocks[n].level)
        of_cell = grouped((cell, (n, i)) for n in own for i in range(self.iterations) for cell in self._cells((n, i)))
        named = set(table.cells())
        rows = []
        for row in table.rows:
            ran: set[Cell] = set()  # a block that stands for cells of several entries runs with the first
            entries: list[tuple[Cell, ...]] = []
            for entry in row:
                asked = (own for cell in entry.cells for own in _blocks_of(cell, of_cell, named))
                own = dict.fromkeys(own for own in asked if own not in ran)
                entries += self._executables([*own]) if len(entry.cells) == 1 else [tuple(own)] if own else []
                ran.update(own)
            rows.append(entries)
        waits = {
            entry: {needed for n, cell in enumerate(entry) for needed in self.waits[cell] if needed not in entry[:n]}
            for row in rows
            for entry in row
        }
        home = {cell: entry for row in rows for entry in row for cell in entry}
        needed = {entry: {home[cell] for cell in before} for entry, before in waits.items()}
        devices = [group.devices for group in self.rows]
        return in_order(rows, needed, self._text, self._told, devices, self._is_recompute)

    def _executables(self, own: Sequence[Cell]) -> list[tuple[Cell, ...]]:
        """The blocks of one cell as what runs one after another: layers of a stack are apart from all else."""
        runs = itertools.groupby(own, key=lambda cell: self.blocks[cell[0]].of_layers)
        return [tuple(cells) for _, cells in runs]

    def _is_recompute(self, entry: tuple[Cell, ...]) -> bool:
        return all(number in self._again for number, _ in entry)

    def _text(self, entry: tuple[Cell, ...]) -> str:
        return ";".join("+".join(map(str, self._cells(cell))) for cell in entry)

    def _told(self, entry: tuple[Cell, ...]) -> str:
        block = self.blocks[entry[0][0]]
        return f"{self._text(entry)} ({listing(made_by(block)[:3])}), next on devices {list(block.group.devices)},"

    def _stuck(self, heads: Sequence[Cell], done: Set[Cell]) -> str:
        waits = {cell: ", ".join(self._text((other,)) for other in sorted(self.waits[cell] - done)) for cell in heads}
        return "; ".join(f"{self._told((cell,))} waits for {others}" for cell, others in waits.items())

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
        return sum(levels[0] <= level < levels[-1] for level in self._hops) // 2 + 1

    def _oldest(
        self, turns: Sequence[dict[int, list[int]]], done: Set[Cell], most: Callable[[Iterable[int]], int]
    ) -> Cell | None:
        ready = [cell for left in turns if (cell := self._next(left, done, most(left))) is not None]
        return min(ready, key=lambda cell: (cell[1], *(-x for x in self.blocks[cell[0]].level)), default=None)

    def _needs(self, number: int, iteration: int) -> set[Cell]:
        """What a block waits for; what is computed again also for what its reader does, or it would be held for longer."""
        needed = self.waits[number, iteration]
        if number not in self._again:
            return needed
        return needed | {cell for cell in self.waits[self._again[number], iteration] if cell[0] not in self._again}

    def _next(self, left: dict[int, list[int]], done: Set[Cell], most: int) -> Cell | None:
        """A new micro-batch if not too many are under way, else what has come furthest."""
        first, last = next(iter(left)), next(reversed(left))
        ready = {n: next((i for i in cells if self._needs(n, i) <= done), None) for n, cells in left.items()}
        if first != last and len(left[last]) - len(left[first]) >= most:
            ready[first] = None
        number = first if ready[first] is not None else next((n for n in reversed(ready) if ready[n] is not None), first)
        place = ready[number]
        return None if place is None else (number, place)


def _blocks_of(cell: TableCell, known: Mapping[TableCell, Sequence[Cell]], named: Set[TableCell]) -> Iterable[Cell]:
    """The blocks that a cell stands for: of a whole backward maybe two, and of a half none, where it has nothing to do. In
    front of a backward stands what it computes again, if that has no cell among those ``named`` in the table."""
    others: tuple[BlockKind, ...] = (cell.kind,)
    if cell not in known:
        others = ("I", "W") if cell.kind == "B" else ("B",) if cell.kind == "I" else ()
    again = TableCell(cell.stage, "R", cell.microbatch)
    every = [again] if cell.kind in "BI" and again not in named else []
    every += [TableCell(cell.stage, kind, cell.microbatch) for kind in others]
    return [own for one in every for own in known.get(one, ())]


def published_table(plan: Published, rows: int, stages: int, spanning: SpanningLoop) -> Table:
    """The table of a published schedule for a loop over so many groups and stages.

    Raises:
        PlanError: there is no such schedule for these numbers.
    """
    groups, between = rows - plan.everywhere, stages - 2 * plan.everywhere
    if groups < 1 or between % groups:
        raise PlanError(f"its {between} stages are not as many on each of {groups} groups")
    return plan.table(groups, spanning.loop.parts, between // groups)
