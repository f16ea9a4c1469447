"""Exchanges of large tensors on smaller ones, which are cut in the same way.

    5120 × 20480 on 4 × 8 devices          D(4, 8): parts of 1280 × 2560
       8 ×    16                           the same layouts, steps and members; parts of 2 × 2

An exchange moves whole parts, and no step depends on the number of rows in a part. So each dim shrinks by a common divisor
of the rows of all parts on the way. A part keeps at least two rows, so that their order shows.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jscaler.ir.mask import Mask
from jscaler.materialize import Adapter, Layout
from jscaler.materialize.adapter import Stage
from jscaler.materialize.crossing import Crossing
from jscaler.verification.flow import Masks

Ratios = tuple[int, ...]  # per dim of a tensor, by how much it is smaller


def ratios_of(layouts: Iterable[Layout], fixed: Iterable[int] = ()) -> Ratios | None:
    """By how much a tensor may be smaller that lies in all of ``layouts`` on its way; None where it cannot.

    Args:
        fixed: dims that stay as they are.
    """
    every = list(layouts)
    if not all(layout.even for layout in every):
        return None
    found = []
    for dim in range(len(every[0].subdims)):
        rows = math.gcd(*(_rows(layout, dim) for layout in every))
        kept = next((n for n in range(2, rows) if rows % n == 0), rows)
        found.append(1 if dim in fixed else rows // kept)
    return tuple(found) if any(r > 1 for r in found) else None


def _last(sizes: Sequence[int]) -> int:
    """The place of the minor sub-dim: the last that is more than a row."""
    return max((i for i, size in enumerate(sizes) if size > 1), default=0)


def _rows(layout: Layout, dim: int) -> int:
    """How many rows of its minor sub-dim of ``dim`` a part has."""
    place = _last(layout.subdims[dim])
    return layout.subdims[dim][place] // layout.mesh.size(layout.by_dim[dim][place])


def smaller_layout(layout: Layout, ratios: Ratios) -> Layout:
    """``layout`` of a smaller tensor."""
    subdims = tuple(
        tuple(size // ratio if i == _last(sizes) else size for i, size in enumerate(sizes))
        for sizes, ratio in zip(layout.subdims, ratios, strict=True)
    )
    return dataclasses.replace(layout, subdims=subdims)


def smaller_masks(masks: Masks, ratios: Ratios) -> Masks | None:
    """``masks`` of a smaller tensor; None where a boundary would fall between its rows."""
    found = []
    for mask in masks:
        box, subdims = [], []
        for sizes, intervals, ratio in zip(mask.subdims, mask.box, ratios, strict=True):
            place = _last(sizes)
            if sizes[place] % ratio or any(end % ratio for end in intervals[place]):
                return None
            subdims.append(tuple(size // ratio if i == place else size for i, size in enumerate(sizes)))
            box.append(tuple((a // ratio, b // ratio) if i == place else (a, b) for i, (a, b) in enumerate(intervals)))
        found.append(Mask(tuple(subdims), tuple(box), mask.shares))
    return tuple(found)


def layouts_of(adapter: Adapter) -> list[Layout]:
    """All in which a tensor lies on its way."""
    return [adapter.source, adapter.target, *(layout for stage in adapter.stages for layout in stage.layouts)]


def smaller_adapter(adapter: Adapter, ratios: Ratios) -> Adapter | None:
    """``adapter`` of a smaller tensor; None where it pads."""
    stages = []
    for stage in adapter.stages:
        if stage.view != stage.start.local_sizes or stage.result != stage.layouts[-1].local_sizes:
            return None
        steps = tuple(
            step if step.to is None else step._replace(to=smaller_layout(step.to, ratios)) for step in stage.steps
        )
        start = smaller_layout(stage.start, ratios)
        made = Stage(start, steps, start.local_sizes, ())
        stages.append(dataclasses.replace(made, result=made.layouts[-1].local_sizes))
    source, target = (smaller_layout(layout, ratios) for layout in (adapter.source, adapter.target))
    return Adapter(source, target, tuple(stages), adapter.cost)


def smaller_crossing(crossing: Crossing) -> tuple[Crossing, Ratios] | None:
    """``crossing`` of a smaller tensor, and by how much it is; None where it cannot be."""
    ratios = ratios_of([*layouts_of(crossing.leave), *layouts_of(crossing.arrive)])
    if ratios is None:
        return None
    leave, arrive = (smaller_adapter(side, ratios) for side in (crossing.leave, crossing.arrive))
    return (Crossing(leave, arrive, crossing.cost), ratios) if leave is not None and arrive is not None else None
