"""Published schedules with recompute as a block of its own: R, what a stage computes again, in front of its backward.

::

    d0   0F0 0F1 0R0  ·  0B0── 0R1 0B1──     1F1B of two stages: R runs while the gradient is on its way. Where backwards
    d1    ·  1F0 1B0── 1F1 1B1──             follow their forwards at once, all is there still: such a stage has no R

R waits for its F alone, and B finds done what it reads. What R makes is held until B; of F only what R reads. A schedule
may have a table of its own for such blocks (`interlaced`). An *early* R runs one block earlier: it fills the time for
which that block waits, and what it makes is held for as long.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jscaler.tables.published import Published
from jscaler.tables.table import Entry, Table, TableCell, cells_of, is_recompute

When = Literal["late", "early"]
MARKS: Mapping[When, str] = {"late": "+R", "early": "+R early"}  # behind the name of a schedule


def recomputing(schedule: Published, when: When = "late") -> Published:
    """``schedule`` with R: in a table of its own, or else right in front of each backward; or one block earlier.

    Example:
        >>> from jscaler.tables import SCHEDULES
        >>> print(recomputing(SCHEDULES["1f1b"]).table(2, 3))
        0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
        >>> print(recomputing(SCHEDULES["1f1b"], "early").table(2, 3))
        0F0 0R0 0F1 0B0 0R1 0F2 0R2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """

    def make(groups: int, microbatches: int, chunks: int) -> Table:
        late = schedule.make_again or (lambda *numbers: with_recompute(schedule.make(*numbers)))
        table = late(groups, microbatches, chunks)
        return table if when == "late" else Table(tuple(map(_one_earlier, table.rows)))

    return dataclasses.replace(schedule, name=schedule.name + MARKS[when], make=make)


def _one_earlier(row: Sequence[Entry]) -> tuple[Entry, ...]:
    """``row`` with each R in front of the block before it, unless that is its F."""
    found: list[Entry] = []
    for entry in row:
        own = {TableCell(cell.stage, "F", cell.microbatch) for cell in entry.cells}
        before = found[-1] if found else entry
        early = is_recompute(entry) and not is_recompute(before) and own.isdisjoint(before.cells)
        found.insert(len(found) - early, entry)
    return tuple(found)


def with_recompute(table: Table) -> Table:
    """``table`` with an R right in front of each backward of the stages whose backwards do not all follow at once."""
    pairs = [({*cells_of(row[n - 1 : n])}, entry) for row in table.rows for n, entry in enumerate(row)]
    again = {
        c.stage for before, entry in pairs for c in _backwards(entry) if TableCell(c.stage, "F", c.microbatch) not in before
    }
    rows = (((*_again(entry, again), entry) for entry in row) for row in table.rows)
    return Table(tuple(tuple(entry for own in row for entry in own) for row in rows))


def _backwards(entry: Entry) -> list[TableCell]:
    return [cell for cell in entry.cells if cell.kind in "BI"]


def _again(entry: Entry, stages: set[int]) -> list[TableCell]:
    return [TableCell(cell.stage, "R", cell.microbatch) for cell in _backwards(entry) if cell.stage in stages]
