"""What a person sees of a command: its output on a terminal of some width, line by line, and what is wrong with it."""

import itertools
import re
from collections.abc import Iterator, Sequence

import pyte

FULL = 4  # times as wide a screen as the command is told, so that a line that is too long is seen whole
HISTORY = 100_000


def shown(output: bytes, columns: int) -> list[str]:
    """The lines that a terminal is left with, those above its top included; lines longer than ``columns`` stay whole."""
    screen = pyte.HistoryScreen(FULL * columns, 50, history=HISTORY, ratio=1)
    screen.set_mode(pyte.modes.LNM)  # what a terminal's driver does: a new line begins on the left
    pyte.ByteStream(screen).feed(output)
    rows = [*screen.history.top, *(screen.buffer[i] for i in range(screen.lines))]
    lines = ["".join(row[i].data for i in range(screen.columns)).rstrip() for row in rows]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def faults(lines: Sequence[str], columns: int) -> list[str]:
    """What a person would miss: lines that are too long, cells that end in "…", columns with no header or with no cell."""
    found = [f"{len(line)} columns: {line}" for line in lines if len(line) > columns]
    text = " ".join(" ".join(lines).split())
    for line in lines:
        for cut in re.findall(r"[│┃] *([^│┃]*?)… *(?=[│┃])", line):
            if not cut or not re.search(re.escape(cut) + r"[^…]", text):
                found.append(f"cut: {line}")
    for head, body in _tables(lines):
        for number, (name, cells) in enumerate(zip(head, zip(*body, strict=True), strict=True)):
            if not name.strip():
                found.append(f"column {number} of '{lines[0]}…' has no header")
            if not any(cell.strip() for cell in cells):
                found.append(f"column {number}, '{name.strip()}', is empty")
    return found


def _tables(lines: Sequence[str]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The headers and the rows' lines of each table that has borders."""
    for first, line in enumerate(lines):
        if not line.startswith("┏"):
            continue
        bars = [found.start() for found in re.finditer("[┏┳┓]", line)]
        last = next((i for i in range(first, len(lines)) if lines[i].startswith("└")), len(lines))
        inside = lines[first + 1 : last]
        cells = [[one[a + 1 : b] for a, b in itertools.pairwise(bars)] for one in inside if one[:1] in "┃│"]
        tall = sum(one.startswith("┃") for one in inside)
        head = ["".join(parts) for parts in zip(*cells[:tall], strict=True)]
        yield head, cells[tall:]
