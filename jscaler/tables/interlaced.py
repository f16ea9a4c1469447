"""Interlaced: what is large and little used (a table of embeddings, at both ends of the model) lies on all devices, between
the blocks of stages. (Lin et al., SuperScaler, 2023, and nnScaler, OSDI 2024, section 6.)

In each step every stage runs a forward and a backward, and behind it all devices run their blocks: the logits of the
micro-batch that has come through, the embedding's backward of another, the embedding of the next. So all wait for each
other once a step, which takes F + B. Even stages run F first, odd ones and the last B: a forward goes through two stages in
a step, from an even to an odd one, and a backward through one. So stage 0 holds half as many micro-batches again as in
1F1B: (3p + 1) // 2 of p > 1 stages, where m is large enough; the last holds one.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, TableCell


def interlaced(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table. Its first row is that of all devices: the stages 0 and p + 1; those between lie on a group each.

    Example:
        >>> print(interlaced(2, 2))
        0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """
    turn = (groups - 1) // 2 + groups  # steps from a forward of stage 0 to the backward of stage 0
    ends = dict[TableCell, tuple[int, int]]()
    rows: list[tuple[TableCell, ...]] = []
    for s in range(groups):
        second = s % 2 or s == groups - 1  # whether F is
        forward = {TableCell(s + 1, "F", i): (i + s // 2, int(second)) for i in range(microbatches)}
        backward = {TableCell(s + 1, "B", i): (i + turn - s, int(not second)) for i in range(microbatches)}
        at = forward | backward
        rows.append(tuple(sorted(at, key=lambda cell: at[cell])))
    for i in range(microbatches):  # behind which step, and where there
        through = i + (groups - 1) // 2
        ends |= {TableCell(0, "F", i): (i - 1, 2), TableCell(0, "B", i): (i + turn, 3)}
        ends |= {TableCell(groups + 1, "F", i): (through, 0), TableCell(groups + 1, "B", i): (through, 1)}
    everywhere = tuple(sorted(ends, key=lambda cell: ends[cell]))
    return Table((everywhere, *rows))


INTERLACED = Published("interlaced", "Lin et al., nnScaler, OSDI 2024", interlaced, everywhere=True)
