"""Looped breadth-first: a group has v chunks, as in interleaved 1F1B, and runs all micro-batches through one before the
next. (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023, section 3.)

It waits as interleaved 1F1B does, and holds all micro-batches; parameters that lie in parts are gathered once for each
chunk.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, make_cells


def breadth_first(groups: int, microbatches: int, chunks: int) -> Table:
    """The table.

    Example:
        >>> print(breadth_first(2, 2, 2))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    every = range(microbatches)
    rows = []
    for group in range(groups):
        stages = range(group, groups * chunks, groups)
        forward = [cell for stage in stages for cell in make_cells(stage, "F", every)]
        rows.append((*forward, *(cell for stage in reversed(stages) for cell in make_cells(stage, "B", every))))
    return Table(tuple(rows))


def _problem(groups: int, microbatches: int, chunks: int) -> str | None:
    if microbatches < groups:
        return f"with fewer than {groups} micro-batches, groups wait between chunks"
    return None


BREADTH_FIRST = Published("breadth_first", "Lamy-Poirier, 2023, section 3", breadth_first, None, problem=_problem)
