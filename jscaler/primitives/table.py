"""``Table``: in which order device groups run the blocks of a loop over micro-batches, as data.

    0F0 0F1 0B0 0B1        the first group: forward of stage 0 for micro-batch 0, then for 1, backward for 0, for 1
    1F0 1B0 1F1 1B1        the second

A row stands for a device group, in the order of their first stages; a cell is stage, kind of block, micro-batch.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jscaler.errors import PlanError

BlockKind = Literal["F", "B"]
_CELL = re.compile(r"(\d+)([A-Z])(\d+)")


@dataclass(frozen=True, order=True)
class TableCell:
    """A block for one micro-batch: forward or backward of a stage."""

    stage: int
    kind: BlockKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Table:
    """Rows of cells; ``str`` prints and `Table.parse` reads them.

    Example:
        >>> print(one_f_one_b(2, 3))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """

    rows: tuple[tuple[TableCell, ...], ...]

    @staticmethod
    def parse(text: str) -> "Table":
        """The table that is written so: a row in a line, cells between blanks.

        Raises:
            PlanError: a cell cannot be read.
        """
        return Table(tuple(tuple(map(_cell, line.split())) for line in text.strip().splitlines() if line.strip()))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def most_live(row: Sequence[TableCell]) -> int:
    """The most micro-batches of which a group has run something, and not all."""
    cells: dict[int, int] = {}
    for cell in row:
        cells[cell.microbatch] = cells.get(cell.microbatch, 0) + 1
    done: dict[int, int] = {}
    most = 0
    for cell in row:
        done[cell.microbatch] = done.get(cell.microbatch, 0) + 1
        most = max(most, sum(0 < n < cells[i] for i, n in done.items()), 1)
    return most


def _cell(text: str) -> TableCell:
    match = _CELL.fullmatch(text)
    if match is None or match[2] not in get_args(BlockKind):
        raise PlanError(
            f"'{text}' is no cell of a table: a cell is stage, kind ({' or '.join(get_args(BlockKind))}) and micro-batch, "
            "as in 0F3"
        )
    return TableCell(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))


def gpipe(stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards. (Huang et al., GPipe, 2019, section 2.3.)

    Example:
        >>> print(gpipe(2, 2))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    return Table(
        tuple(
            (*_cells(stage, "F", range(microbatches)), *_cells(stage, "B", range(microbatches))) for stage in range(stages)
        )
    )


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """One forward, one backward, after as many forwards as there are stages behind; so stage ``s`` holds at most
    ``stages - s`` micro-batches. (Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-flush, 2021.)
    """

    def row(stage: int) -> tuple[TableCell, ...]:
        ahead = min(stages - 1 - stage, microbatches)
        cells = [*_cells(stage, "F", range(ahead))]
        for number in range(microbatches):
            if ahead + number < microbatches:
                cells += _cells(stage, "F", [ahead + number])
            cells += _cells(stage, "B", [number])
        return tuple(cells)

    return Table(tuple(map(row, range(stages))))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def _cells(stage: int, kind: BlockKind, numbers: Iterable[int]) -> list[TableCell]:
    return [TableCell(stage, kind, number) for number in numbers]
