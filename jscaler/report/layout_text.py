"""Layouts of a few devices as pictures in text: which devices hold which block.

                 0:1024
         ┌───────────────┐     R1 V4 D(2,1)
   0:512 │ 0 + 2 + 4 + 6 │     the upper half is the sum of what devices 0, 2, 4 and 6 hold
512:1024 │ 1 + 3 + 5 + 7 │     replicas would stand side by side: 0 4 + 1 5
         └───────────────┘
"""

import itertools
from collections.abc import Sequence

from jscaler.ir.mask import Interval, Share
from jscaler.materialize import Layout

Shares = tuple[Share, ...]


def layout_picture(layout: Layout, width: int = 120) -> list[str]:
    """The lines of a grid of blocks with the devices that hold them.

    Args:
        width: columns that it may take; no lines are returned where that is too few, or the tensor has more dims.
    """
    if len(layout.subdims) > 2:
        return []
    rows, columns, cells, idle = _blocks(layout)
    note = [f"nothing: {' '.join(map(str, idle))}"] if idle else []
    texts = [[cells[row, column] for column in columns] for row in rows]  # every block is held by somebody
    starts = [label.partition(":")[0] + ":" for label in columns if "·" not in label]
    tries = [_grid(rows, heads, texts) + note for heads in (columns, starts) if len(heads) == len(columns)]
    return next((lines for lines in tries if max(map(len, lines)) <= width), [])


def side_by_side(before: Sequence[str], after: Sequence[str], width: int) -> list[str]:
    """Two pictures with an arrow between them, or one above the other."""
    left, right = (max(map(len, lines), default=0) for lines in (before, after))
    if left + right + 7 > width:
        return [*before, "", *after]
    middle = min(len(before), len(after)) // 2
    pairs = itertools.zip_longest(before, after, fillvalue="")
    return [f"{a:{left}}   {'─►' if i == middle else '  '}  {b}".rstrip() for i, (a, b) in enumerate(pairs)]


def _blocks(layout: Layout) -> tuple[list[str], list[str], dict[tuple[str, str], str], list[int]]:
    """The rows' and the columns' labels, what stands in each cell, and the devices whose part is empty."""
    held: dict[tuple[str, str], dict[Shares, list[int]]] = {}
    starts: dict[str, list[Interval]] = {}
    idle = []
    for device, mask in sorted((d, layout.mask(i)) for i, d in enumerate(layout.mesh.devices)):
        if mask.size == 0:
            idle.append(device)
            continue
        labels = [_label(dim) for dim in mask.box]
        starts |= dict(zip(labels, map(list, mask.box), strict=True))
        row, column = [""] * (2 - len(labels)) + labels
        held.setdefault((row, column), {}).setdefault(mask.shares, []).append(device)
    rows, columns = (sorted({cell[side] for cell in held}, key=lambda label: starts.get(label, [])) for side in (0, 1))
    return rows, columns, {cell: _expression(shares) for cell, shares in held.items()}, idle


def _label(dim: Sequence[Interval]) -> str:
    return "·".join(f"{start}:{stop}" for start, stop in dim)


def _expression(held: dict[Shares, list[int]], level: int = 0) -> str:
    """``0 4 + 1 5`` for two summands with two replicas each, ``max(0, 1)`` for two maxima."""
    shares = next(iter(held))
    if level == len(shares):
        return " ".join(map(str, held[shares]))
    parts: dict[int, dict[Shares, list[int]]] = {}
    for path, devices in held.items():
        parts.setdefault(path[level].position, {})[path] = devices
    words = [_expression(parts[position], level + 1) for position in sorted(parts)]
    combiner = shares[level].combiner
    return " + ".join(words) if combiner == "add" else f"{combiner}({', '.join(words)})"


def _grid(rows: Sequence[str], columns: Sequence[str], texts: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(label), *(len(row[i]) + 2 for row in texts)) for i, label in enumerate(columns)]
    margin = max(map(len, rows)) + 1 if any(rows) else 0

    def rule(left: str, middle: str, right: str) -> str:
        return " " * margin + left + middle.join("─" * w for w in widths) + right

    lines = [" " * (margin + 1) + " ".join(c.center(w) for c, w in zip(columns, widths, strict=True)).rstrip()]
    lines = lines if any(columns) else []
    lines.append(rule("┌", "┬", "┐"))
    for label, row in zip(rows, texts, strict=True):
        body = "│".join(text.center(w) for text, w in zip(row, widths, strict=True))
        lines.append(f"{label.rjust(margin - 1)} │{body}│" if margin else f"│{body}│")
    return [*lines, rule("└", "┴", "┘")]
