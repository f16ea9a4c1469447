"""Schedules as tables: their text and files, those of the literature, what makes one legal, and how long it takes."""

from jscaler.tables.catalogue import SCHEDULES, schedule_named
from jscaler.tables.files import find_schedule, read_table, write_table
from jscaler.tables.published import Published
from jscaler.tables.table import BlockKind, Entry, Overlap, Table, TableCell

__all__ = [
    "SCHEDULES", "BlockKind", "Entry", "Overlap", "Published", "Table", "TableCell", "find_schedule", "read_table",
    "schedule_named", "write_table",
]  # fmt: skip
