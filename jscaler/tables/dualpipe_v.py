"""DualPipeV: two chunks on each group, in a V as in ZB-V; in the middle a forward of the one chunk runs with a backward of
the other, so that communication of the one (of experts, say) hides behind arithmetic of the other.
(DeepSeek-AI, DualPipe, 2025, its form on half as many devices: "cut in half".)

With the pair as one block of F&B, a group waits (p - 1)(F&B + B - 3W) for p groups.
"""

from collections.abc import Iterator

from jscaler.tables.published import Published, in_a_v
from jscaler.tables.table import BlockKind, Entry, Overlap, Table, TableCell


def dualpipe_v(groups: int, microbatches: int, chunks: int = 2) -> Table:
    """The table, in the eight steps of the publication.

    Example:
        >>> print(dualpipe_v(2, 4))
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3
    """
    return Table(tuple(tuple(_row(group, groups, microbatches)) for group in range(groups)))


def _row(group: int, groups: int, microbatches: int) -> Iterator[Entry]:
    first, last = group, 2 * groups - 1 - group
    behind = groups - 1 - group
    done: dict[tuple[int, str], int] = {}
    put_off: list[TableCell] = []

    def cell(stage: int, kind: BlockKind) -> TableCell:
        number = done.get((stage, kind), 0)
        done[stage, kind] = number + 1
        return TableCell(stage, kind, number)

    def backward(stage: int, apart: bool = False) -> TableCell:
        number = cell(stage, "B").microbatch  # counted so, whole or in two
        if not apart:
            return TableCell(stage, "B", number)
        put_off.append(TableCell(stage, "W", number))
        return TableCell(stage, "I", number)

    def both(forward: int, stage: int) -> Overlap:
        return Overlap((cell(forward, "F"), backward(stage)))

    for _ in range(2 * behind):
        yield cell(first, "F")
    for _ in range(group + 1):
        yield cell(first, "F")
        yield cell(last, "F")
    for _ in range(behind):
        yield backward(last, apart=True)
        yield put_off.pop(0)
        yield cell(last, "F")
    for number in range(microbatches - 2 * groups + group + 1):
        if number == 0 and group == groups - 1:  # nothing to hide, as both chunks are on one device
            yield cell(first, "F")
            yield backward(last)
        else:
            yield both(first, last)
        yield both(last, first)
    for _ in range(behind):
        yield backward(last)
        yield both(last, first)
    for number in range(group + 1):
        half = number - (group + 1) // 2
        yield backward(last, apart=half > 0 or (half == 0 and group % 2 == 1))
        yield backward(first, apart=half >= 0)
    for _ in range(behind):
        yield put_off.pop(0)
        yield backward(first, apart=True)
    yield from put_off


def _problem(groups: int, microbatches: int, chunks: int) -> str | None:
    if microbatches < 2 * groups:
        return f"each of the {2 * groups} stages has a micro-batch under way before the first pair"
    return None


DUALPIPE_V = Published("dualpipe_v", "DeepSeek-AI, DualPipe, 2025", dualpipe_v, 2, in_a_v, problem=_problem)
