"""Tables from files, and to files: our text, and the CSV of ``torch.distributed.pipelining``.

In that CSV a line is a rank's, and a field an action: stage, kind and micro-batch as in our cells (``0F3``, ``1I2``,
``1W2``, ``2B0``), or ``(0F3;1B2)OVERLAP_F_B``. A field that is empty is a step in which the rank waits. Sends and receives
(``1SEND_F0``) and what gathers or drops parameters (``1UNSHARD``, ``1RESHARD``, ``1REDUCE_GRAD``) are left out: the plan
says what is sent, and how parameters lie.
"""

import csv
import io
import os
import re
from pathlib import Path

from jscaler.errors import PlanError, PlanWarning, UnknownNameError, listing, shown, warn
from jscaler.tables.catalogue import SCHEDULES, schedule_named
from jscaler.tables.published import Published
from jscaler.tables.table import Entry, Overlap, Table, parse_entry

_OVERLAP = "OVERLAP_F_B"
_SKIPPED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)\d*")


def find_schedule(schedule: "Published | Table | str | os.PathLike[str]") -> Published | Table:
    """A schedule by its name, by the text of its table, or by the file that holds one.

    Raises:
        UnknownNameError: there is no schedule, and no file, of that name.
        PlanError: a cell cannot be read, or there is none.
    """
    if isinstance(schedule, Published):
        return schedule
    if isinstance(schedule, Table):
        return _with_cells(schedule, "a table")
    if not isinstance(schedule, str | os.PathLike):
        raise PlanError(f"a schedule is a name, a Table, its text, or a file that holds one, not {shown(schedule)}")
    text = os.fspath(schedule)
    if (found := schedule_named(text)) is not None:
        return found
    is_file = not isinstance(schedule, str) or text.endswith((".csv", ".txt")) or os.path.exists(text)
    if not is_file and len(text.split()) > 1:
        return _with_cells(Table.parse(text), "a table")
    if not is_file:
        raise UnknownNameError("schedule", text, SCHEDULES, "; or give a table, its text, or a file that holds one")
    return _with_cells(read_table(text), f"the schedule '{text}'")


def _with_cells(table: Table, name: str) -> Table:
    """``table``; raises PlanError where nothing is in it."""
    if next(table.cells(), None) is None:
        raise PlanError(f"{name} has no cells; a cell is stage, kind and micro-batch, as in 0F3, and a row is a group's")
    return table


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a file: our text, or CSV.

    Raises:
        PlanError: there is no such file, or a cell cannot be read; says where.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # as a spreadsheet writes it
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PlanError(f"the schedule '{os.fspath(path)}' cannot be read: {why}") from error
    is_csv = "," in text or os.fspath(path).endswith(".csv") or _OVERLAP in text
    return parse_csv(text, os.fspath(path)) if is_csv else Table.parse(text)


def parse_csv(text: str, name: str = "the table") -> Table:
    """The table that CSV holds; one `PlanWarning` names the kinds of actions that are left out.

    Raises:
        PlanError: an action cannot be read; says in which line and field.
    """
    rows: list[tuple[Entry, ...]] = []
    skipped: dict[str, int] = {}
    for line, fields in enumerate(csv.reader(io.StringIO(text)), 1):
        row: list[Entry] = []
        for place, field in enumerate((field.strip() for field in fields), 1):
            other = _SKIPPED.fullmatch(field)
            if other is not None:
                skipped[other[1]] = skipped.get(other[1], 0) + 1
            elif field and field != "None":
                try:
                    row.append(parse_entry(field.removesuffix(_OVERLAP)))
                except PlanError as error:
                    raise PlanError(f"{name}, line {line}, field {place}: {error}") from error
        if fields:
            rows.append(tuple(row))
    if skipped:
        told = listing([f"{kind} ({count})" for kind, count in sorted(skipped.items())], len(skipped))
        left_out = "actions of these kinds are left out, as the plan says what is sent and how parameters lie"
        warn(f"{name}: {left_out}: {told}", PlanWarning)
    return Table(tuple(rows))


def csv_text(table: Table) -> str:
    """``table`` as CSV that ``torch.distributed.pipelining`` reads."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in table.rows:
        writer.writerow([f"{entry}{_OVERLAP}" if isinstance(entry, Overlap) else str(entry) for entry in row])
    return out.getvalue()


def write_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Write a table: as CSV, if the file's name ends so, else as our text."""
    Path(path).write_text(csv_text(table) if os.fspath(path).endswith(".csv") else f"{table}\n")
