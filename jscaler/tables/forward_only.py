"""Forward only: an evaluation's micro-batches one behind the other. Any schedule does the same where a step has no
gradient.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, make_cells


def forward_only(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table.

    Example:
        >>> print(forward_only(2, 3))
        0F0 0F1 0F2
        1F0 1F1 1F2
    """
    return Table(tuple(tuple(make_cells(stage, "F", range(microbatches))) for stage in range(groups)))


FORWARD_ONLY = Published("forward_only", "Huang et al., GPipe, 2019", forward_only)
