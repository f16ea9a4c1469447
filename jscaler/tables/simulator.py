"""When the blocks of a step run, and what waits: tasks in the order in which they are started, each on devices or on a
link.

A task begins when all it needs is free, and what it reads is there. Devices and links take tasks in the order in which they
are given, as streams of a GPU do; so going through them once, in that order, is the whole simulation::

    begin(task) = max(end of the last task of each of its devices and links, end of each task that it reads)
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from jscaler.tables.legal import chain_waits, in_order
from jscaler.tables.table import KINDS, BlockKind, Entry, Table, cells_of, is_recompute
from jscaler.tables.timeline import TimedRun, Timeline


@dataclass(frozen=True)
class Task:
    """What runs for ``seconds`` on each of ``places`` (devices, links), behind the earlier tasks ``waits``."""

    places: tuple[Hashable, ...]
    seconds: float
    waits: tuple[int, ...]


def times_of(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    """When each task begins and ends."""
    free: dict[Hashable, float] = {}
    found: list[tuple[float, float]] = []
    for task in tasks:
        begin = max((*(found[n][1] for n in task.waits), *(free.get(place, 0.0) for place in task.places)), default=0.0)
        end = begin + task.seconds
        free.update(dict.fromkeys(task.places, end))
        found.append((begin, end))
    return found


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
    waits = chain_waits(table)
    row_of = {entry: number for number, row in enumerate(table.rows) for entry in row}
    own = [tuple(own) for own in devices] if devices is not None else [(row,) for row in range(len(table.rows))]
    tasks: list[Task] = []
    entries: dict[int, Entry] = {}
    number_of: dict[Entry, int] = {}
    rounds = in_order(table.rows, waits, devices=own, aside=is_recompute)
    for entry in (entry for entries_now in rounds for entry in entries_now):
        row = row_of[entry]
        arrived = []
        for other in sorted(waits[entry], key=lambda one: number_of[one]):
            arrived.append(number_of[other])
            if hop and row_of[other] != row:
                tasks.append(Task(((row_of[other], row),), hop, (number_of[other],)))
                arrived[-1] = len(tasks) - 1
        number_of[entry] = len(tasks)
        entries[len(tasks)] = entry
        tasks.append(Task(own[row], sum(seconds[cell.kind] for cell in entry.cells), tuple(arrived)))
    times = times_of(tasks)
    runs = [TimedRun(own[row_of[e]], str(e), e.cells, *times[number]) for number, e in entries.items()]
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
