"""A table and the blocks of a loop over groups: which table runs, and which blocks each of its entries is.

A table's cells stand for blocks: a forward, what is computed again, a backward, or the two halves of one. What it runs as
one executable (an overlapped entry in which something hides; a backward whose halves, or what it computes again, are blocks
by themselves) is an entry of several blocks.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from jscaler.errors import PlanError, PlanWarning, ScheduleWarning, warn
from jscaler.ir.walk import grouped
from jscaler.lower.loop_blocks import Cell, LoopBlocks, cells_text, waiting_text
from jscaler.lower.oldest_first import one_forward_one_backward
from jscaler.lower.spanning_loop import SpanningLoop
from jscaler.tables import BlockKind, Overlap, Published, Table, TableCell
from jscaler.tables.legal import check_cells, check_own_order, in_order, whole_of

Entry = tuple[Cell, ...]  # blocks that run as one executable


def bound_table(loop: LoopBlocks, plan: Published | Table | None) -> Table:
    """The table that is asked for, if it goes with the blocks; by default one forward, one backward.

    Published schedules are for a chain of stages; on any other shape one forward, one backward does. A `ScheduleWarning`
    says so where neither that nor GPipe was asked for.

    Raises:
        PlanError: a block is missing, stands twice, or stands in another group's row.
        OrderError: one stands in front of another of its stage and micro-batch, for which it waits.
    """
    if plan is None:
        return _default_table(loop)
    if not isinstance(plan, Published):
        return _checked(loop, plan)
    turns = len(loop.spanning.phases)
    if turns > 1 and plan.lies_turned is None:
        raise PlanError(
            f"'{plan.name}' has a row for each stage, and stages of {turns} turns lie on other devices: "
            "give a table (its text, say), or none"
        )
    stages = max(stage for number in loop.numbers for stage, _ in loop.blocks[number].names) + 1
    try:
        table = published_table(plan, len(loop.rows), stages, loop.spanning)
        return _checked(loop, _without_lacking(loop, plan, table))
    except PlanError as error:
        if plan.name not in ("1f1b", "gpipe"):
            warn(
                f"the schedule '{plan.name}' does not go with this step, which runs one forward, one backward, as soon as "
                f"each block can: {error}",
                ScheduleWarning,
            )
        return _default_table(loop, loop.iterations if plan.name == "gpipe" else None)


def published_table(plan: Published, rows: int, stages: int, spanning: SpanningLoop) -> Table:
    """The table of a published schedule for a loop over so many groups and stages.

    Raises:
        PlanError: there is no such schedule for these numbers.
    """
    groups, between = rows - plan.everywhere, stages - 2 * plan.everywhere
    if groups < 1 or between % groups:
        raise PlanError(f"its {between} stages are not as many on each of {groups} groups")
    return plan.table(groups, spanning.loop.parts, between // groups)


def _default_table(loop: LoopBlocks, most: int | None = None) -> Table:
    rows = one_forward_one_backward(loop, most)
    return Table(tuple(tuple(dict.fromkeys(cell for at in row for cell in loop.cells(at))) for row in rows))


def _checked(loop: LoopBlocks, table: Table) -> Table:
    rows, names, runs = [], [], []
    for group, numbers in loop.rows.items():
        cells = (cell for n in numbers for i in range(loop.iterations) for cell in loop.cells((n, i)))
        rows.append({whole_of(cell) for cell in cells})
        names.append(f"devices {list(group.devices)}")
        runs.append([_runs(loop, n) for n in numbers])
    check_cells(table, rows, names, runs)
    check_own_order(table)
    return table


def _runs(loop: LoopBlocks, number: int) -> str:
    """The cells that a block is, and for which micro-batches."""
    block, turns = loop.blocks[number], len(loop.spanning.phases)
    which = ", ".join(f"{stage}{kind}" for stage, kind in block.names)
    first, last = (loop.spanning.microbatch(block.phase, i) for i in (0, loop.iterations - 1))
    return f"{which} for micro-batches {first} to {last}" + (f", one in {turns}" if turns > 1 else "")


def _without_lacking(loop: LoopBlocks, plan: Published, table: Table) -> Table:
    """A published table without what this step lacks: an evaluation goes forward alone, and some stages compute nothing
    again.

    A `PlanWarning` says what else is left out: a stage whose parameters are frozen has no backward.
    """
    blocks = {whole_of(TableCell(*name, 0)) for number in loop.numbers for name in loop.blocks[number].names}

    def has(cell: TableCell) -> bool:
        return whole_of(replace(cell, microbatch=0)) in blocks

    lacking = {(cell.stage, cell.kind) for cell in table.cells() if cell.kind != "R" and not has(cell)}
    if lacking and any(cell.kind == "B" for cell in blocks):
        names = ", ".join(f"{stage}{kind}" for stage, kind in sorted(lacking))
        warn(
            f"the schedule '{plan.name}' has {names}, for which this step has no block: these stages have no such work "
            "(nothing in them is trained, say); the rest of the schedule runs as it is published",
            PlanWarning,
        )
    kept = [[tuple(cell for cell in entry.cells if has(cell)) for entry in row] for row in table.rows]
    return Table(tuple(tuple(cells[0] if len(cells) == 1 else Overlap(cells) for cells in row if cells) for row in kept))


def in_table_order(
    loop: LoopBlocks, table: Table, is_one: Callable[[Sequence[Entry]], bool] = lambda cells: True
) -> list[list[Entry]]:
    """What runs round by round, in the order of ``table``: blocks for an iteration each; several are one executable.

    Args:
        is_one: whether the cells of an overlapped entry are one executable; else each is one behind the other.

    Raises:
        OrderError: they would wait for each other.
    """
    numbers = sorted(loop.numbers, key=lambda n: loop.blocks[n].level)
    of_cell = grouped((cell, (n, i)) for n in numbers for i in range(loop.iterations) for cell in loop.cells((n, i)))
    named = set(table.cells())
    rows = []
    parts: set[Entry] = set()  # a cell's executables behind its first one
    for row in table.rows:
        ran: set[Cell] = set()  # a block that stands for cells of several entries runs with the first
        entries: list[Entry] = []
        for entry in row:
            cells: list[Entry] = []
            for cell in entry.cells:
                cells.append(tuple(dict.fromkeys(at for at in _blocks_of(cell, of_cell, named) if at not in ran)))
                ran.update(cells[-1])
            overlapped = len(list(filter(None, cells))) > 1 and not _hand_on(loop, cells) and is_one(cells)
            for run in [tuple(at for cell in cells for at in cell)] if overlapped else cells:
                executables = [run] if overlapped else _executables(loop, run)
                entries += executables
                parts.update(executables[1:])
        rows.append(entries)
    waits = {
        entry: {needed for n, at in enumerate(entry) for needed in loop.waits[at] if needed not in entry[:n]}
        for row in rows
        for entry in row
    }
    home = {at: entry for row in rows for entry in row for at in entry}
    needed = {entry: {home[at] for at in before} for entry, before in waits.items()}
    devices = [group.devices for group in loop.rows]

    def text(entry: Entry) -> str:
        return cells_text(loop, entry)

    def told(entry: Entry) -> str:
        return waiting_text(loop, entry)

    def aside(entry: Entry) -> bool:
        return entry in parts or all(loop.is_again(number) for number, _ in entry)

    return in_order(rows, needed, text, told, devices, aside)


def _executables(loop: LoopBlocks, entry: Entry) -> list[Entry]:
    """The blocks of one cell as what runs one after another: layers of a stack are apart from all else."""
    runs = itertools.groupby(entry, key=lambda at: loop.blocks[at[0]].of_layers)
    return [tuple(cells) for _, cells in runs]


def _hand_on(loop: LoopBlocks, cells: Sequence[Entry]) -> bool:
    """Whether of the cells of an overlapped entry one leaves a state that another one takes: they cannot be one executable.

    A `PlanWarning` says so.
    """
    run = [at for cell in cells for at in cell]
    if not any(other[1] != at[1] for n, at in enumerate(run) for other in loop.waits[at] & {*run[:n]}):
        return False
    apart = ", ".join(cells_text(loop, one) for one in cells)
    warn(
        f"the table overlaps {cells_text(loop, run)}, which hand on a state from one micro-batch to the next (a "
        f"running mean, say), or are in order: they run one after another, as {apart}",
        PlanWarning,
    )
    return True


def _blocks_of(cell: TableCell, known: Mapping[TableCell, Sequence[Cell]], named: Set[TableCell]) -> Iterable[Cell]:
    """The blocks that a cell stands for.

    A backward may be two blocks; an I or W without a block stands for none. In front of a backward stands what it computes
    again, if that has no cell among those ``named`` in the table.
    """
    kinds: tuple[BlockKind, ...] = (cell.kind,)
    if cell not in known:
        kinds = ("I", "W") if cell.kind == "B" else ("B",) if cell.kind == "I" else ()
    again = TableCell(cell.stage, "R", cell.microbatch)
    every = [again] if cell.kind in "BI" and again not in named else []
    every += [TableCell(cell.stage, kind, cell.microbatch) for kind in kinds]
    return [at for one in every for at in known.get(one, ())]
