"""A redistribution as a picture: per device what it holds before and after, and what happens between.

device 0    device 1
┌───────┐   ┌───────┐
│///////│   │.......│     a panel is the whole tensor, dim 0 down and dim 1 across; filled is what the device holds,
│       │   │       │     hatched where it is a value share
└───────┘   └───────┘
1  all_reduce over 2 devices
"""

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jscaler.errors import JscalerError, UnknownNameError
from jscaler.ir.mask import Mask, Share, runs
from jscaler.materialize import Layout
from jscaler.report.step_text import layout_text
from jscaler.report.written import check_file, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
MOST_DEVICES = 32
PER_LINE = 16
MOST_STAGES = 4  # of which those in between are drawn, too
NARROW = 8  # devices up to which panels are wide
# Okabe and Ito's colours, which colour-blind people tell apart; more devices take a scale that grows brighter
COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#F0E442", "#D55E00", "#999999")
HATCHES = ("////", "\\\\\\\\", "----", "xxxx", "||||", "++++", "//", "xx")
INK, FAINT, BAND = "#222222", "#777777", "#EEEEEE"


def refuse_picture(path: Path | None) -> None:
    """Refuse, before anything is computed, a picture that cannot be drawn; None is none.

    Raises:
        OutputError: no file can be written there.
        UnknownNameError: its name's ending says no known format.
        JscalerError: matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise UnknownNameError("picture format", path.suffix, FORMATS, f" (in the name '{path}')")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise JscalerError('pictures need matplotlib, which is not installed: pip install "jscaler[plot]"') from None
    check_file("picture", path)


def save_picture(path: Path, figure: "Figure", dpi: int = 120, **how: Any) -> None:
    """Write ``figure`` to ``path``, which `refuse_picture` lets through; its folder is made.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing("picture", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi, **how)


def draw_redistribution(path: Path, title: str, layouts: Sequence[Layout], labels: Sequence[str]) -> None:
    """Write the picture of ``redistribution_figure`` to ``path``.

    Raises:
        UnknownNameError: the path's ending says no known format.
        JscalerError: matplotlib is missing, or the file cannot be written.
    """
    refuse_picture(path)
    import matplotlib

    figure = redistribution_figure(title, layouts, labels)
    settings: Any = {"hatch.linewidth": 0.7, "svg.hashsalt": "jscaler"}  # and no date: the same picture is the same file
    stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
    with matplotlib.rc_context(settings):
        save_picture(path, figure, metadata=stamp)


def redistribution_figure(title: str, layouts: Sequence[Layout], labels: Sequence[str]) -> "Figure":
    """The layouts one below the other, and what happens between them.

    Args:
        layouts: first to last; those in between may be padded to larger sizes, and are left out where they are many.
        labels: a text for each step.

    Returns:
        A figure whose rectangles have ids: ``stage0-device3`` is the whole tensor, ``stage0-device3-box0`` what device
        3 holds of it in the layout that is drawn first.
    """
    drawing = _Drawing(layouts)
    drawing.text(title, 11, weight="bold")
    drawing.top += 0.06
    rows = _rows(layouts)
    for stage, (index, layout) in enumerate(rows):
        name = "before: " if index == 0 else "after: " if index == len(layouts) - 1 else f"after step {index}: "
        drawing.stage(stage, layout, name + layout_text(layout), 1.0 if index in (0, len(layouts) - 1) else 0.6)
        beyond = rows[stage + 1][0] if stage + 1 < len(rows) else index
        drawing.arrow([f"{i + 1}  {labels[i]}" for i in range(index, beyond)])
    drawing.top += 0.1
    for line in _caption(layouts):
        drawing.text(line, 8.5, color=FAINT)
    return drawing.finished()


def _rows(layouts: Sequence[Layout]) -> list[tuple[int, Layout]]:
    """The layouts that are drawn, with their numbers. A padded view of sub-dims has no place in the tensor."""
    shape = layouts[0].shape
    between = list(enumerate(layouts))[1:-1]
    clear = all(layout.shape == shape or all(len(dim) == 1 for dim in layout.subdims) for _, layout in between)
    return [(0, layouts[0]), *(between if clear and len(layouts) <= MOST_STAGES else []), (len(layouts) - 1, layouts[-1])]


