"""A table under the blocks of a problem: whether it is legal, when each block runs, and what each device holds.

Times are those of `jscaler.tables.tasks`: entries begin in the order of `in_order`, devices and links take them in that
order. Memory needs no times, as a device runs one entry after another: it holds what its entries so far have added, less
what they have let go.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jscaler.errors import OrderError, PlanError
from jscaler.tables.entry_seconds import Part, entry_seconds
from jscaler.tables.legal import check_cells, check_own_order, in_order, whole_of
from jscaler.tables.search.problem import Devices, Problem, SearchBlock
from jscaler.tables.table import Entry, Table, TableCell, is_recompute
from jscaler.tables.tasks import Task, times_of

Times = Mapping[TableCell, tuple[float, float]]


@dataclass(frozen=True)
class Replay:
    """How a table runs.

    Attributes:
        seconds: of a step.
        peaks: the most bytes that each device holds.
        times: when each cell begins and ends; cells of one entry have its times.
        hops: when the hop from an entry to another begins and ends, where it takes time.
    """

    seconds: float
    peaks: tuple[float, ...]
    times: Times
    hops: Mapping[tuple[Entry, Entry], tuple[float, float]]


def check_table(problem: Problem, table: Table) -> None:
    """Raise unless ``table`` has the blocks of ``problem``, each once and in the row of its devices.

    Raises:
        PlanError: a block is missing, stands twice, or in another row.
        OrderError: a stage has its blocks in a wrong order.
    """
    rows: dict[Devices, set[TableCell]] = {devices: set() for devices in problem.rows}
    for cell, block in problem.cells():
        rows[block.devices].add(whole_of(cell))
    names = [f"devices {', '.join(map(str, devices))}" for devices in problem.rows]
    check_cells(table, list(rows.values()), names)
    if {cell for cell, _ in problem.cells()} != set(table.cells()):
        raise PlanError(
            f"the table has other kinds of blocks than {problem.name}; a B may be I and W, and R may be missing"
        )
    check_own_order(table)


def fits(problem: Problem, found: Replay) -> bool:
    """Whether no device holds more than its limit."""
    limits = map(problem.limit, range(problem.devices))
    return all(limit is None or peak <= limit * (1 + 1e-9) for peak, limit in zip(found.peaks, limits, strict=True))


def replay(problem: Problem, table: Table) -> Replay:
    """How ``table`` runs.

    Raises:
        PlanError: it does not have the blocks of ``problem``.
        OrderError: blocks wait for each other.

    Example:
        >>> from jscaler.tables import SCHEDULES
        >>> from jscaler.tables.search.chain_problem import chain_problem, unit_costs
        >>> problem = chain_problem([unit_costs(("F", "B"))] * 2, lies=[0, 1], microbatches=4)
        >>> found = replay(problem, SCHEDULES["1f1b"].table(2, 4))
        >>> found.seconds, found.peaks
        (15.0, (2.0, 1.0))
    """
    check_table(problem, table)
    blocks = dict(problem.cells())
    home = {cell: entry for row in table.rows for entry in row for cell in entry.cells}
    hops = _hops(problem, home)
    row_of = {entry: number for number, row in enumerate(table.rows) for entry in row}
    waits = {entry: set(hops[entry]) for entry in row_of}
    started = [e for now in in_order(table.rows, waits, devices=problem.rows, aside=is_recompute) for e in now]
    tasks, numbers, sent = list[Task](), dict[Entry, int](), dict[tuple[Entry, Entry], int]()
    for entry in started:
        row = row_of[entry]
        arrived: list[int] = []
        for other in sorted(hops[entry], key=lambda other: numbers[other]):
            arrived.append(numbers[other])
            if hops[entry][other]:
                tasks.append(Task(((row_of[other], row),), hops[entry][other], (numbers[other],)))
                arrived[-1] = sent[other, entry] = len(tasks) - 1
        numbers[entry] = len(tasks)
        taken = entry_seconds([Part(blocks[cell].seconds) for cell in entry.cells])
        tasks.append(Task(problem.rows[row], taken, tuple(arrived)))
    found = times_of(tasks)
    times = {cell: found[numbers[entry]] for cell, entry in home.items()}
    peaks = _peaks(problem, [[blocks[cell] for cell in entry.cells] for entry in started])
    hop_times = {pair: found[number] for pair, number in sent.items()}
    return Replay(max(end for _, end in times.values()), peaks, times, hop_times)


def _hops(problem: Problem, home: Mapping[TableCell, Entry]) -> dict[Entry, dict[Entry, float]]:
    """For each entry those that it waits for, and the seconds of the hop from there."""
    found: dict[Entry, dict[Entry, float]] = {entry: {} for entry in home.values()}
    for microbatch in range(problem.microbatches):
        lane = problem.lane(microbatch)
        for edge in problem.edges:
            first, second = lane[edge.before], lane[edge.after]
            cells = TableCell(first.stage, first.kind, microbatch), TableCell(second.stage, second.kind, microbatch)
            before, after = home[cells[0]], home[cells[1]]
            if before == after and before.cells.index(cells[0]) > before.cells.index(cells[1]):
                raise OrderError(f"{before} has {cells[1]} in front of {cells[0]}, for which it waits")
            if before != after:
                hop = edge.hop if first.devices != second.devices else 0.0
                found[after][before] = max(found[after].get(before, 0.0), hop)
    return found


def _peaks(problem: Problem, started: list[list[SearchBlock]]) -> tuple[float, ...]:
    live, most = [0.0] * problem.devices, [0.0] * problem.devices
    for blocks in started:
        for device in blocks[0].devices:
            live[device] += sum(block.held for block in blocks)
            most[device] = max(most[device], live[device])
            live[device] -= sum(block.freed for block in blocks)
    return tuple(most)
