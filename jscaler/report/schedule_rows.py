"""The schedule of a loop over device groups: what each group runs, and when, where a backward block takes two forward ones.

::

    devices  in time, a backward block as long as two forward ones
    [0 1]    0F0 0F1  ·   ·   ·  0B0──── 0F2  ·  0B1──── …
    [2 3]     ·  1F0 1B0──── 1F1 1B1──── …
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.estimate.timed_step import timed_step
from jscaler.lower.step_plan import StepPlan
from jscaler.tables.picture import lines_of
from jscaler.tables.simulator import UNITS
from jscaler.text.device_list import devices_text

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
    names = {number: own for number, own in step.instructions.names.items() if number not in step.instructions.ends}
    units = [sum(UNITS[kind] for _, kind in names.get(number, ())) for number in range(len(step.blocks))]
    found: dict[tuple[int, ...], list[tuple[str, int, int]]] = {group.devices: [] for group in step.under_way}
    for one in timed_step(step, units, [0] * len(step.transfers))[0]:
        time = int(one.begin)
        for cell in one.cells:
            end = time + int(UNITS[cell.kind])
            found[one.devices].append((str(cell), time, end))
            time = end
    return tuple(ScheduleRow([*devices], tuple(cells)) for devices, cells in found.items())


def picture(rows: Sequence[ScheduleRow]) -> list[str]:
    """The rows over time; a dot where a group waits."""
    title = "in time, a backward block as long as two forward ones"
    return lines_of([(devices_text(row.devices), row.cells) for row in rows], title, MOST_UNITS)
