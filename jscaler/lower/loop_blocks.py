"""``LoopBlocks``: the blocks of a loop over groups, once for each iteration, and which wait for which."""

import functools
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from jscaler.errors import OrderError, listing
from jscaler.ir.name import turn_mark
from jscaler.ir.walk import circle_of, grouped
from jscaler.lower.level import FRONT, Level
from jscaler.lower.segment import PlacedBlock, made_by
from jscaler.lower.spanning_loop import SpanningLoop, Transfer
from jscaler.materialize import DeviceMesh
from jscaler.tables import TableCell

Cell = tuple[int, int]  # the number of a block, and an iteration
OpAt = tuple[str, int]  # the path of an op, and a micro-batch


@dataclass(frozen=True)
class LoopBlocks:
    """The blocks of a loop over groups.

    Attributes:
        blocks: those of the step; the loop's are called by their numbers.
        rows: group -> its blocks, in the order in which an iteration runs them.
        waits: a block at an iteration -> what it waits for: blocks of its iteration, and of the one before that leave a
            state; and blocks that ``op_order`` puts before it.
        sent_at: the levels of blocks behind which something is sent.
    """

    blocks: Sequence[PlacedBlock]
    spanning: SpanningLoop
    rows: Mapping[DeviceMesh, Sequence[int]]
    waits: Mapping[Cell, Set[Cell]]
    sent_at: Set[Level]

    @staticmethod
    def of(
        blocks: Sequence[PlacedBlock],
        transfers: Sequence[Transfer],
        spanning: SpanningLoop,
        before: Sequence[tuple[OpAt, OpAt]] = (),
    ) -> "LoopBlocks":
        """The blocks of ``spanning``.

        Args:
            before: ops at micro-batches of which the first runs before the second, as ``op_order`` says.

        Raises:
            OrderError: no block runs an op that is put in order.
        """
        numbers = [number for number, block in enumerate(blocks) if block.phase in spanning.phases]
        nameless = [n for n in numbers if not blocks[n].names]
        assert not nameless, f"blocks are no cells of any table: {nameless}"
        numbers.sort(key=lambda n: (blocks[n].phase, blocks[n].level, blocks[n].of_layers))
        rows = grouped((blocks[n].group, n) for n in numbers)
        sent_at = {t.level.whole for t in transfers if t.phase in spanning.phases and t.level != FRONT}
        waits = _waits(blocks, numbers, transfers, spanning)
        of_op = {path: n for n in numbers for path in made_by(blocks[n])} if before else {}
        for pair in before:
            first, second = (_cell(*op, of_op, len(spanning.phases)) for op in pair)
            waits[second] |= {first} - {second}
        return LoopBlocks(blocks, spanning, rows, waits, sent_at)

    @property
    def iterations(self) -> int:
        return self.spanning.loop.length

    @functools.cached_property
    def numbers(self) -> list[int]:
        """The numbers of its blocks, in order."""
        return sorted(n for row in self.rows.values() for n in row)

    def cells(self, cell: Cell) -> list[TableCell]:
        """The cells of a table that a block at an iteration is."""
        number, iteration = cell
        microbatch = self.spanning.microbatch(self.blocks[number].phase, iteration)
        return [TableCell(stage, kind, microbatch) for stage, kind in self.blocks[number].names]

    def is_again(self, number: int) -> bool:
        """Whether a block computes again what a backward reads."""
        return self.blocks[number].level.is_again


def sums_of(body: Sequence[PlacedBlock], spanning: SpanningLoop) -> set[int]:
    """The carries to which blocks add in any order: what a block takes it leaves. Others go from iteration to iteration."""
    readers = {c.inside: [block for block in body if c.inside in block.imports] for c in spanning.carries}
    return {c.inside for c in spanning.carries if c.is_sum and all(c.out in block.exports for block in readers[c.inside])}


def _waits(
    blocks: Sequence[PlacedBlock], numbers: Sequence[int], transfers: Sequence[Transfer], spanning: SpanningLoop
) -> dict[Cell, set[Cell]]:
    """What each block waits for at each iteration."""
    maker = {v: n for n in numbers for v in blocks[n].exports}
    for transfer in transfers:
        if transfer.source in maker:
            maker[transfer.target] = maker[transfer.source]
    sums = sums_of([blocks[n] for n in numbers], spanning)
    states = {c.inside: maker[c.out] for c in spanning.carries if c.inside not in sums and c.out in maker}
    for transfer in transfers:
        if transfer.source in states:
            states[transfer.target] = states[transfer.source]
    now = {n: {maker[v] for v in blocks[n].imports if v in maker} for n in numbers}
    circle = circle_of(now)
    assert circle is None, f"blocks of an iteration wait for each other: {circle}"  # `lower.op_blocks`
    last = {n: {states[v] for v in blocks[n].imports if v in states} for n in numbers}
    return {
        (n, i): {(m, i) for m in now[n]} | ({(m, i - 1) for m in last[n]} if i else set())
        for n, i in itertools.product(numbers, range(spanning.loop.length))
    }


def _cell(path: str, microbatch: int, of_op: Mapping[str, int], turns: int) -> Cell:
    """The block that runs an op for a micro-batch, and at which iteration."""
    iteration, turn = divmod(microbatch, turns)
    number = of_op.get(path + turn_mark(turn))
    if number is None:
        raise OrderError(f"'{path}' runs in no block of the loop over micro-batches, and cannot be put in order there")
    return number, iteration


def cells_text(loop: LoopBlocks, entry: Sequence[Cell]) -> str:
    """``0F;1F+1B``: blocks at iterations, by the cells that they are."""
    return ";".join("+".join(map(str, loop.cells(cell))) for cell in entry)


def waiting_text(loop: LoopBlocks, entry: Sequence[Cell]) -> str:
    """What an error says of blocks that wait: their cells, ops and devices."""
    block = loop.blocks[entry[0][0]]
    return f"{cells_text(loop, entry)} ({listing(made_by(block)[:3])}), next on devices {list(block.group.devices)},"
