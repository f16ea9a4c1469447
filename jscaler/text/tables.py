"""Results as tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table of strings and numbers; numbers are shown in four digits."""
    made = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        made.add_column(name, no_wrap=i == 0)
    for row in rows:
        made.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row))
    return made


def aligned(table: Sequence[Sequence[str]], below: Sequence[Sequence[str]] | None = None) -> list[str]:
    """Columns as wide as their widest entry; after each row the lines that stand below it."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines: list[str] = []
    for number, row in enumerate(table):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += below[number] if below is not None else []
    return lines
