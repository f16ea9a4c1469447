"""The schedule of a loop over device groups: what each group runs, and when, where a backward block takes two forward ones.

::

    devices  in time, a backward block as long as two forward ones
    [0 1]    0F0 0F1  ·   ·   ·  0B0──── 0F2  ·  0B1──── …
    [2 3]     ·  1F0 1B0──── 1F1 1B1──── …
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.estimate.step_time import timed_runs
from jscaler.lower.step_plan import StepPlan
from jscaler.tables.simulator import UNITS
from jscaler.text.device_list import devices_text
from jscaler.text.tables import aligned

MOST_UNITS = 36  # of a picture


@dataclass(frozen=True)
class ScheduleRow:
    """What a group runs.

    Attributes:
        cells: of the table, ``0F3``, each with the time at which it begins and ends, in forward blocks.
    """

    devices: list[int]
    cells: tuple[tuple[str, int, int], ...]


def schedule_rows(step: StepPlan) -> tuple[ScheduleRow, ...]:
    """A row for each group of the loop, in the order of the stages; none without such a loop."""
    names = step.instructions.names
    units = [sum(UNITS[kind] for _, kind in names.get(number, ())) for number in range(len(step.blocks))]
    found: dict[tuple[int, ...], list[tuple[str, int, int]]] = {group.devices: [] for group in step.under_way}
    for one in timed_runs(step, units, [0] * len(step.transfers)):
        time = int(one.begin)
        for cell in step.instructions.cells(one.run):
            end = time + int(UNITS[cell.kind])
            found[step.blocks[one.run.block].group.devices].append((str(cell), time, end))
            time = end
    return tuple(ScheduleRow([*devices], tuple(cells)) for devices, cells in found.items())


def picture(rows: Sequence[ScheduleRow]) -> list[str]:
    """The rows over time; a dot where a group waits."""
    if not rows:
        return []
    first = min(begin for row in rows for _, begin, _ in row.cells)
    last = max(end for row in rows for _, _, end in row.cells)
    shown = min(last, first + MOST_UNITS)
    width = max(len(text) for row in rows for text, begin, _ in row.cells if begin < shown) + 1
    title = "in time, a backward block as long as two forward ones"
    if shown < last:
        title += f"; the first {shown - first} of {last - first} forward blocks' time"
    table = [("devices", title)]
    table += [(devices_text(row.devices), _line(row, first, shown, width)) for row in rows]
    return aligned(table)


def _line(row: ScheduleRow, first: int, stop: int, width: int) -> str:
    parts, time = [], first
    for text, begin, end in row.cells:
        if begin >= stop:
            break
        parts += ["·".center(width)] * (begin - time)
        drawn = text + "─" * ((end - begin) * width - 1 - len(text)) if end - begin > 1 else text
        parts.append(drawn.ljust((end - begin) * width))
        time = end
    return "".join(parts).rstrip()
