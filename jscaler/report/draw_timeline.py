"""Timelines as a picture: rows are devices, blocks coloured by kind with the number of the micro-batch, sends as arrows,
and below what the devices hold.
"""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jscaler.errors import PlanError, shown
from jscaler.report.draw_layout import COLORS, FAINT, INK, refuse_picture, save_picture
from jscaler.report.written import as_path
from jscaler.tables.table import KINDS
from jscaler.tables.timeline import Devices, TimedRun, Timeline, check_timeline
from jscaler.text.device_list import devices_text
from jscaler.text.units import readable_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {**{kind: facts.name for kind, facts in KINDS.items()}, "": "other blocks"}
KIND_COLORS = {**dict(zip(KINDS, (COLORS[i] for i in (0, 5, 2, 3, 1, 4, 6)), strict=False)), "": COLORS[7]}
MOST_ARROWS = 400
MOST_NUMBERS = 600  # of blocks; of more the numbers would be unreadable
GIB = 1 << 30
SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def draw_timelines(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Draw timelines above each other: a row for each device, its blocks in seconds.

    Args:
        path: of the picture; its ending says the format.
        timelines: what `simulate` or ``compiled.trace`` has given, one or more.

    Raises:
        UnknownNameError: the path's ending says no known format.
        JscalerError: matplotlib is missing, or the file cannot be written.
        PlanError: ``timelines`` are none.

    Example:
        >>> jscaler.draw_timelines("step.png", [jscaler.simulate(lowered, "4xH100-80GB")])
    """
    path = as_path("picture", path)
    if isinstance(timelines, Timeline) or not isinstance(timelines, Iterable):
        raise PlanError(f"draw_timelines takes timelines in a list, not {shown(timelines)}")
    timelines = [check_timeline("draw_timelines", one) for one in timelines]
    refuse_picture(path)
    save_picture(path, timeline_figure(timelines))


def timeline_figure(timelines: Sequence[Timeline]) -> "Figure":
    """Timelines one above the other (simulated above measured, say) on one scale of time, the memory of each below."""
    from matplotlib.figure import Figure

    heights = []
    for one in timelines:
        heights += [0.6 + 0.32 * len(one.alike)] + ([1.6] if one.memory else [])
    figure = Figure(figsize=(14, 0.9 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)[:, 0]
    longest = max((one.makespan for one in timelines), default=0.0)
    scale, unit = next(((s, name) for s, name in SCALES if longest >= s), SCALES[-1])
    place = 0
    for one in timelines:
        _rows(axes[place], one, scale)
        place += 1
        if one.memory:
            _memory(axes[place], one, scale)
            place += 1
    axes[-1].set_xlabel(unit, fontsize=9)
    _legend(figure, timelines)
    return figure


def _rows(axes: "Axes", timeline: Timeline, scale: float) -> None:
    rows = timeline.alike
    row_of = {device: number for number, own in enumerate(rows) for device in own}
    numbered = len(timeline.runs) <= MOST_NUMBERS
    for one in timeline.runs:
        for row in sorted({row_of[device] for device in one.devices}):
            _block(axes, one, row, scale, numbered)
    arrow = {"arrowstyle": "->", "color": INK, "lw": 0.7, "shrinkA": 0, "shrinkB": 0}
    for send in timeline.sends if len(timeline.sends) <= MOST_ARROWS else ():
        first, last = row_of[send.source[0]], row_of[send.target[0]]
        if first != last:
            down = 0.4 if last > first else -0.4
            axes.annotate(
                "",
                (send.end / scale, last - down),
                (send.begin / scale, first + down),
                arrowprops=arrow,
                annotation_clip=False,
            )
    axes.set_yticks(range(len(rows)), [devices_text(own) for own in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    exposed = f", sends show {readable_seconds(timeline.exposed)}" if timeline.exposed else ""
    title = f"{timeline.name}: {readable_seconds(timeline.makespan)}, of which devices wait {timeline.bubble:.1%}{exposed}"
    axes.set_title(title, fontsize=10, weight="bold", color=INK, loc="left")


def _block(axes: "Axes", run: TimedRun, row: int, scale: float, numbered: bool) -> None:
    """A block, in as many parts side by side as it has cells."""
    parts = [(cell.kind, str(cell.microbatch)) for cell in run.cells] or [("", "")]
    width = run.seconds / scale / len(parts)
    for number, (kind, text) in enumerate(parts):
        begin = run.begin / scale + number * width
        axes.barh(row, width, left=begin, height=0.8, color=KIND_COLORS[kind], edgecolor="white", linewidth=0.6)
        if numbered and text:
            axes.text(begin + width / 2, row, text, ha="center", va="center", fontsize=6, color=INK, clip_on=True)


def _memory(axes: "Axes", timeline: Timeline, scale: float) -> None:
    every: dict[Devices, Sequence[tuple[float, int]]] = {own: states for own, states in timeline.memory.items() if states}
    most = max((n for states in every.values() for _, n in states), default=0)
    size, unit = (GIB, "GiB") if most >= GIB else (GIB >> 10, "MiB")
    for number, (own, states) in enumerate(every.items()):
        times, sizes = zip(*states, strict=True)
        color = COLORS[number % len(COLORS)]
        axes.step(
            [t / scale for t in times], [n / size for n in sizes], where="post", lw=1, color=color, label=devices_text(own)
        )
    for capacity in {*timeline.capacity.values()} - {0}:
        axes.axhline(capacity / size, color=FAINT, lw=1, ls="--")
    axes.set_ylabel(unit, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(every) <= len(COLORS):
        axes.legend(fontsize=7, ncols=4, frameon=False, loc="lower right")


def _legend(figure: "Figure", timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    used = {cell.kind for one in timelines for run in one.runs for cell in run.cells}
    used |= {"" for one in timelines for run in one.runs if not run.cells}
    patches = [Patch(color=KIND_COLORS[kind], label=name) for kind, name in NAMES.items() if kind in used]
    figure.legend(handles=patches, fontsize=8, ncols=len(patches), frameon=False, loc="outside upper right")
