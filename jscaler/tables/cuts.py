"""What a table asks to have in blocks of their own."""

import itertools
from dataclasses import dataclass

from jscaler.tables.published import Published
from jscaler.tables.table import Table


@dataclass(frozen=True)
class Cuts:
    """What blocks are cut at, beside crossings.

    Attributes:
        forward: a backward is not run at once behind its forward, where it could be: on the last stage.
        weights: some gradients of weights run apart from those of inputs (W and I).
        recompute: what is computed again runs apart from the backward that reads it (R).
    """

    forward: bool = False
    weights: bool = False
    recompute: bool = False


def cuts_of(table: Table | Published | None) -> Cuts:
    """What a table needs, of a schedule its example's; of a last stage's forward and backward that always follow each
    other, one block is made."""
    if table is None:
        return Cuts()
    table = table.example if isinstance(table, Published) else table
    cells = list(table.cells())
    backward = {(cell.stage, cell.microbatch) for cell in cells if cell.kind in "BI"}
    last = max((stage for stage, _ in backward), default=None)
    at_once = {
        (one.stage, one.microbatch)
        for row in table.rows
        for first, second in itertools.pairwise(row)
        for one in [first.cells[0]]
        if one.kind == "F" and len(first.cells) == len(second.cells) == 1
        if second.cells[0].kind in "BI"
        and (second.cells[0].stage, second.cells[0].microbatch) == (one.stage, one.microbatch)
    }
    apart = any(stage == last and (stage, number) not in at_once for stage, number in backward)
    kinds = {cell.kind for cell in cells}
    return Cuts(apart, "W" in kinds, "R" in kinds)
