"""The cells of an op's grid, as several decisions assign them: box by box, each cell once."""

import dataclasses
from collections.abc import Container, Mapping, Sequence

import numpy as np

from jscaler.errors import PlanError, listing
from jscaler.primitives import Assign, Decision, GridAxis, Plan


def assignments(plan: Plan, ops: Container[str]) -> dict[str, list[Assign]]:
    """Of each of ``ops`` the decisions that assign its cells."""
    found: dict[str, list[Assign]] = {}
    for decision in plan.decisions:
        if isinstance(decision, Assign) and decision.op in ops:
            found.setdefault(decision.op, []).append(decision)
    return found


def with_one_each(plan: Plan, instead: Mapping[str, Assign]) -> Plan:
    """``plan`` with one decision on each of these ops, which stands where the last of several stood."""
    last = {d.op: d for d in plan.decisions if isinstance(d, Assign)}
    decisions: list[Decision] = []
    for decision in plan.decisions:
        if not isinstance(decision, Assign) or decision.op not in instead:
            decisions.append(decision)
        elif decision is last[decision.op]:
            decisions.append(instead[decision.op])
    return dataclasses.replace(plan, decisions=tuple(decisions))


def cell_places(op: str, axes: Sequence[GridAxis], decisions: Sequence[Assign]) -> np.ndarray:
    """The place of every cell of a grid. A decision with fewer places than cells puts all parts in time on the same.

    Raises:
        PlanError: a cell is assigned twice, or not at all.
    """
    places = np.full([a.parts for a in axes], None, object)
    for decision in decisions:
        box = places[(*(slice(*cut) for cut in decision.index), ...)]  # a view, also of a grid without axes
        shape = box.shape
        if len(decision.places) < box.size:
            shape = tuple(1 if a.time else n for a, n in zip(axes, shape, strict=True))
        new = np.broadcast_to(np.array(decision.places, object).reshape(shape), box.shape)
        for at in np.ndindex(box.shape):
            if box[at] is not None:
                cell = [start + i for (start, _), i in zip(decision.index, at, strict=True)]
                raise PlanError(f"cell {cell} of '{op}' is assigned twice: to {box[at]} and to {new[at]}")
        box[...] = new
    missing = [str(list(cell)) for cell in np.ndindex(places.shape) if places[cell] is None]
    if missing:
        raise PlanError(
            f"'{op}' was split into {places.size} cells and {len(missing)} of them have no device: {listing(missing)}; "
            "call op_assign for them"
        )
    return places
