"""``"search"``: a schedule that stands for one that is searched, for the blocks of the step at hand.

Its tables run one micro-batch after another. They say which blocks there are and where these lie; the search brings them
into another order (`jscaler.tables.search`). With two chunks and more, stages lie in a V.
"""

from collections.abc import Sequence

from jscaler.tables.legal import halves_of
from jscaler.tables.published import Published, in_a_v, one_each
from jscaler.tables.table import BlockKind, Table, TableCell, cells_of


def lies(groups: int, chunks: int) -> Sequence[int]:
    """The group of each stage: one on each, or there and back."""
    return one_each(groups, chunks) if chunks == 1 else in_a_v(groups, chunks)


def one_after_another(lies: Sequence[int], microbatches: int, kinds: Sequence[BlockKind]) -> Table:
    """The table of a chain of stages whose micro-batches do not overlap.

    Args:
        lies: the group of each stage.
        kinds: of blocks, in the order of a stage: F first, all others of the backward. The last stage, whose backward
            follows at once, has no R.

    Example:
        >>> print(one_after_another([0, 1], 2, ("F", "B")))
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1
    """
    rows: list[list[TableCell]] = [[] for _ in range(max(lies) + 1)]
    forward = list(enumerate(lies))
    for number in range(microbatches):
        for stage, group in forward:
            rows[group].append(TableCell(stage, "F", number))
        for stage, group in forward[::-1]:
            own: list[BlockKind] = [k for k in kinds if k != "F" and (k != "R" or stage + 1 < len(lies))]
            rows[group] += [TableCell(stage, kind, number) for kind in own]
    return Table(tuple(map(tuple, rows)))


def in_two(table: Table) -> Table:
    """``table`` with I and W in the place of each B.

    Example:
        >>> print(in_two(Table.parse("0F0 0R0 0B0")))
        0F0 0R0 0I0 0W0
    """
    rows = (
        (half for cell in cells_of(row) for half in (halves_of(cell) if cell.kind == "B" else (cell,)))
        for row in table.rows
    )
    return Table(tuple(map(tuple, rows)))


def make(groups: int, microbatches: int, chunks: int) -> Table:
    """Forwards, and backwards in one piece."""
    return one_after_another(lies(groups, chunks), microbatches, ("F", "B"))


def make_again(groups: int, microbatches: int, chunks: int) -> Table:
    """With what stages compute again as blocks of their own."""
    return one_after_another(lies(groups, chunks), microbatches, ("F", "R", "B"))


SEARCHED = Published(
    "search",
    "searched for the blocks of a step, not published",
    make,
    chunks=None,
    lies=lies,
    searched=True,
    make_again=make_again,
    fewest=1,
)
