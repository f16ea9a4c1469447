"""Interlaced: what is large and little used (a table of embeddings, at both ends of the model) lies on all devices, between
the blocks of stages. (Lin et al., SuperScaler, 2023, and nnScaler, OSDI 2024, section 6.)

The m + p - 1 steps of the stages: in each, stage s runs the forward of micro-batch t - s // 2 and the backward of t - (p -
1 - s // 2); even stages F first, odd stages B. Halves of steps are where stages hand on, and where all devices run their
blocks.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, TableCell


def interlaced(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table. Its first row is that of all devices: the stages 0 and p + 1; those between lie on a group each.

    Example:
        >>> print(interlaced(2, 2))
        0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """
    rows: list[tuple[TableCell, ...]] = []
    ends = {TableCell(0, "F", i): (2 * i, 2) for i in range(microbatches)}
    for s in range(groups):
        at: dict[TableCell, int] = {}
        for i in range(microbatches):
            forward = 2 * (i + s // 2) + s % 2
            backward = 2 * (i + groups - 1 - s // 2) + 1 - s % 2
            at |= {TableCell(s + 1, "F", i): forward, TableCell(s + 1, "B", i): backward}
            if s == 0:
                ends[TableCell(0, "B", i)] = backward + 1, 0
            if s == groups - 1:
                ends[TableCell(s + 2, "F", i)] = forward + 1, 3
                ends[TableCell(s + 2, "B", i)] = forward + 1, 4
        rows.append(tuple(sorted(at, key=lambda cell: at[cell])))
    everywhere = tuple(sorted(ends, key=lambda cell: (ends[cell], cell)))
    return Table((everywhere, *rows))


INTERLACED = Published("interlaced", "Lin et al., nnScaler, OSDI 2024", interlaced, everywhere=True)
