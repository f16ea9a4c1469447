"""The plans that a search has priced, as a picture: seconds of a step against memory of a device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jscaler.plan_search.candidates import Candidate
from jscaler.report.draw_layout import COLORS, FAINT, INK
from jscaler.text.units import readable_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30
FARTHEST = 4.0  # times the memory of a device: what holds more is not drawn
SLOWEST = 2.0  # times the plan's seconds
NAMED = 6


def found_figure(
    candidates: Sequence[Candidate], chosen: Candidate | None, memory: float | None, bound: float, title: str
) -> "Figure":
    """Each plan as a point, its kind by color; the front of plans that no other beats in both as a line; the device's
    memory and the bound as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    axes = figure.add_subplot()
    shown = _near(candidates, chosen, memory)
    kinds = dict.fromkeys(_kind(one) for one in shown)
    color = dict(zip(kinds, COLORS * (1 + len(kinds) // len(COLORS)), strict=False))
    for kind in kinds:
        own = [one for one in shown if _kind(one) == kind]
        axes.scatter(
            [one.peak / GIB for one in own], [one.seconds for one in own], s=22, color=color[kind], label=kind, zorder=3
        )
    front = pareto(shown)
    axes.plot([one.peak / GIB for one in front], [one.seconds for one in front], color=FAINT, lw=1.2, zorder=2)
    for one in [*([chosen] if chosen is not None else []), *front][:NAMED]:
        weight = "bold" if one is chosen else "normal"
        place = (one.peak / GIB, one.seconds)
        axes.annotate(one.text, place, fontsize=6, color=INK, weight=weight, xytext=(3, 3), textcoords="offset points")
    if memory is not None:
        axes.axvline(memory / GIB, color=INK, lw=1, ls="--", label="memory of a device")
    if chosen is not None:
        axes.axhline(bound, color=FAINT, lw=1, ls=":", label=f"bound, {readable_seconds(bound)}")
    axes.set_xlabel("GiB on the device that holds most")
    axes.set_ylabel("seconds of a step")
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.legend(fontsize=7, frameon=False)
    return figure


def pareto(candidates: list[Candidate]) -> list[Candidate]:
    """Those of which no other is both faster and smaller, from the smallest on."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.peak, one.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def _near(candidates: Sequence[Candidate], chosen: Candidate | None, memory: float | None) -> list[Candidate]:
    """Those that hold and take not far more than the chosen plan may."""
    most = FARTHEST * memory if memory is not None else float("inf")
    slowest = SLOWEST * chosen.seconds if chosen is not None else float("inf")
    return [one for one in candidates if one.peak <= most and one.seconds <= slowest] or [*candidates]


def _kind(one: Candidate) -> str:
    """The plans around each other, without their numbers: ``pipeline, recompute_layers, megatron``."""
    numbers = one.point.numbers
    inner = [str(value) for name, value in numbers.items() if name.rpartition(".")[2] == "plan"]
    return ", ".join([one.text.partition("(")[0], *inner])
