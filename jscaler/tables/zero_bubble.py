"""Zero-bubble schedules of one stage on each group: a backward block is cut into I, which the stage before waits for, and
W, which fills the time in which a group would wait. (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.)

*ZB-H1* runs F and I as 1F1B does, with W as many micro-batches behind I as there are stages before: it holds as much as
1F1B's first stage, and waits (p - 1)(F + I - W). *ZB-H2* begins with 2 (p - 1 - s) + 1 forwards, and W is 2 s behind: it
holds 2p - 1 micro-batches, and each group's own span has no gap, if F, I and W take one time.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, TableCell, make_cells


def zb_h1(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table.

    Example:
        >>> print(zb_h1(2, 3))
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return Table(tuple(_row(s, groups - 1 - s, s, microbatches) for s in range(groups)))


def zb_h2(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table.

    Example:
        >>> print(zb_h2(2, 4))
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    return Table(tuple(_row(s, 2 * (groups - 1 - s), 2 * s, microbatches) for s in range(groups)))


def _row(stage: int, ahead: int, behind: int, microbatches: int) -> tuple[TableCell, ...]:
    """``ahead`` forwards before the first pair of F and I, and W ``behind`` the I of its micro-batch."""
    ahead = min(ahead, microbatches)
    cells = make_cells(stage, "F", range(ahead))
    for number in range(microbatches):
        cells += make_cells(stage, "F", [ahead + number] if ahead + number < microbatches else [])
        cells.append(TableCell(stage, "I", number))
        cells += make_cells(stage, "W", [number - behind] if number >= behind else [])
    return (*cells, *make_cells(stage, "W", range(max(microbatches - behind, 0), microbatches)))


def _problem_of_h2(groups: int, microbatches: int, chunks: int) -> str | None:
    if microbatches < 2 * groups:
        return f"it has up to {2 * groups - 1} micro-batches under way, and needs twice as many as groups"
    return None


ZB_H1 = Published("zb_h1", "Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2", zb_h1)
ZB_H2 = Published("zb_h2", "Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.1", zb_h2, problem=_problem_of_h2)
