"""The transitions between layouts, as a table; costs as in the RVD search of nnScaler (OSDI '24), section 4.

With n devices along the axis and x bytes per device before:

    D -> R   all_gather       (n-1)·x        D -> D   all_to_all    (n-1)·x/n
    V -> R   all_reduce     2·(n-1)·x/n      R -> D   slice         0
    V -> D   reduce_scatter   (n-1)·x/n      R -> V   value_mask    0

Only the last axis of a dim's tuple can be gathered or exchanged, and a new one goes last: blocks stay contiguous.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jscaler.ir.mask import Combiner
from jscaler.materialize.layout import Layout

Kind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "value_mask"]

BYTES = {  # bytes sent per device, as a multiple of x
    "all_gather": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "slice": lambda n: 0.0,
    "value_mask": lambda n: 0.0,
}


@dataclass(frozen=True)
class Transition:
    """One step of an adapter along mesh axes.

    Attributes:
        kind: the collective or local step.
        axes: the mesh axes it runs along, major first.
        source: the sub-dim that loses the axes, where there is one.
        target: the sub-dim that gains them, where there is one.
        combiner: how value shares are joined or made.
    """

    kind: Kind
    axes: tuple[str, ...]
    source: int | None = None
    target: int | None = None
    combiner: Combiner = "add"

    def bytes(self, layout: Layout, itemsize: int) -> float:
        """Bytes that each device sends when this is applied to ``layout``."""
        local = math.prod(layout.local_sizes) * itemsize
        return BYTES[self.kind](layout.mesh.size(self.axes)) * local

    def apply(self, layout: Layout) -> Layout:
        """The layout after this transition."""
        cuts = list(layout.cuts)
        values = layout.values
        if self.source is not None:
            assert cuts[self.source][-len(self.axes) :] == self.axes, f"{self} takes more than a suffix of {layout}"
            cuts[self.source] = cuts[self.source][: -len(self.axes)]
        if self.target is not None:
            cuts[self.target] += self.axes
        if self.kind in ("all_reduce", "reduce_scatter"):
            values = tuple(v for v in values if v[0] not in self.axes)
        if self.kind == "value_mask":
            order = {name: i for i, name in enumerate(layout.mesh.names)}
            values = tuple(sorted((*values, *((a, self.combiner) for a in self.axes)), key=lambda v: order[v[0]]))
        return dataclasses.replace(layout, cuts=tuple(cuts), values=values)

    def __str__(self) -> str:
        return f"{self.kind} over {'·'.join(self.axes)}"


def transitions_from(layout: Layout) -> Iterator[Transition]:
    """Every transition that ``layout`` allows.

    All-reduces run over any set of value axes and gathers over any suffix, since one collective over several axes sends
    less (or the same in one step); the others run along one axis at a time.
    """
    sizes = layout.local_sizes
    inner = _innermost(layout)  # shares of shares are joined from the inside
    for count in range(1, len(inner) + 1):
        for some in itertools.combinations(inner, count):
            yield Transition("all_reduce", some, combiner=layout.values[-1][1])
    for axis in inner if layout.values and layout.values[-1][1] == "add" else ():
        for target, size in enumerate(sizes):
            if size % layout.mesh.size(axis) == 0:
                yield Transition("reduce_scatter", (axis,), target=target)
    for source, axes in enumerate(layout.cuts):
        for start in range(len(axes)):
            yield Transition("all_gather", axes[start:], source=source)
        if axes:
            for target, size in enumerate(sizes):
                if target != source and size % layout.mesh.size(axes[-1]) == 0:
                    yield Transition("all_to_all", axes[-1:], source, target)
    for axis in layout.free:
        for target, size in enumerate(sizes):
            if size % layout.mesh.size(axis) == 0:
                yield Transition("slice", (axis,), target=target)
        inside = {c for a, c in layout.values if layout.mesh.names.index(a) > layout.mesh.names.index(axis)}
        for combiner in ("add", "max", "min"):
            if inside <= {combiner}:  # shares of another combiner that lie inside are made after it
                yield Transition("value_mask", (axis,), combiner=combiner)


def _innermost(layout: Layout) -> tuple[str, ...]:
    """The innermost axes of ``layout``'s value shares that have one combiner."""
    axes = [axis for axis, _ in itertools.takewhile(lambda v: v[1] == layout.values[-1][1], reversed(layout.values))]
    return tuple(axes[::-1])
