"""Results as tables for people."""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Column, Table
from rich.text import Text

from jscaler.text.wrapping import column_widths, wrapped

LONG = 24  # words wider than that may be broken where a table has little room


class FittingTable(Table):
    """A table that takes the room there is: cells break between words, and where words do not fit it has fewer columns.

    Columns in which nothing stands are left out.

    Args:
        title: stands above.
        expendable: the columns that go first, the first of them before the others; then the last ones go. Those that went
            are named below.
    """

    def __init__(self, title: str, expendable: Sequence[str] = ()):
        super().__init__(title=title, title_justify="left")
        self.expendable = expendable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept, gone = [one for one in self.columns if not self.rows or any(map(str, one.cells))], list[str]()
        while (widths := _widths(kept, options.max_width)) is None and len(kept) > 1:
            going = next((one for name in self.expendable for one in kept if one.header == name), kept[-1])
            kept.remove(going)
            gone.append(str(going.header))
        made = Table(title=self.title, title_justify="left", caption_justify="left")
        made.caption = f"no room for: {', '.join(gone)}" if gone else None
        widths = widths or [options.max_width]
        for one, width in zip(kept, widths, strict=True):
            made.add_column(_broken(one.header, width), justify=one.justify, overflow="fold", width=width)
        for row, *cells in zip(self.rows, *(one.cells for one in kept), strict=True):
            made.add_row(*map(_broken, cells, widths), end_section=row.end_section)
        yield made


def _widths(columns: Sequence[Column], room: int) -> list[int] | None:
    texts = [[str(cell) for cell in (one.header, *one.cells)] for one in columns]
    return column_widths(texts, room - 3 * len(columns) - 1, LONG)  # a border and two spaces for each, and a last border


def _broken(cell: RenderableType, width: int) -> RenderableType:
    return Text("\n".join(wrapped(cell, width))) if isinstance(cell, str) else cell


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], expendable: Sequence[str] = ()
) -> FittingTable:  # fmt: skip
    """A table of strings and numbers; numbers are shown in four digits."""
    made = FittingTable(title, expendable)
    for name in header:
        made.add_column(name)
    for row in rows:
        made.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row))
    return made


def printed(parts: Iterable[str | Table], width: int) -> str:
    """Text and tables, one below the other, as plain text of ``width`` columns."""
    file = io.StringIO()
    console = Console(file=file, width=width)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return file.getvalue()


def aligned(table: Sequence[Sequence[str]], below: Sequence[Sequence[str]] | None = None) -> list[str]:
    """Columns as wide as their widest entry, but those in which nothing stands; after each row the lines below it."""
    header, *rows = table
    told = [i for i, name in enumerate(header) if not name or not rows or any(row[i] for row in rows)]
    table = [[row[i] for i in told] for row in table]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines: list[str] = []
    for number, row in enumerate(table):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += below[number] if below is not None else []
    return lines
