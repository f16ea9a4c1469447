"""The rows of `bench.paper` as pictures in docs/images: speed, memory, and the timelines of the paper's schedules."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import Row
from bench.paper_models import GPUS, PAPER, SIZES
from bench.paper_sweep import cluster_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent / "docs"
GROUPS, MICROBATCHES = 4, 8  # of the timelines
SCHEDULES = ("1f1b", "interlaced", "3f1b")
OLD, NEW, ABSENT, WIDTH = "#8899AA", "#2A7FBA", "#B00020", 0.38
GB = 1e9


def draw(rows: Sequence[Row], images: Path = DOCS / "images") -> list[Path]:
    """Speed and memory of the best new plan beside the best old one, where both were estimated; and timelines."""
    images.mkdir(parents=True, exist_ok=True)
    drawn = [images / "paper_speed.png", images / "paper_memory.png", images / "paper_timelines.png"]
    best = {
        (name, gpus): _best(rows, name, size, gpus) for name in SIZES for gpus, size in zip(GPUS, SIZES[name], strict=True)
    }
    _bars(drawn[0], best, _speed, "speed, by that of the best old plan (—: the paper's)")
    _bars(drawn[1], best, _memory, "GB of the fullest device (hatched: estimated)")
    _timelines(drawn[2])
    return drawn


def _best(rows: Sequence[Row], name: str, size: str, gpus: int) -> dict[bool, Row]:
    """The fastest row that fits, of old plans and of new ones."""
    own = [row for row in rows if row["model"] == f"{name}-{size}" and row["gpus"] == gpus and row["fits"]]
    return {new: min(some, key=_seconds) for new in (False, True) if (some := [row for row in own if row["new"] is new])}


def _seconds(row: Row) -> float:
    return float(row["step_seconds"])


def _bars(path: Path, best: dict[tuple[str, int], dict[bool, Row]], panel: Any, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(SIZES)), SIZES, strict=True):
        for place, gpus in enumerate(GPUS):
            panel(axes, name, place, best[name, gpus])
        axes.set_xticks(
            range(len(GPUS)), [f"{gpus}\n{size}" for gpus, size in zip(GPUS, SIZES[name], strict=True)], fontsize=8
        )
        axes.set_xlim(-0.6, len(GPUS) - 0.4)
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=10, weight="bold", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}; GPUs and sizes below; grey: best old plan, blue: best new plan", fontsize=10)
    figure.savefig(path, dpi=110)


def _speed(axes: "Axes", name: str, place: int, best: dict[bool, Row]) -> None:
    base = best.get(False) or best.get(True)
    for new, row in best.items():
        assert base is not None
        height = _seconds(base) / _seconds(row)
        _bar(axes, place, new, height, f"{height:.2f}", estimated=False)
        middle, plan = place + (WIDTH / 2 if new else -WIDTH / 2), row["plan"].split(":")[0]
        axes.text(middle, 0, f" {plan}", ha="center", va="bottom", rotation=90, fontsize=5.5, color="white")
    _missing(axes, place, best)
    if best:
        axes.plot([place, place + WIDTH], [PAPER[name]] * 2, color="black", linewidth=1.2)


def _memory(axes: "Axes", name: str, place: int, best: dict[bool, Row]) -> None:
    for new, row in best.items():
        _bar(axes, place, new, row["peak_bytes"] / GB, f"{row['peak_bytes'] / GB:.0f}", row.get("memory") != "XLA")
    _missing(axes, place, best)
    capacity = cluster_for(GPUS[place]).memory / GB
    axes.plot([place - WIDTH, place + WIDTH], [capacity, capacity], color="black", linewidth=0.8, linestyle=":")


def _bar(axes: "Axes", place: int, new: bool, height: float, text: str, estimated: bool) -> None:
    left = place if new else place - WIDTH
    hatch = "///" if estimated else None
    axes.bar(left, height, WIDTH, align="edge", color=NEW if new else OLD, edgecolor="white", hatch=hatch)
    axes.text(left + WIDTH / 2, height, text, ha="center", va="bottom", fontsize=5.5)


def _missing(axes: "Axes", place: int, best: dict[bool, Row]) -> None:
    for new in (False, True):
        if new not in best:
            axes.text(place + (WIDTH / 2 if new else -WIDTH / 2), 0, "×", ha="center", va="bottom", color=ABSENT)


def _timelines(path: Path) -> None:
    from jscaler.report.draw_timeline import draw_timelines
    from jscaler.tables import SCHEDULES as TABLES

    sys.path.insert(0, str(DOCS))
    gallery = importlib.import_module("gallery")  # a script beside the pages that it draws
    draw_timelines(path, [gallery.timeline(TABLES[name], GROUPS, MICROBATCHES) for name in SCHEDULES])
