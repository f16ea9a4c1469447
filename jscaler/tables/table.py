"""``Table``: in which order device groups run the blocks of a loop over micro-batches, as data.

    0F0 0F1 0B0 0B1        the first group: forward of stage 0 for micro-batch 0, then for 1, backward for 0, for 1
    1F0 1B0 1F1 1B1        the second

A row stands for a device group, in the order of their first stages. A cell is stage, kind of block, micro-batch. Kinds are
F, forward; B, backward; or instead of one B two blocks: I, the gradient of the stage's input, which the stage before it
waits for, and W, the gradients of its weights, which nobody does. R is what a plan computes again of a stage's forward, for
its backward; it waits for nothing but its F, and is a part of B (or I) where a table does not name it. ``(4F3;0B1)`` is an
overlapped entry: two blocks that may be one executable, in which one's communication hides behind the other's arithmetic.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jscaler.errors import PlanError, shown

BlockKind = Literal["F", "R", "B", "I", "W"]


class KindFacts(NamedTuple):
    """What a person calls blocks of a kind, and how long they take, in forwards."""

    name: str
    units: float


KINDS: Mapping[BlockKind, KindFacts] = {
    "F": KindFacts("forward", 1.0),
    "R": KindFacts("recompute", 1.0),
    "B": KindFacts("backward", 2.0),
    "I": KindFacts("input gradient", 1.0),
    "W": KindFacts("weight gradient", 1.0),
}
_CELL = re.compile(r"(\d+)([A-Z])(\d+)")


@dataclass(frozen=True, order=True)
class TableCell:
    """A block for one micro-batch."""

    stage: int
    kind: BlockKind
    microbatch: int

    @property
    def cells(self) -> tuple["TableCell", ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, order=True)
class Overlap:
    """Blocks that are one executable, where more hides so than it holds back (`lower.overlapped`)."""

    cells: tuple[TableCell, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.cells))})"


Entry = TableCell | Overlap


@dataclass(frozen=True)
class Table:
    """Rows of entries; ``str`` prints and `Table.parse` reads them.

    Attributes:
        rows: for each device group what it runs, in order.

    Example:
        >>> table = Table.parse("0F0 0F1 0B0 0I1 0W1")
        >>> print(table)
        0F0 0F1 0B0 0I1 0W1
        >>> [cell.kind for cell in table.cells()]
        ['F', 'F', 'B', 'I', 'W']
    """

    rows: tuple[tuple[Entry, ...], ...]

    def __post_init__(self) -> None:
        if not (isinstance(self.rows, tuple) and all(isinstance(e, TableCell | Overlap) for row in self.rows for e in row)):
            raise PlanError(f"the rows of a Table are tuples of cells, not {shown(self.rows)}; Table.parse reads a text")

    @staticmethod
    def parse(text: str) -> "Table":
        """The table that is written so: a row in a line, cells between blanks.

        Args:
            text: such as the one above.

        Raises:
            PlanError: a cell cannot be read.
        """
        if not isinstance(text, str):
            raise PlanError(f"the text of a table is rows of cells, such as '0F0 0B0', not {shown(text)}")
        return Table(tuple(tuple(map(parse_entry, line.split())) for line in text.strip().splitlines() if line.strip()))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    def cells(self) -> Iterator[TableCell]:
        """All cells, row by row."""
        return (cell for row in self.rows for cell in cells_of(row))


def cells_of(row: Iterable[Entry]) -> Iterator[TableCell]:
    """The cells of a row, those of overlapped entries one behind the other."""
    return (cell for entry in row for cell in entry.cells)


def one_by_one(table: Table) -> Table:
    """``table`` with the cells of overlapped entries one behind the other."""
    return Table(tuple(tuple(cells_of(row)) for row in table.rows))


def is_recompute(entry: Entry) -> bool:
    """Whether an entry computes a forward again, and does nothing else."""
    return all(cell.kind == "R" for cell in entry.cells)


def parse_entry(text: str) -> Entry:
    """A cell, or several that overlap.

    Raises:
        PlanError: it cannot be read.
    """
    if text.startswith("(") and text.endswith(")"):
        return Overlap(tuple(map(_cell, text[1:-1].split(";"))))
    return _cell(text)


def _cell(text: str) -> TableCell:
    match = _CELL.fullmatch(text.strip())
    for kind in get_args(BlockKind):
        if match is not None and match[2] == kind:
            return TableCell(int(match[1]), kind, int(match[3]))
    raise PlanError(
        f"'{text}' is no cell of a table: a cell is stage, kind ({', '.join(get_args(BlockKind))}) and micro-batch, as in "
        "0F3; two that overlap are (0F3;1B2)"
    )


def make_cells(stage: int, kind: BlockKind, microbatches: Iterable[int]) -> list[TableCell]:
    """A stage's blocks of one kind."""
    return [TableCell(stage, kind, number) for number in microbatches]


def most_live(row: Sequence[Entry]) -> int:
    """The most micro-batches of which a group has run something, and not all."""
    left: dict[int, int] = {}
    for cell in cells_of(row):
        left[cell.microbatch] = left.get(cell.microbatch, 0) + 1
    begun, most = set[int](), 0
    for entry in row:
        begun |= {cell.microbatch for cell in entry.cells}
        most = max(most, len(begun))
        for cell in entry.cells:
            left[cell.microbatch] -= 1
        begun = {i for i in begun if left[i]}
    return most
