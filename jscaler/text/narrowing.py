"""Text that was written in lines of any width, on a screen: tables of `aligned` keep columns, sentences words."""

import itertools
import re
from collections.abc import Iterator, Sequence

from jscaler.text.wrapping import column_widths, wrapped

GAP = 2  # spaces between columns
LONG = 40  # a word as wide as that is not broken, but has its column in a line of its own
DETAIL = re.compile(r" *└ ")  # a line below a row, which is no row

Row = list[str]


def narrowed(text: str, width: int) -> str:
    """``text`` in lines of ``width`` columns; what fits stays as it is.

    Of a table that is wider, cells are broken between words. Where that is not enough the last columns go into further
    lines below each row, under headers that do the same.
    """
    lines = text.split("\n")
    found: list[str] = []
    while lines:
        count = _table_length(lines)
        block, lines = lines[: count or 1], lines[count or 1 :]
        found += _table(block, width) if count else _sentence(block[0], width)
    return "\n".join(found)


def _sentence(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    gaps = [found.end() for found in re.finditer(r"^ *(?:└ )?|  +", line) if found.end() <= width // 2]
    return [part.rstrip() for part in wrapped(line, width, hang=gaps[-1] if gaps else 0)]  # below what follows a gap


def _starts(header: str) -> list[int]:
    """Where columns begin: behind two spaces and more."""
    return [found.start() for found in re.finditer(r"(?:(?<=\s\s)|^)\S", header)]


def _table_length(lines: Sequence[str]) -> int:
    """How many lines from the first on are a table: a header, and rows whose cells begin where its words do."""
    starts = _starts(lines[0])
    if len(starts) < 2:
        return 0

    def inside(line: str) -> bool:
        apart = all(not line[start - GAP : start].strip() for start in starts[1:])
        return bool(line.strip()) and (apart or DETAIL.match(line) is not None)

    rows = list(itertools.takewhile(inside, lines[1:]))
    return 1 + len(rows) if rows else 0


def _table(lines: Sequence[str], width: int) -> list[str]:
    if all(len(line) <= width for line in lines):
        return list(lines)
    starts = _starts(lines[0])
    ends = [*starts[1:], None]
    indent = starts[0]
    if len(starts) == 2 and any("  " in line[starts[1] :].strip() for line in lines):
        return _picture(lines, starts[1], width)
    rows = [[line[a:b].rstrip() for a, b in zip(starts, ends, strict=True)] for line in lines if not DETAIL.match(line)]
    bands = list(_bands(list(zip(*rows, strict=True)), width - indent))
    found: list[str] = []
    left = iter(rows)
    for line in lines:
        found += _sentence(line, width) if DETAIL.match(line) else _row(next(left), bands, indent)
    return found


def _picture(lines: Sequence[str], start: int, width: int) -> list[str]:
    """Rows over time: cut at the same place in all of them, and the rest below, with the same names."""
    title, *rows = [line[start:] for line in lines]
    names = [line[:start] for line in lines]
    found = [(names[0] if i == 0 else " " * start) + text for i, text in enumerate(wrapped(title, width - start))]
    while any(rows):
        cut = width - start
        while cut > 1 and any(len(row) > cut and row[cut - 1 : cut + 1].isalnum() for row in rows):
            cut -= 1  # no name of a block is broken
        found += [(name + row[:cut]).rstrip() for name, row in zip(names[1:], rows, strict=True)]
        rows = [row[cut:] for row in rows]
    return found


def _bands(columns: Sequence[Sequence[str]], room: int) -> Iterator[list[int]]:
    """The widths of the columns that stand side by side, then of those in the lines below."""
    indent = 0
    while columns:
        count = len(columns)
        while (widths := column_widths(columns[:count], room - indent - GAP * (count - 1), LONG)) is None and count > 1:
            count -= 1
        yield widths or [room - indent]
        columns, indent = columns[count:], 2 * GAP


def _row(cells: Row, bands: Sequence[Sequence[int]], indent: int) -> list[str]:
    """The lines of a row; those below are moved to the right, and left out where nothing is in them."""
    found: list[str] = []
    for number, widths in enumerate(bands):
        own, cells = cells[: len(widths)], cells[len(widths) :]
        margin = " " * (indent + (2 * GAP if number else 0))
        texts = [wrapped(cell, width) for cell, width in zip(own, widths, strict=True)]
        for parts in itertools.zip_longest(*texts, fillvalue="") if any(map(str.strip, own)) else ():
            line = (" " * GAP).join(part.ljust(width) for part, width in zip(parts, widths, strict=True))
            found.append((margin + line).rstrip())
    return found
