"""Interleaved 1F1B: a group has v chunks of the model, the stages g, g + p, g + 2p, … of v p; micro-batches go through them
in rounds of p. (Narayanan et al., Efficient Large-Scale Language Model Training, 2021, section 2.2.)

A group waits a v-th of what it waits in 1F1B, and sends v times as much.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, TableCell


def interleaved(groups: int, microbatches: int, chunks: int) -> Table:
    """The table. The k-th forward of a group is of chunk (k // p) mod v, and backwards go through the chunks from the
    last; 2 (p - 1 - g) + (v - 1) p forwards are ahead of the first backward.

    Example:
        >>> print(interleaved(2, 2, 2))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """

    def cell(group: int, k: int, backward: bool) -> TableCell:
        chunk = k // groups % chunks
        stage = (chunks - 1 - chunk if backward else chunk) * groups + group
        return TableCell(stage, "B" if backward else "F", k // (groups * chunks) * groups + k % groups)

    def row(group: int) -> tuple[TableCell, ...]:
        count = microbatches * chunks
        ahead = min(2 * (groups - 1 - group) + (chunks - 1) * groups, count)
        cells = [cell(group, k, False) for k in range(ahead)]
        for k in range(count):
            cells += [cell(group, ahead + k, False)] if ahead + k < count else []
            cells.append(cell(group, k, True))
        return tuple(cells)

    return Table(tuple(map(row, range(groups))))


def _problem(groups: int, microbatches: int, chunks: int) -> str | None:
    if microbatches % groups:
        return f"micro-batches go in rounds of {groups}, one for each group"
    return None


INTERLEAVED = Published("interleaved", "Narayanan et al., 2021, section 2.2", interleaved, None, problem=_problem)
