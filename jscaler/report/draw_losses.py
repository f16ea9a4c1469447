"""Losses of runs as a picture: a curve for each, and crosses where one was evaluated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jscaler.report.draw_layout import COLORS, FAINT, refuse_picture, save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]  # steps and values
SMOOTH = 50  # steps whose mean is drawn, at the most a tenth of them


def draw_losses(path: Path, runs: Mapping[str, tuple[Curve, Curve]]) -> None:
    """Draw, for each run by its name, the losses of its steps and those of its evaluations.

    Raises:
        UnknownNameError, JscalerError, OutputError: as `jscaler.draw_timelines`.
    """
    refuse_picture(path)
    save_picture(path, losses_figure(runs))


def losses_figure(runs: Mapping[str, tuple[Curve, Curve]]) -> "Figure":
    """Each step's loss in a faint line, and the mean of the last steps in a strong one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, (losses, evaluated)) in enumerate(runs.items()):
        color, steps = COLORS[number % len(COLORS)], [step for step, _ in losses]
        values = [value for _, value in losses]
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _means(values, min(SMOOTH, len(values) // 10)), color=color, linewidth=1.6, label=name)
        axes.plot(*zip(*evaluated, strict=True), "x", color=color) if evaluated else None
    axes.set_xlabel("step")
    axes.set_ylabel("loss (× of an evaluation)")
    axes.grid(color=FAINT, linewidth=0.5, alpha=0.4)
    axes.legend(frameon=False)
    return figure


def _means(values: Sequence[float], most: int) -> list[float]:
    """Of each value and the ones before it, ``most`` in all."""
    found = []
    for place in range(len(values)):
        some = values[max(0, place + 1 - max(1, most)) : place + 1]
        found.append(sum(some) / len(some))
    return found
