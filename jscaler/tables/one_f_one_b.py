"""1F1B: one forward, one backward, after as many forwards as there are stages behind; so stage s holds at most p - s
micro-batches. (Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-flush, 2021.)

A group waits (p - 1)(F + B), as in GPipe. *Eager*: twice as many forwards ahead, so that a forward is sent one block before
it is needed, and the hop hides behind that block. (Zhuang et al., On Optimizing the Communication of Model Parallelism,
2023, section 4; JaxPP, 2024.) It holds up to 2p - 1.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, TableCell, make_cells


def one_f_one_b(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table.

    Example:
        >>> print(one_f_one_b(2, 3))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    return Table(tuple(_row(stage, groups - 1 - stage, microbatches) for stage in range(groups)))


def eager_1f1b(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table.

    Example:
        >>> print(eager_1f1b(2, 3))
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    return Table(tuple(_row(stage, 2 * (groups - 1 - stage), microbatches) for stage in range(groups)))


def _row(stage: int, ahead: int, microbatches: int) -> tuple[TableCell, ...]:
    ahead = min(ahead, microbatches)
    cells = make_cells(stage, "F", range(ahead))
    for number in range(microbatches):
        if ahead + number < microbatches:
            cells.append(TableCell(stage, "F", ahead + number))
        cells.append(TableCell(stage, "B", number))
    return tuple(cells)


ONE_F_ONE_B = Published("1f1b", "Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-flush, 2021", one_f_one_b)
EAGER_1F1B = Published("eager_1f1b", "Zhuang et al., MLSys 2023, section 4", eager_1f1b)
