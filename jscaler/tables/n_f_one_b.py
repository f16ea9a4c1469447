"""3F1B, and n for 3: a model goes over its own output n times, and only the last pass has a gradient (AlphaFold's
recycling). Between two backwards of a group stand n forwards, of n micro-batches that are a pass apart. (Lin et al.,
nnScaler, OSDI 2024, section 6.)

Pass k of micro-batch i is in round i + k d of a group, where d rounds are enough to go through the other groups and back;
its backward, p - 1 - s rounds behind the last pass. Only the last pass keeps activations: of at most p - s micro-batches,
as in 1F1B.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, TableCell


def n_f_one_b(groups: int, microbatches: int, chunks: int = 3) -> Table:
    """The table; pass k on group s is stage k p + s.

    Example:
        >>> print(n_f_one_b(2, 2, 3))
        0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1
        1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1
    """
    apart = -(-(groups - 1) // (chunks + 2))
    rows = []
    for s in range(groups):
        at: dict[TableCell, tuple[int, int]] = {}
        for i in range(microbatches):
            for k in range(chunks):
                at[TableCell(k * groups + s, "F", i)] = i + k * apart, k
            last = i + (chunks - 1) * apart
            at[TableCell((chunks - 1) * groups + s, "B", i)] = last + groups - 1 - s, chunks
        rows.append(tuple(sorted(at, key=lambda cell: at[cell])))
    return Table(tuple(rows))


THREE_F_ONE_B = Published("3f1b", "Lin et al., nnScaler, OSDI 2024", n_f_one_b, None, passes=True)
