"""A device's memory as a picture: kinds side by side against what the device has, and the largest contributors below."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jscaler.errors import JscalerError
from jscaler.estimate.memory import MEMORY_KINDS, Memory
from jscaler.report.draw_layout import COLORS, FAINT, INK, refuse_picture
from jscaler.report.target_report import TargetReport, heading, verdict
from jscaler.report.xla_memory import Contributor
from jscaler.text.units import readable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND_COLORS = dict(zip(MEMORY_KINDS, (COLORS[i] for i in (4, 1, 0, 3, 2, 7, 5)), strict=True))
MOST_BARS = 10
SMALL = 1e-3  # of the peak: what is less is not in the legend
GIB = 1 << 30


def draw_memory(path: Path, report: TargetReport) -> None:
    """Write the picture of ``memory_figure`` to ``path``.

    Raises:
        UnknownNameError: the path's ending says no known format.
        JscalerError: matplotlib is missing, or the file cannot be written.
    """
    refuse_picture(path)
    figure = memory_figure(report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise JscalerError(f"cannot write the picture {path}: {error}; choose another path") from None


def memory_figure(report: TargetReport) -> "Figure":
    """The memory of one device by kind, and what takes most of it."""
    from matplotlib.figure import Figure

    shown = [c for c in report.contributors[:MOST_BARS] if c.nbytes]
    figure = Figure(figsize=(11, 2.9 + 0.3 * len(shown)), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(1.0, 0.35 + 0.3 * len(shown)))
    figure.suptitle(heading(report), fontsize=11, weight="bold", color=INK, x=0.01, ha="left")
    _stack(upper, report.memory)
    _bars(lower, shown)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    return figure


def _stack(axes: "Axes", memory: Memory) -> None:
    left = 0.0
    for kind, size in memory.by_kind.items():
        width = size / GIB
        if width:
            label = f"{kind} {readable_bytes(size)}" if width > SMALL * memory.peak / GIB else None
            axes.barh(0, width, left=left, color=KIND_COLORS[kind], height=0.6, edgecolor=INK, linewidth=0.4, label=label)
            left += width
    capacity = memory.capacity / GIB
    axes.axvline(capacity, color=INK, linewidth=1.4, linestyle="--")
    axes.text(capacity, 0.36, f"{capacity:.2f} GiB ", fontsize=8, color=INK, ha="right", va="bottom")
    axes.set(yticks=[], ylim=(-0.4, 0.62), xlim=(0, 1.03 * max(left, capacity)), xlabel="GiB")
    axes.xaxis.label.set_fontsize(8)
    axes.set_title(verdict(memory).partition(";")[0], fontsize=9, loc="left", color=INK)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, -0.3), ncols=5, fontsize=8, frameon=False)
    axes.spines["left"].set_color(FAINT)


def _bars(axes: "Axes", shown: Sequence[Contributor]) -> None:
    largest = max((c.nbytes for c in shown), default=1)
    unit, size = ("GiB", GIB) if largest > GIB // 10 else ("MiB", 1 << 20)
    for row, one in enumerate(shown):
        width = one.nbytes / size
        axes.barh(row, width, color=KIND_COLORS[one.kind], height=0.7, edgecolor=INK, linewidth=0.4)
        arrays = f"{one.count} × {one.shape}" if one.shape else ""
        note = "  ".join(part for part in (readable_bytes(one.nbytes), arrays, one.source) if part)
        axes.text(width, row, f"  {note}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(shown)), [_short(one.op) for one in shown], fontsize=8)
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, 1.6 * largest / size))
    axes.set_title(f"held at the peak, {unit}", fontsize=9, loc="left", color=INK)


def _short(name: str) -> str:
    return name if len(name) <= 46 else f"…{name[-45:]}"
