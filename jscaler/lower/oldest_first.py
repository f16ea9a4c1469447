"""The order of a loop over groups without a table: one forward, one backward, on any shape of blocks.

On a chain of stages it is 1F1B; else the same idea: as few micro-batches at once as keep all groups busy. Where
micro-batches take turns, each turn is a chain of its own, and a group runs the oldest that is ready.
"""

import itertools
from collections.abc import Sequence, Set

from jscaler.errors import OrderError
from jscaler.lower.loop_blocks import Cell, LoopBlocks, cells_text, waiting_text

Left = dict[int, list[int]]  # the blocks of a group at one turn, each with the iterations that are left


def one_forward_one_backward(loop: LoopBlocks, most: int | None = None) -> list[list[Cell]]:
    """The blocks of each group, in the order in which they run.

    Args:
        most: how many micro-batches are under way on a group at one turn; by default as few as keep it busy.

    Raises:
        OrderError: blocks wait for each other.
    """
    return _OldestFirst(loop, most).run()


class _OldestFirst:
    def __init__(self, loop: LoopBlocks, most: int | None):
        self.loop, self.most = loop, most
        self.done: set[Cell] = set()
        self.rows = [self._by_turn(row) for row in loop.rows.values()]
        again = (n for n in loop.numbers if loop.is_again(n))
        self.reader = {n: self._first_reader(n) for n in again}

    def run(self) -> list[list[Cell]]:
        rows: list[list[Cell]] = [[] for _ in self.rows]
        while any(cells for turns in self.rows for left in turns for cells in left.values()):
            ready = [self._oldest(turns, self.most) for turns in self.rows]
            if not any(ready):
                ready = [self._oldest(turns, self.loop.iterations) for turns in self.rows]
            if not any(ready):
                raise OrderError(f"blocks wait for each other: {self._stuck()}")
            for row, turns, cell in zip(rows, self.rows, ready, strict=True):
                if cell is not None:
                    row.append(cell)
                    next(left for left in turns if cell[0] in left)[cell[0]].remove(cell[1])
            self.done |= {cell for cell in ready if cell is not None}
        return rows

    def _by_turn(self, row: Sequence[int]) -> list[Left]:
        turns = itertools.groupby(row, key=lambda n: self.loop.blocks[n].phase)
        return [{n: list(range(self.loop.iterations)) for n in blocks} for _, blocks in turns]

    def _first_reader(self, number: int) -> int:
        """The first block that reads what block ``number`` computes again."""
        readers = (n for n in self.loop.numbers if (number, 0) in self.loop.waits[n, 0])
        return min(readers, key=lambda n: self.loop.blocks[n].level)

    def _oldest(self, turns: Sequence[Left], most: int | None) -> Cell | None:
        ready = [cell for left in turns if (cell := self._next(left, most)) is not None]
        return min(ready, key=lambda cell: (cell[1], *(-x for x in self.loop.blocks[cell[0]].level)), default=None)

    def _next(self, left: Left, most: int | None) -> Cell | None:
        """A new micro-batch if not too many are under way, else what has come furthest."""
        first, last = next(iter(left)), next(reversed(left))
        ready = {n: next((i for i in cells if self._needs(n, i) <= self.done), None) for n, cells in left.items()}
        if first != last and len(left[last]) - len(left[first]) >= (self._enough(left) if most is None else most):
            ready[first] = None
        number = first if ready[first] is not None else next((n for n in reversed(ready) if ready[n] is not None), first)
        iteration = ready[number]
        return None if iteration is None else (number, iteration)

    def _enough(self, left: Left) -> int:
        """How many micro-batches under way keep a group busy at one turn."""
        levels = [self.loop.blocks[n].level for n in left]
        return sum(levels[0] <= level < levels[-1] for level in self.loop.sent_at) // 2 + 1

    def _needs(self, number: int, iteration: int) -> Set[Cell]:
        """What a block waits for; what is computed again also for what its reader does, or it would be held for longer."""
        waits = self.loop.waits
        if number not in self.reader:
            return waits[number, iteration]
        reads = (cell for cell in waits[self.reader[number], iteration] if not self.loop.is_again(cell[0]))
        return {*waits[number, iteration], *reads}

    def _stuck(self) -> str:
        """What the next blocks wait for."""
        heads = [(n, cells[0]) for turns in self.rows for left in turns for n, cells in left.items() if cells][:4]
        waits = {head: sorted(self._needs(*head) - self.done) for head in heads}
        named = {head: ", ".join(cells_text(self.loop, [cell]) for cell in cells) for head, cells in waits.items()}
        return "; ".join(f"{waiting_text(self.loop, [head])} waits for {others}" for head, others in named.items())
