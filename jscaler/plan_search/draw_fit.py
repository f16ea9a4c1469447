"""Memory over the step as a picture: a panel for each plan that was tried, bars by kind, against what a device has.

Each bar is the fullest moment of its stretch of kernels, in the order in which they run; of a loop one iteration. Below
the bars stands what runs: forward, backward, update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jscaler.estimate.memory import HELD_AS, Memory
from jscaler.plan_search.candidates import Candidate
from jscaler.plan_search.found import Found
from jscaler.report.draw_layout import FAINT, INK
from jscaler.report.draw_memory import GIB, KIND_COLORS, short
from jscaler.text.bars import stretches
from jscaler.text.units import readable_bytes
from jscaler.xla_model.lifetimes import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = {"forward": "#DDEEFF", "backward": "#FFE8CC", "update": "#E4F2DD"}
MOST_BARS = 96
MOST_PANELS = 12
PER_ROW = 3
TALLEST = 1.8  # of a device: what is higher is cut off
LOW = 0.25  # of a device: where all peaks are below, the panels are as high as they
BEYOND = "#B00020"


def fit_figure(found: Found, title: str) -> "Figure":
    """The plans that were tried and are legal, side by side on one scale; of many those that come nearest to fitting."""
    from matplotlib.figure import Figure

    shown = _shown(found)
    columns = min(PER_ROW, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(max(7.0, 4.6 * columns), 1.1 + 3.3 * rows), layout="constrained")
    heading = f"memory of one device over a step, {found.cluster.name}\n{title}"
    figure.suptitle(heading, fontsize=10, weight="bold", color=INK, x=0.01, ha="left")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel().tolist()
    assert found.memory is not None
    scale = _Scale.of(found.memory, [one.peak for one in shown])
    for axes, one in zip(panels, shown, strict=False):
        _panel(axes, found, one, scale)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels() if shown else ([], [])
    figure.legend(handles, labels, loc="outside lower center", ncols=len(HELD_AS), fontsize=8, frameon=False)
    return figure


@dataclass(frozen=True)
class _Scale:
    """What the panels share: a unit, and the top of the bars' room in units."""

    unit: str
    size: int
    top: float

    @staticmethod
    def of(capacity: float, peaks: Sequence[float]) -> "_Scale":
        highest = 1.2 * max(peaks, default=capacity)
        top = highest if highest < LOW * capacity else min(TALLEST * capacity, max(1.15 * capacity, highest))
        unit, size = ("GiB", GIB) if top > GIB // 10 else ("MiB", 1 << 20)
        return _Scale(unit, size, top / size)


def _shown(found: Found) -> list[Candidate]:
    legal = [one for one in found.candidates if one.cost is not None]
    near = sorted(legal, key=lambda one: (one is not found.chosen, one.peak))[:MOST_PANELS]
    return [one for one in legal if one in near]


def _panel(axes: "Axes", found: Found, one: Candidate, scale: _Scale) -> None:
    assert one.cost is not None
    assert one.flops_ratio is not None
    nbytes = one.capacity(found.memory)
    memory, timeline, top = one.cost.memory, one.cost.held.timeline, scale.top
    parts = stretches(len(timeline), MOST_BARS)
    moments = [max((timeline[i] for i in part), key=lambda m: m.nbytes) for part in parts]
    _bars(axes, moments, scale.size)
    _phases(axes, phases(moments, {path: op.kind for path, op in one.cost.by_op.items()}), top)
    device, capacity = f"a device: {readable_bytes(nbytes)}", nbytes / scale.size
    if capacity < top:
        axes.axhline(capacity, color=INK, linewidth=1.2, linestyle="--")
        axes.text(0, capacity, device, fontsize=7, color=INK, va="bottom")
    else:
        axes.text(0, top, f"{device} ↑", fontsize=7, color=INK, va="top")
    _peak(axes, moments, memory, scale, capacity)
    axes.set(xlim=(-0.5, len(moments) - 0.5), ylim=(-0.06 * top, top), xticks=[])
    axes.set_ylabel(scale.unit, fontsize=8)
    axes.tick_params(axis="y", labelsize=8, labelleft=True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    word = "fits" if found.fits(one) else "does not fit"
    color = INK if found.fits(one) else BEYOND
    text = f"{one.text}\n{readable_bytes(memory.peak)}, {one.flops_ratio:.2f}× FLOPs, {word}"
    axes.set_title(text, fontsize=8.5, loc="left", color=color, weight="bold" if one is found.chosen else "normal")


def _bars(axes: "Axes", moments: Sequence[Moment], size: int) -> None:
    bottoms = [0.0] * len(moments)
    for kind, name in HELD_AS.items():
        heights = [moment.kinds.get(kind, 0) / size for moment in moments]
        axes.bar(range(len(moments)), heights, 1.0, bottoms, color=KIND_COLORS[name], label=name, linewidth=0)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]


def phases(moments: Sequence[Moment], kinds: Mapping[str, str]) -> list[tuple[str, int, int]]:
    """Stretches of bars in which ops of one kind run, with the first and the last bar; what belongs to no op goes on."""
    found: list[tuple[str, int, int]] = []
    for number, moment in enumerate(moments):
        kind = kinds.get(moment.op, found[-1][0] if found else "forward")
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1], number)
        else:
            found.append((kind, number, number))
    return found


def _phases(axes: "Axes", found: Sequence[tuple[str, int, int]], top: float) -> None:
    for kind, first, last in found:
        axes.axvspan(first - 0.5, last + 0.5, ymax=0.06 / 1.06, color=PHASES.get(kind, "#EEEEEE"), linewidth=0)
    for kind in PHASES:
        longest = max((s for s in found if s[0] == kind), key=lambda s: s[2] - s[1], default=None)
        if longest is not None:
            middle = (longest[1] + longest[2]) / 2
            axes.text(middle, -0.03 * top, kind, fontsize=7, color=FAINT, ha="center", va="center")


def _peak(axes: "Axes", moments: Sequence[Moment], memory: Memory, scale: _Scale, capacity: float) -> None:
    at, top = max(range(len(moments)), key=lambda i: moments[i].nbytes), scale.top
    height = moments[at].nbytes / scale.size
    cut = height > 0.94 * top
    here = 0.97 * top if cut else height + 0.02 * top
    text = f"{readable_bytes(memory.peak)} in {short(memory.at or 'the results', 52)}"
    note: Any = {"fontsize": 7, "color": INK, "ha": "center", "va": "top" if cut else "bottom", "in_layout": False}
    note["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
    axes.plot([at], [here], marker="^" if cut else "v", color=BEYOND if cut else INK, markersize=5)
    label = here + (-0.035 if cut else 0.03) * top
    if abs(label - capacity) < 0.06 * top:
        label = capacity + 0.06 * top  # above what is said of a device
    axes.text((len(moments) - 1) / 2, label, text, **note)
