"""The cells of an op's grid, as several decisions assign them: box by box, each cell once."""

from collections.abc import Sequence

import numpy as np

from jscaler.errors import PlanError, listing
from jscaler.primitives import Assign, GridAxis


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
