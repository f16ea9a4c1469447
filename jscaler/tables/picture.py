"""A timeline as text: a row for each group, time to the right, a dot where it waits.

[0]  0F0 0F1  ·   ·   ·  0B0──── 0F2  ·  0B1────
[1]   ·  1F0 1B0──── 1F1 1B1──── …
"""

from collections.abc import Sequence

from jscaler.tables.timeline import Timeline
from jscaler.text.device_list import devices_text
from jscaler.text.tables import aligned

Shown = tuple[str, int, int]  # a cell, and when it begins and ends


def lines_of(rows: Sequence[tuple[str, Sequence[Shown]]], title: str, most: int | None = None) -> list[str]:
    """The rows over time, in whole units.

    Args:
        rows: what stands in front of each, and its cells.
        title: stands above; where more than ``most`` units are cut off, it says so.
    """
    cells = [cell for _, own in rows for cell in own]
    if not cells:
        return []
    first, last = min(begin for _, begin, _ in cells), max(end for _, _, end in cells)
    stop = last if most is None else min(last, first + most)
    if stop < last:
        title += f"; the first {stop - first} of {last - first} units"
    shown = [(text, begin, end) for text, begin, end in cells if begin < stop and end > begin]
    width = max(-(-(len(text) + 1) // (end - begin)) for text, begin, end in shown)
    return aligned([("devices", title), *((name, _line(own, first, stop, width)) for name, own in rows)])


def _line(cells: Sequence[Shown], first: int, stop: int, width: int) -> str:
    parts, time = [], first
    for text, begin, end in cells:
        if begin >= stop:
            break
        parts += ["·".center(width)] * (begin - time)
        room = (end - begin) * width
        drawn = text + "─" * (room - 1 - len(text)) if end - begin > 1 else text
        parts.append(drawn.ljust(room))
        time = end
    return "".join(parts).rstrip()


def picture(timeline: Timeline, unit: float = 1.0, most: int | None = None, title: str = "") -> str:
    """A timeline whose runs begin and end at whole multiples of ``unit``."""
    rows: dict[tuple[int, ...], list[Shown]] = {}
    for one in sorted(timeline.runs, key=lambda one: one.begin):
        text = ";".join(map(str, one.cells)) or one.name
        rows.setdefault(one.devices, []).append((text, round(one.begin / unit), round(one.end / unit)))
    return "\n".join(lines_of([(devices_text(own), rows[own]) for own in sorted(rows)], title, most))
