"""When a chain of stages runs the entries of a table, and how long groups wait."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from jscaler.tables.entry_seconds import Part, entry_seconds
from jscaler.tables.legal import chain_waits, in_order
from jscaler.tables.table import KINDS, BlockKind, Entry, Table, TableCell, cells_of, is_recompute
from jscaler.tables.tasks import Task, times_of
from jscaler.tables.timeline import TimedRun, Timeline


@dataclass(frozen=True)
class Turn:
    """An entry of a table, in the order in which entries are started.

    Attributes:
        waits: the places in that order of the entries that it reads.
    """

    row: int
    entry: Entry
    waits: tuple[int, ...]


def turns_of(table: Table, devices: Sequence[Sequence[int]] | None = None) -> tuple[Turn, ...]:
    """The entries of a chain of stages, each behind those that it reads.

    Args:
        devices: those of each row; by default rows share none.

    Raises:
        OrderError: blocks wait for each other.
    """
    waits = chain_waits(table)
    row_of = {entry: number for number, row in enumerate(table.rows) for entry in row}
    rounds = in_order(table.rows, waits, devices=devices, aside=is_recompute)
    place: dict[Entry, int] = {}
    found: list[Turn] = []
    for entry in (entry for entries_now in rounds for entry in entries_now):
        found.append(Turn(row_of[entry], entry, tuple(sorted(place[other] for other in waits[entry]))))
        place[entry] = len(found) - 1
    return tuple(found)


def turn_tasks(
    turns: Sequence[Turn],
    seconds: Callable[[TableCell], float],
    hop: Callable[[int, int], float],
    places: Sequence[tuple[Hashable, ...]],
) -> tuple[list[Task], list[int]]:
    """The tasks of ``turns``, hops among them, and the number of each turn's own.

    Args:
        hop: seconds from a row to another; hops between two rows follow one another, beside blocks.
        places: of each row.
    """
    tasks: list[Task] = []
    numbers: list[int] = []
    for turn in turns:
        arrived = []
        for place in turn.waits:
            arrived.append(numbers[place])
            row = turns[place].row
            taken = hop(row, turn.row) if row != turn.row else 0.0
            if taken:
                ends = (*places[row], *places[turn.row])
                tasks.append(Task(((row, turn.row),), taken, (numbers[place],), ends))
                arrived[-1] = len(tasks) - 1
        numbers.append(len(tasks))
        taken = entry_seconds([Part(seconds(cell)) for cell in turn.entry.cells])
        tasks.append(Task(places[turn.row], taken, tuple(arrived)))
    return tasks, numbers


UNITS: Mapping[BlockKind, float] = {kind: facts.units for kind, facts in KINDS.items()}


def simulate_table(
    table: Table,
    seconds: Mapping[BlockKind, float] = UNITS,
    hop: float = 0.0,
    devices: Sequence[Sequence[int]] | None = None,
    name: str = "table",
) -> Timeline:
    """When a chain of stages runs the entries of ``table``.

    Args:
        seconds: of a block of each kind; an overlapped entry takes as long as its blocks one after another.
        hop: seconds from group to group; hops run beside blocks.
        devices: those of each row; by default one each.

    Raises:
        OrderError: blocks wait for each other.
    """
    own = [tuple(own) for own in devices] if devices is not None else [(row,) for row in range(len(table.rows))]
    turns = turns_of(table, own)
    tasks, numbers = turn_tasks(turns, lambda cell: seconds[cell.kind], lambda first, second: hop, own)
    times = times_of(tasks)
    runs = [
        TimedRun(own[turn.row], str(turn.entry), turn.entry.cells, *times[number])
        for turn, number in zip(turns, numbers, strict=True)
    ]
    return Timeline(name, tuple(sorted(runs, key=lambda one: (one.begin, one.devices))))


def idle(timeline: Timeline, device: int) -> float:
    """How long a device waits between its first and its last run."""
    own = [one for one in timeline.runs if device in one.devices]
    return own[-1].end - own[0].begin - sum(one.seconds for one in own)


def most_activations(row: Sequence[Entry]) -> int:
    """The most forwards of a group whose activations are held, from F (or R, where that makes them again) until B or W; of
    stages without a backward none are."""
    last = {(cell.stage, cell.microbatch): cell for cell in cells_of(row) if cell.kind in "BW"}
    first = {(cell.stage, cell.microbatch): cell for kind in "FR" for cell in cells_of(row) if cell.kind == kind}
    live = most = 0
    for entry in row:
        own = [(cell, (cell.stage, cell.microbatch)) for cell in entry.cells]
        live += sum(first.get(place) == cell and place in last for cell, place in own)
        most = max(most, live)
        live -= sum(last.get(place) == cell for cell, place in own)
    return most
