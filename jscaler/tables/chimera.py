"""Chimera: every group has two stages, one for micro-batches that go down the groups and one for those that go up; so
weights lie on two groups, and their gradients are joined behind the loop. (Li and Hoefler, Chimera, 2021, section 3.1.)

::

    time  0 1 2 3 4 5 6 7 8 9          F and B of one time, 4 groups; micro-batches 0 and 2 go down, 1 and 3 go up
    d0   F0 . F2 F1 B1 F3 B3 B0 . B2

In units of p micro-batches: down go p / 2 of them, two slots apart, and up the others; where the ones have a slot the
others have none. Units follow each other without a gap; even micro-batches go down, odd ones up.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, TableCell


def chimera(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table; stage s of a micro-batch lies on group s if it is even, else on p - 1 - s.

    Example:
        >>> print(chimera(2, 2))
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
    """
    rows = []
    for group in range(groups):
        at: dict[TableCell, int] = {}
        for microbatch in range(microbatches):
            stage = group if microbatch % 2 == 0 else groups - 1 - group
            unit, place = divmod(microbatch, groups)
            begin = 2 * groups * unit + 2 * (place // 2)
            at[TableCell(stage, "F", microbatch)] = begin + stage
            at[TableCell(stage, "B", microbatch)] = begin + 2 * groups - 1 - stage
        rows.append(tuple(sorted(at, key=lambda cell: at[cell])))
    return Table(tuple(rows))


def _up(groups: int, chunks: int) -> list[int]:
    return list(range(groups))[::-1]


def _problem(groups: int, microbatches: int, chunks: int) -> str | None:
    if groups % 2:
        return "the two directions share groups in pairs"
    if microbatches % groups:
        return f"micro-batches go in units of {groups}"
    return None


CHIMERA = Published("chimera", "Li and Hoefler, Chimera, 2021", chimera, lies_turned=_up, problem=_problem)
