"""A device's memory as a picture: kinds side by side against what the device has, and the largest contributors below."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jscaler.estimate.memory import MEMORY_KINDS, Memory
from jscaler.report.draw_layout import COLORS, FAINT, INK
from jscaler.report.target_report import TargetReport, heading, verdict
from jscaler.report.xla_memory import Contributor
from jscaler.text.device_list import devices_text
from jscaler.text.units import readable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND_COLORS = dict(zip(MEMORY_KINDS, (COLORS[i] for i in (4, 1, 0, 3, 2, 7, 5)), strict=True))
MOST_BARS = 10
SMALL = 1e-3  # of the peak: what is less is not in the legend
GIB = 1 << 30


def memory_figure(report: TargetReport) -> "Figure":
    """The memory of one device by kind, of each stage where there are several, and what takes most of the fullest."""
    from matplotlib.figure import Figure

    shown = [c for c in report.contributors[:MOST_BARS] if c.nbytes]
    stages = 0.45 * (len(report.by_devices) - 1)
    figure = Figure(figsize=(11, 2.9 + stages + 0.3 * len(shown)), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(1.0 + stages, 0.35 + 0.3 * len(shown)))
    figure.suptitle(heading(report), fontsize=11, weight="bold", color=INK, x=0.01, ha="left")
    _stacks(upper, report)
    _bars(lower, shown)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    return figure


def _stacks(axes: "Axes", report: TargetReport) -> None:
    """A bar for each set of devices that hold alike, the first on top; the legend has the fullest's figures."""
    every, fullest = report.by_devices, report.fullest
    reached = max(_stack(axes, -row, one.memory, one is fullest) for row, one in enumerate(every))
    capacity = report.memory.capacity / GIB
    axes.axvline(capacity, color=INK, linewidth=1.4, linestyle="--")
    axes.text(capacity, 0.36, f"{capacity:.2f} GiB ", fontsize=8, color=INK, ha="right", va="bottom")
    axes.set(ylim=(-0.4 - len(every) + 1, 0.62), xlim=(0, 1.03 * max(reached, capacity)), xlabel="GiB")
    axes.set_yticks([-row for row in range(len(every))] if len(every) > 1 else [])
    if len(every) > 1:
        axes.set_yticklabels([f"{devices_text(one.devices)}\n{one.at}" for one in every], fontsize=7)
    axes.xaxis.label.set_fontsize(8)
    axes.set_title(verdict(report.memory).partition(";")[0], fontsize=9, loc="left", color=INK)
    axes.legend(
        loc="upper right", bbox_to_anchor=(1.0, -0.32 / (1 + 0.45 * (len(every) - 1))), ncols=5, fontsize=8, frameon=False
    )
    axes.spines["left"].set_color(FAINT)


def _stack(axes: "Axes", row: int, memory: Memory, named: bool) -> float:
    """Kinds side by side; returns how far they reach."""
    left = 0.0
    for kind, size in memory.by_kind.items():
        width = size / GIB
        if width:
            label = f"{kind} {readable_bytes(size)}" if named and width > SMALL * memory.peak / GIB else None
            axes.barh(row, width, left=left, color=KIND_COLORS[kind], height=0.6, edgecolor=INK, linewidth=0.4, label=label)
            left += width
    return left


def _bars(axes: "Axes", shown: Sequence[Contributor]) -> None:
    largest = max((c.nbytes for c in shown), default=1)
    unit, size = ("GiB", GIB) if largest > GIB // 10 else ("MiB", 1 << 20)
    for row, one in enumerate(shown):
        width = one.nbytes / size
        axes.barh(row, width, color=KIND_COLORS[one.kind], height=0.7, edgecolor=INK, linewidth=0.4)
        arrays = f"{one.count} × {one.shape}" if one.shape else ""
        note = "  ".join(part for part in (readable_bytes(one.nbytes), arrays, one.source) if part)
        axes.text(width, row, f"  {note}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(shown)), [short(one.op, 46) for one in shown], fontsize=8)
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, 1.6 * largest / size))
    axes.set_title(f"held at the peak, {unit}", fontsize=9, loc="left", color=INK)


def short(name: str, most: int) -> str:
    """The end of a name that is longer than ``most``."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