def _caption(layouts: Sequence[Layout]) -> Iterator[str]:
    shape, devices = layouts[0].shape, max(len(layout.mesh.devices) for layout in layouts)
    sides = [f"dim {dim} ({size}) {way}" for dim, (size, way) in enumerate(zip(shape, _ways(shape), strict=False))]
    scale = "" if _ratio(shape)[1] else "; not to scale"
    yield (
        f"A panel is the whole tensor, {', '.join(sides) or 'a scalar'}{scale}. Filled: what the device holds; "
        "equal boxes are replicas."
    )
    if any(layout.values for layout in layouts):
        yield "Hatched: value shares; the values of a box are what its shares come to, added unless max or min is said."
    if len(shape) > 2:
        yield f"Only dims 0 and 1 of {len(shape)} are drawn; the others' ranges stand below the panels."
    if devices > MOST_DEVICES:
        yield f"The first {MOST_DEVICES} of {devices} devices are drawn."


def _drawn(layout: Layout) -> list[int]:
    """The devices that have a panel."""
    return sorted(layout.mesh.devices)[:MOST_DEVICES]


def _ways(shape: tuple[int, ...]) -> tuple[str, ...]:
    return ("across",) if len(shape) == 1 else ("down", "across")


def _ratio(shape: tuple[int, ...]) -> tuple[float, bool]:
    """Height by width of a panel, and whether that is the tensor's own."""
    if len(shape) < 2:
        return 0.35, True
    true = shape[0] / shape[1]
    drawn = min(max(true, 0.6), 1.3)
    return drawn, drawn == true


class _Drawing:
    """A figure in the making, in inches from its top left corner; ``top`` is where the next thing goes."""

    def __init__(self, layouts: Sequence[Layout]):
        from matplotlib.figure import Figure

        self.shape = layouts[0].shape
        self.devices = sorted({device for layout in layouts for device in _drawn(layout)})
        self.columns = min(max(len(_drawn(layout)) for layout in layouts), PER_LINE)
        self.wide = self.columns <= NARROW
        self.panel, gap = (1.15, 0.3) if self.wide else (0.74, 0.16)
        self.pitch = self.panel + gap
        self.width = max(self.columns * self.pitch + 0.4, 8.0)
        self.figure = Figure()
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.top = 0.15

    def text(self, words: str, size: float, left: float = 0.2, **style: Any) -> None:
        """A paragraph over the whole width."""
        for line in textwrap.wrap(words, int((self.width - 0.4) * 128 / size)):
            self.axes.text(left, self.top, line, fontsize=size, va="top", **{"color": INK, **style})
            self.top += size * 0.021

    def arrow(self, labels: Sequence[str]) -> None:
        """A band with what happens, and an arrowhead that points on."""
        from matplotlib.patches import Polygon, Rectangle

        if not labels:
            return
        self.top += 0.06
        start, self.top = self.top, self.top + 0.08
        band = Rectangle((0.2, start), self.width - 0.4, 0, color=BAND, zorder=0)
        self.axes.add_patch(band)
        for label in labels:
            self.text(label, 9.5, left=0.3)
        band.set_height(self.top - start)
        middle = self.width / 2
        head = [(middle - 0.25, self.top), (middle + 0.25, self.top), (middle, self.top + 0.16)]
        self.axes.add_patch(Polygon(head, color=BAND, zorder=0))
        self.top += 0.22

    def stage(self, number: int, layout: Layout, name: str, scale: float) -> None:
        """A row of panels, one for each device; more than ``PER_LINE`` take several lines."""
        self.text(name, 10)
        width = self.panel * scale
        height = width * _ratio(self.shape)[0]
        devices = _drawn(layout)
        for start in range(0, len(devices), self.columns):
            line = devices[start : start + self.columns]
            masks = [layout.mask(layout.mesh.devices.index(device)) for device in line]
            notes = [_notes(mask, self.shape, self.wide) for mask in masks]
            for i, (device, mask) in enumerate(zip(line, masks, strict=True)):
                left = 0.2 + i * self.pitch + (self.pitch - width) / 2
                self._label(left + width / 2, self.top + 0.08, f"device {device}", 8.5 if scale == 1 else 7.5)
                color = self.devices.index(device)
                self._panel(f"stage{number}-device{device}", color, mask, (left, self.top + 0.24, width, height))
                for j, note in enumerate(notes[i]):
                    self._label(left + width / 2, self.top + 0.34 + height + 0.14 * j, note, 7.5)
            self.top += 0.36 + height + 0.14 * max(map(len, notes))

    def _label(self, x: float, y: float, words: str, size: float) -> None:
        """Words over the middle of a panel, smaller where they would reach the next one's."""
        size = min(size, self.pitch * 118 / max(len(words), 1))
        self.axes.text(x, y, words, fontsize=size, ha="center", va="center_baseline", color=INK)

    def _panel(self, name: str, color: int, mask: Mask, place: tuple[float, float, float, float]) -> None:
        from matplotlib.patches import Rectangle

        left, top, width, height = place
        for i, ((y0, y1), (x0, x1)) in enumerate(itertools.product(*sides(mask, self.shape))):
            corner = (left + x0 * width, top + y0 * height)
            box = Rectangle(corner, (x1 - x0) * width, (y1 - y0) * height, gid=f"{name}-box{i}", zorder=1)
            box.set(facecolor=_color(color, len(self.devices)), edgecolor=INK)
            box.set_linewidth(min(0.5, 6 * box.get_width(), 6 * box.get_height()))  # thin boxes are not all edge
            if mask.shares:
                box.set_hatch(HATCHES[_share_number(mask.shares) % len(HATCHES)])
            self.axes.add_patch(box)
        frame = Rectangle((left, top), width, height, gid=name, lw=0.9, fill=False, edgecolor=FAINT, zorder=2)
        self.axes.add_patch(frame)

    def finished(self) -> "Figure":
        """The figure, as high as what it holds."""
        height = self.top + 0.1
        self.figure.set_size_inches(self.width, height)
        self.axes.set(xlim=(0, self.width), ylim=(height, 0))
        self.axes.axis("off")
        return self.figure


