"""Local search over the rows of a table, for rows that share devices.

There the table does not say which of two rows goes first, and `jscaler.tables.legal.in_order` decides. So the solver's
order is not always the one that runs. Here every change is judged by the simulator.
"""

import random
from collections.abc import Sequence

from jscaler.tables.search.incumbents import Incumbent, incumbent
from jscaler.tables.search.problem import Devices, Problem
from jscaler.tables.table import Table

_FURTHEST = 6  # places by which an entry moves


def share_devices(rows: Sequence[Devices]) -> bool:
    """Whether two rows have a device in common."""
    every = [device for devices in rows for device in devices]
    return len(set(every)) < len(every)


def swapped(problem: Problem, best: Incumbent, tries: int, seed: int) -> Incumbent:
    """The table after so many random moves of an entry within its row, each of which is kept unless the step gets longer.

    Args:
        problem: its rows and limits of memory.
        best: the table to set out from.
        tries: how many moves.
        seed: of the random moves.
    """
    draw = random.Random(seed)
    for _ in range(tries):
        number = draw.randrange(len(best.table.rows))
        row = list(best.table.rows[number])
        place, by = draw.randrange(len(row)), draw.choice([-1, 1]) * draw.randint(1, _FURTHEST)
        entry = row.pop(place)
        row.insert(max(0, place + by), entry)
        rows = (*best.table.rows[:number], tuple(row), *best.table.rows[number + 1 :])
        moved = incumbent(problem, Table(rows), best.source.removesuffix(", moves") + ", moves")
        if moved is not None and moved.found.seconds <= best.found.seconds:
            best = moved
    return best
