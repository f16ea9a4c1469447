"""Starts of activities as tables, and back."""

from collections.abc import Mapping

from jscaler.tables.search.activities import Model
from jscaler.tables.search.finite import Slot, Starts, lane_of
from jscaler.tables.search.period import Periodic
from jscaler.tables.search.problem import Devices, Problem
from jscaler.tables.search.replay import Replay
from jscaler.tables.table import Table, TableCell


def table_of(problem: Problem, starts: Starts) -> Table:
    """The table whose rows run blocks in the order of their starts; of equal starts the order of a lane decides."""
    rank = {place: number for number, place in enumerate(problem.order)}
    rows: dict[Devices, list[tuple[int, int, int]]] = {devices: [] for devices in problem.rows}
    for (microbatch, place), start in starts.items():
        lane = problem.lane(microbatch)
        if place < len(lane):
            rows[lane[place].devices].append((start, rank[place], microbatch))
    found = []
    for row in rows.values():
        blocks = [(problem.lane(microbatch)[problem.order[number]], microbatch) for _, number, microbatch in sorted(row)]
        found.append(tuple(TableCell(block.stage, block.kind, microbatch) for block, microbatch in blocks))
    return Table(tuple(found))


def starts_of(problem: Problem, model: Model, found: Replay) -> dict[Slot, int]:
    """The starts of blocks and hops in a replay of a problem in ticks, with micro-batches of a lane in order."""
    begins: dict[Slot, int] = {}
    for microbatch in range(problem.microbatches):
        lane, activities = problem.lane(microbatch), lane_of(model, microbatch)
        cells = [TableCell(block.stage, block.kind, microbatch) for block in lane]
        for number, one in enumerate(activities.activities):
            if one.block is not None:
                begins[microbatch, number] = round(found.times[cells[number]][0])
                continue
            before = next(first for first, second in activities.edges if second == number)
            after = next(second for first, second in activities.edges if first == number)
            begins[microbatch, number] = round(found.hops[cells[before], cells[after]][0])
    return sorted_starts(model, begins)


def sorted_starts(model: Model, starts: Mapping[Slot, int]) -> dict[Slot, int]:
    """The same starts, dealt out so that each micro-batch of a lane runs each activity before the next one does."""
    found: dict[Slot, int] = {}
    for number, lane in enumerate(model.lanes):
        own = range(number, model.microbatches, len(model.lanes))
        for activity in range(len(lane.activities)):
            for microbatch, start in zip(own, sorted(starts[one, activity] for one in own), strict=True):
                found[microbatch, activity] = start
    return found


def repeated(model: Model, found: Periodic) -> dict[Slot, int]:
    """The starts of all micro-batches in a periodic schedule, which begins and ends with fewer of them under way."""
    lanes = len(model.lanes)
    return {
        (microbatch, number): start + microbatch // lanes * found.period
        for microbatch in range(model.microbatches)
        for number, start in enumerate(found.starts[microbatch % lanes])
    }