def sides(mask: Mask, shape: tuple[int, ...]) -> list[list[tuple[float, float]]]:
    """What ``mask`` covers of dim 0 and of dim 1, in runs, as fractions of their sizes; a tensor of one dim lies across."""
    if mask.size == 0:
        return [[], []]
    found = [
        [(start / size, min(stop, size) / size) for start, stop in runs(sizes, box) if start < size]
        for sizes, box, size in zip(mask.subdims, mask.box, shape, strict=True)
    ]
    return [[(0.0, 1.0)]] * (2 - len(found)) + found[:2]


def _notes(mask: Mask, shape: tuple[int, ...], wide: bool) -> list[str]:
    """What stands below a panel: which share, and which elements where there is room or they are not drawn."""
    dims = [
        f"{box[0][0]}:{min(box[0][1], size)}" if len(box) == 1 else "·".join(f"{a}:{b}" for a, b in box)
        for box, size in zip(mask.box, shape, strict=True)
    ]
    named = dims if len(dims) <= 2 else [f"dim {i}: {text}" for i, text in enumerate(dims)][2:]
    share = [_share_text(mask.shares)] if mask.shares else []
    if mask.size == 0:
        return ["nothing"]
    return [*share, *([", ".join(named)] if named and (wide or len(dims) > 2) else [])]


def _share_text(shares: Sequence[Share]) -> str:
    """``share 0 of 4``; ``max`` in place of ``share`` where they are not added."""
    words = ["share" if share.combiner == "add" else share.combiner for share in shares]
    return ", ".join(f"{word} {share.position} of {share.count}" for word, share in zip(words, shares, strict=True))


def _share_number(shares: Sequence[Share]) -> int:
    number = 0
    for share in shares:
        number = number * share.count + share.position
    return number


def _color(index: int, count: int) -> Any:
    from matplotlib import colormaps

    if count <= len(COLORS):
        return COLORS[index]
    return tuple(0.25 + 0.75 * c for c in colormaps["viridis"](index / (count - 1))[:3])
