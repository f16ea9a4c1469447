"""What makes a table legal: every block once, on the group that it belongs to, and none waiting for itself.

Blocks of a chain of stages wait so: a forward for that of the stage before, a backward (or its I) for the forward and for
the backward of the stage behind, a W for its I; an R for its forward, and a backward for its R.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TypeVar

from jscaler.errors import OrderError, PlanError, listing
from jscaler.tables.table import Entry, Table, TableCell, cells_of

T = TypeVar("T")


def check_cells(
    table: Table, rows: Sequence[Set[TableCell]], names: Sequence[str], runs: Sequence[Sequence[str]] | None = None
) -> None:
    """Raise unless a table holds the blocks that it should, each once, and where it lies.

    Args:
        rows: the blocks of each group, F, R and B; the table may have I and W for a B, and an R in its B.
        names: what errors call the groups.
        runs: what they say that each group runs.

    Raises:
        PlanError: there are more rows than groups, or fewer; a block is missing, stands twice, or in another group's row.
    """
    if len(table.rows) != len(rows):
        raise PlanError(f"the table has {len(table.rows)} rows, and the loop's ops lie on {len(rows)} device groups")
    home = {cell: number for number, own in enumerate(rows) for cell in own}
    for number, (row, own) in enumerate(zip(table.rows, rows, strict=True)):
        counts = Counter(cells_of(row))
        halved = {whole_of(cell) for cell in counts if cell.kind in "IW"} & own
        wanted = {cell for cell in own - halved if cell.kind != "R" or cell in counts}
        wanted |= {half for cell in halved for half in halves_of(cell)}
        found = {
            "lacks": wanted - counts.keys(),
            "has twice": {cell for cell, count in counts.items() if count > 1},
            "has": counts.keys() - wanted,
        }
        told = [
            f"{what} {listing([_placed(c, number, home, names) for c in sorted(own)])}"
            for what, own in found.items()
            if own
        ]
        if told:
            told += [f"it runs {listing(runs[number])}"] if runs is not None else []
            raise PlanError(f"row {number} of the table, that of {names[number]}, {'; '.join(told)}")


def check_own_order(table: Table) -> None:
    """Raise unless each stage has its F in front of its R, that in front of its B or I, and its I in front of its W.

    A stage that passes no gradient on has an I that takes no time, and no block: its place is checked all the same.

    Raises:
        OrderError: a cell stands in front of one that it waits for.
    """
    for number, row in enumerate(table.rows):
        place = {cell: at for at, cell in enumerate(cells_of(row))}
        for cell, at in place.items():
            for other in _before(cell):
                if other.stage == cell.stage and place.get(other, at) > at:
                    raise OrderError(f"row {number} of the table has {cell} in front of {other}, for which it waits")


def _placed(cell: TableCell, row: int, home: Mapping[TableCell, int], names: Sequence[str]) -> str:
    """``cell``, and where it belongs, if not in ``row``."""
    own = home.get(whole_of(cell))
    return (
        f"{cell}, which does not run anywhere" if own is None else f"{cell}" + (f" of {names[own]}" if own != row else "")
    )


def whole_of(cell: TableCell) -> TableCell:
    """The B that an I or a W is a half of; any other cell is whole."""
    return TableCell(cell.stage, "B", cell.microbatch) if cell.kind in "IW" else cell


def halves_of(cell: TableCell) -> tuple[TableCell, TableCell]:
    """I and W of a B."""
    return TableCell(cell.stage, "I", cell.microbatch), TableCell(cell.stage, "W", cell.microbatch)


def chain_waits(table: Table) -> dict[Entry, set[Entry]]:
    """For each entry those of a chain of stages that run before it. Where a stage has no backward, nobody waits for one.

    The blocks of an overlapped entry run in its order: one that waits for a later one waits for its own entry.
    """
    of_cell = {cell: entry for row in table.rows for entry in row for cell in entry.cells}
    found: dict[Entry, set[Entry]] = {entry: set() for entry in of_cell.values()}
    for cell, entry in of_cell.items():
        earlier = entry.cells[: entry.cells.index(cell)]
        found[entry] |= {of_cell[other] for other in _before(cell) if other in of_cell and other not in earlier}
    return found


def _before(cell: TableCell) -> Iterable[TableCell]:
    stage, number = cell.stage, cell.microbatch
    if cell.kind == "W":
        return [TableCell(stage, "I", number)]
    if cell.kind == "F":
        return [TableCell(stage - 1, "F", number)]
    own = [TableCell(stage, "F", number)]
    if cell.kind == "R":
        return own
    return [*own, TableCell(stage, "R", number), TableCell(stage + 1, "B", number), TableCell(stage + 1, "I", number)]


def in_order(
    rows: Sequence[Sequence[T]],
    waits: Mapping[T, Set[T]],
    name: Callable[[T], str] = str,
    told: Callable[[T], str] | None = None,
    devices: Sequence[Sequence[int]] | None = None,
    aside: Callable[[T], bool] = lambda entry: False,
) -> list[list[T]]:
    """The entries of all rows round by round: in each, those heads of rows for which nothing is left to wait.

    Entries of one round share no devices, and those of the first rows go first. So blocks of all devices follow each other,
    where else those of single rows would stand between them, and all devices wait for the longest each time.

    Args:
        name: what errors call an entry.
        told: what they say of those that wait; by default as they call it.
        devices: those of each row; by default they share none.
        aside: what takes no round of its own, but runs in that of the entry before it, if it can.

    Raises:
        OrderError: blocks wait for each other; says what each head waits for.
    """
    left = [list(row) for row in rows]
    done: set[T] = set()
    found: list[list[T]] = []
    while any(left):
        ready = [number for number, row in enumerate(left) if row and waits[row[0]] <= done]
        if not ready:
            heads = [row[0] for row in left if row]
            lines = [
                f"{(told or name)(head)} waits for {', '.join(sorted(map(name, waits[head] - done)))}" for head in heads
            ]
            raise OrderError(f"blocks wait for each other: {'; '.join(lines)}")
        ready = ready if devices is None else _apart(ready, devices)
        now: list[T] = []
        for row in (left[number] for number in ready):
            own = [row.pop(0)]
            while row and aside(row[0]) and waits[row[0]] - {*own} <= done:
                own.append(row.pop(0))
            now += own
        found.append(now)
        done.update(now)
    return found


def _apart(rows: Sequence[int], devices: Sequence[Sequence[int]]) -> list[int]:
    """The first of ``rows``, and those behind it that share no devices with others taken."""
    taken: list[int] = []
    busy: set[int] = set()
    for row in rows:
        if busy.isdisjoint(devices[row]):
            taken.append(row)
            busy.update(devices[row])
    return taken
