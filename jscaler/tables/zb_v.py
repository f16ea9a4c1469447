"""ZB-V: a group has two chunks, the stages g and 2p - 1 - g, so that micro-batches come back to the group that they began
on; I and W are apart, and no group holds more than 1F1B's first. (Qi et al., Pipeline Parallelism with Controllable Memory,
2024, section 3, and Zero Bubble Pipeline Parallelism, 2023, section 6.)
"""

from collections.abc import Iterator

from jscaler.tables.published import Published, in_a_v
from jscaler.tables.table import BlockKind, Table, TableCell


def zb_v(groups: int, microbatches: int, chunks: int = 2) -> Table:
    """The table. The order is written down for 2p - 1 micro-batches or more; of fewer, what there is.

    Example:
        >>> print(zb_v(2, 2))
        0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
        1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
    """
    return Table(tuple(tuple(_row(group, groups, microbatches)) for group in range(groups)))


def _row(group: int, groups: int, microbatches: int) -> Iterator[TableCell]:
    first, last = group, 2 * groups - 1 - group
    every = max(microbatches, 2 * groups - 1)
    done: dict[tuple[int, BlockKind], int] = {}

    def run(*blocks: tuple[int, BlockKind]) -> Iterator[TableCell]:
        """The next micro-batch through each of ``blocks``, if there is one."""
        for stage, kind in blocks:
            number = done.get((stage, kind), 0)
            done[stage, kind] = number + 1
            if number < microbatches:
                yield TableCell(stage, kind, number)

    for _ in range(2 * (groups - group) - 1):
        yield from run((first, "F"))
    for _ in range(group):
        yield from run((last, "F"), (first, "F"))
    for _ in range(groups - group):
        yield from run((last, "F"), (last, "I"), (last, "W"))
    while done[last, "F"] < every:
        if done[first, "F"] < every:
            yield from run((first, "F"))
        yield from run((first, "I"), (first, "W"), (last, "F"), (last, "I"), (last, "W"))
    for _ in range(group):
        yield from run((first, "I"), (last, "I"))
    for _ in range(groups - group):
        yield from run((first, "I"), (first, "W"))
    for _ in range(done[last, "W"], every):
        yield from run((last, "W"))
    for _ in range(done[first, "W"], every):
        yield from run((first, "W"))


ZB_V = Published("zb_v", "Qi et al., Pipeline Parallelism with Controllable Memory, 2024", zb_v, 2, in_a_v)
