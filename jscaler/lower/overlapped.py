"""Which overlapped entries of a table run as one executable: those in which more hides than the executable holds back.

In one executable XLA may run a collective of one cell beside the arithmetic of another; but not one in a loop over layers,
since it runs one loop after another. Yet an executable begins when all that it reads is there, and all that it makes leaves
when it ends: what is sent to later cells, and by earlier ones, has no block beside which it travels. So cells between which
less hides than that are executables of their own, one behind the other.
"""

from collections.abc import Iterator, Sequence

from jscaler.clusters import CostModel
from jscaler.ir.walk import Sets, grouped
from jscaler.lower.flat_program import Exchange, FlatLoop, Item
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.spanning_loop import Transfer
from jscaler.materialize.crossing import hop_price

Parts = Sequence[tuple[PlacedBlock, int]]  # blocks, each with the place of its micro-batch


class Overlapping:
    """Decides by ``cost``; entries of the same blocks alike."""

    def __init__(self, blocks: Sequence[PlacedBlock], transfers: Sequence[Transfer], cost: CostModel):
        self._blocks, self._cost = blocks, cost
        self._leaving = grouped((t.source, t) for t in transfers)
        arriving = {t.target: t for t in transfers}
        self._arriving: dict[int, list[Transfer]] = {}  # of each block what it is the first to read
        for number in sorted(range(len(blocks)), key=lambda number: blocks[number].level):
            self._arriving[number] = [arriving.pop(v) for v in blocks[number].imports if v in arriving]
        self._known: dict[tuple[tuple[tuple[int, int], ...], ...], bool] = {}

    def is_one(self, cells: Sequence[Sequence[tuple[int, int]]]) -> bool:
        """Whether ``cells`` are one executable: the numbers of the blocks of each, with their iterations."""
        first = {i: n for n, i in enumerate(dict.fromkeys(i for cell in cells for _, i in cell))}
        key = tuple(tuple((number, first[i]) for number, i in cell) for cell in cells)
        if key not in self._known:
            parts = [(self._blocks[number], place) for cell in key for number, place in cell]
            hidden = sum(self._hides(block) for block, _ in parts) if len(chains_of(parts)) > 1 else 0.0
            sent = [
                t for cell in key[:-1] for n, _ in cell for v in self._blocks[n].exports for t in self._leaving.get(v, ())
            ]
            sent += [t for cell in key[1:] for n, _ in cell for t in self._arriving[n]]
            self._known[key] = hidden > sum(self._hop(transfer) for transfer in sent)
        return self._known[key]

    def _hides(self, block: PlacedBlock) -> float:
        every = exchanges_outside_loops(block.flat.items)
        return sum(times * one.adapt.price(one.itemsize, self._cost) for one, times in every)

    def _hop(self, transfer: Transfer) -> float:
        ends = transfer.crossing.leave.target, transfer.crossing.arrive.source
        return hop_price(*ends, transfer.tensor.itemsize, self._cost)


def chains_of(parts: Parts) -> list[list[int]]:
    """The numbers of ``parts``, those together of which one reads what another makes; sums make nothing wait."""
    sets, maker = Sets[int](), dict[tuple[int, int], int]()
    for number, (block, place) in enumerate(parts):
        for value in block.imports:
            if (value, place) in maker:
                sets.join(number, maker[value, place])
        maker.update(((value, place), number) for value in block.exports)
    return sets.among(range(len(parts)))


def exchanges_outside_loops(items: Sequence[Item], times: int = 1) -> Iterator[tuple[Exchange, int]]:
    """The exchanges that XLA may run beside something else, and how often: those of loops that are written out, too."""
    for item in items:
        if isinstance(item, Exchange):
            yield item, times
        elif isinstance(item, FlatLoop) and (item.loop.unroll is True or item.loop.unroll >= item.loop.length):
            yield from exchanges_outside_loops(item.items, times * item.loop.length)
