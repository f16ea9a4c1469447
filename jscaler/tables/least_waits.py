"""What a chain of stages waits for at least, and how much of it is under way, by its table alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from jscaler.tables.simulator import most_activations
from jscaler.tables.table import BlockKind, Table, cells_of


@dataclass(frozen=True)
class LeastWaits:
    """Of a table whose stages follow each other.

    Attributes:
        blocks: forwards of a step: its stages times its micro-batches.
        ends: of each row how many forwards come before its first block, the kind of its last block, and how many of that
            kind come behind it, where it is B or I.
        under_way: the largest part of the forwards of a step that wait in a row for their backwards.
    """

    blocks: int
    ends: frozenset[tuple[int, BlockKind, int]]
    under_way: float

    @staticmethod
    def of(table: Table) -> "LeastWaits":
        """Of a table with backwards.

        Example:
            >>> from jscaler.tables import SCHEDULES
            >>> waits = LeastWaits.of(SCHEDULES["1f1b"].table(2, 4))
            >>> waits.seconds({"F": 8.0, "B": 16.0}), waits.under_way
            (3.0, 0.25)
        """
        ends = set[tuple[int, BlockKind, int]]()
        for first, *rest in ([*cells_of(row)] for row in table.rows if row):
            last = rest[-1] if rest else first
            ends.add((first.stage, last.kind, last.stage if last.kind in "BI" else 0))
        blocks = sum(cell.kind == "F" for cell in table.cells())
        return LeastWaits(blocks, frozenset(ends), max(map(most_activations, table.rows), default=0) / blocks)

    def seconds(self, of_kind: Mapping[BlockKind, float]) -> float:
        """Seconds that the row which waits longest waits at least.

        Args:
            of_kind: seconds of all blocks of a kind together.
        """
        forward = of_kind["F"]
        return max(before * forward + behind * of_kind.get(kind, 0.0) for before, kind, behind in self.ends) / self.blocks
