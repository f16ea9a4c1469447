"""What a block keeps for later blocks of its group, and what those make again: a minimum cut.

What a forward block has computed and its backward block reads is kept, or made again of what is kept by equations that
cost next to nothing (elementwise ones, casts, masks, reshapes). Kept bytes are least over the graph of values: a value that
cannot be made again is a source, what the later blocks read are the sinks, and a value's capacity is its bytes.

    x ──► dot ──► z ──► tanh ──► h ──► dot          kept: h (or z), not both
                  └───► 1 − tanh² ──► backward      made again of h
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from jax.extend import core
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jscaler.capture.jaxprs import Atom, fresh, inner_jaxpr, nbytes
from jscaler.lax_primitives import known
from jscaler.lower.flat_program import Item, has_effects, reads, renamed, results

A_VALUE = 256  # bytes that are as dear as one more value: each costs some microseconds to hand on
MOST_FLOW = 2**28  # capacities are 32 bits wide


@dataclass(frozen=True)
class Cuttable:
    """The items of one block, and what leaves it for somewhere else.

    Attributes:
        waited: whether other blocks wait for it; else it hands nothing on that is made again.
    """

    items: tuple[Item, ...]
    outputs: tuple[Atom, ...]
    waited: bool = True


def saved_or_again(
    blocks: Sequence[Cuttable], arrive: Mapping[core.Var, int], free: Set[core.Var]
) -> tuple[list[list[Item]], dict[core.Var, core.Var]]:
    """The items of each block, with those that it makes again of what is kept; and for what these make the original.

    Args:
        blocks: of one group and phase, in order.
        arrive: what comes from other groups, and the first of ``blocks`` in which it is there.
        free: what all blocks have without its being kept.
    """
    parts = [list(block.items) for block in blocks]
    originals: dict[core.Var, core.Var] = {}
    for at in range(1, len(blocks)):
        before = [item for items in parts[:at] for item in items]
        late = {v for block in blocks[at:] for v in block.outputs if isinstance(v, core.Var)}
        needed = {v for items in parts[at:] for item in items for v in reads(item)}
        chosen = _again(before, needed, late, {v for v, place in arrive.items() if place < at}, free)
        again = [item for item in before if not chosen.isdisjoint(results(item))]
        _make_again(parts, at, again, originals, [block.waited for block in blocks])
    return parts, originals


def _make_again(
    parts: list[list[Item]],
    at: int,
    items: Sequence[Item],
    originals: dict[core.Var, core.Var],
    waited: Sequence[bool],
) -> None:
    """Clones of ``items`` in the blocks from ``at`` on, each in front of the first that reads it; its readers read it.

    Blocks that nobody waits for have clones of their own.
    """
    table: dict[core.Var, core.Var] = {}
    for place in range(at, len(parts)):
        wanted = {v for item in parts[place] for v in reads(item)}
        chosen: list[Item] = []
        for item in reversed(items):
            if any(v in wanted and v not in table for v in results(item)):
                chosen.append(item)
                wanted.update(reads(item))
        known = dict(table)
        clones = [_cloned(item, known, originals) for item in reversed(chosen)]
        if waited[place]:
            table = known
        own = (renamed(item, known) if not known.keys().isdisjoint(reads(item)) else item for item in parts[place])
        parts[place] = [*clones, *own]


def _cloned(item: Item, table: dict[core.Var, core.Var], originals: dict[core.Var, core.Var]) -> Item:
    """``item`` once more, of what ``table`` has of its operands; which is told its results."""
    assert isinstance(item, core.JaxprEqn)
    made = {v: fresh(v) for v in item.outvars}
    clone = renamed(item, table, made)
    table.update(made)
    originals.update((new, originals.get(old, old)) for old, new in made.items())
    return clone


def _again(
    before: Sequence[Item], needed: Set[core.Var], late: Set[core.Var], arrived: Set[core.Var], free: Set[core.Var]
) -> set[core.Var]:
    """Of what the items ``before`` make and later blocks need: what these make again.

    Args:
        needed, late: what later blocks read, and what of it they leave as it is.
    """
    maker = {v: item for item in before for v in results(item)}
    found = _Network()
    waiting = [v for v in dict.fromkeys((*needed, *late)) if v in maker or v in arrived]
    for v in waiting:
        found.sink(v)
    known = set(waiting)
    while waiting:
        v = waiting.pop()
        item = maker.get(v)
        if item is None or v in late or not _is_cheap(item):
            found.source(v)
            continue
        for operand in reads(item):
            if operand in free:
                continue
            found.edge(operand, v)
            if operand not in known:
                known.add(operand)
                waiting.append(operand)
    return found.behind_cut()


def _is_cheap(item: Item) -> bool:
    return isinstance(item, core.JaxprEqn) and not has_effects(item) and _cheap(item)


def _cheap(eqn: core.JaxprEqn) -> bool:
    one = known(eqn.primitive)
    if one.fence:
        return False
    if one.opened:
        return all(map(_cheap, inner_jaxpr(eqn)[0].eqns))
    return one.cost in ("fused", "alias")


class _Network:
    """Every value is an edge of its bytes, from where it is taken in to where it is read."""

    def __init__(self) -> None:
        self._number: dict[core.Var, int] = {}
        self._edges: list[tuple[int, int]] = []
        self._ends = ([], [])

    def _of(self, v: core.Var) -> int:
        return self._number.setdefault(v, len(self._number))

    def source(self, v: core.Var) -> None:
        self._ends[0].append(self._of(v))

    def sink(self, v: core.Var) -> None:
        self._ends[1].append(self._of(v))

    def edge(self, v: core.Var, reader: core.Var) -> None:
        self._edges.append((self._of(v), self._of(reader)))

    def behind_cut(self) -> set[core.Var]:
        """The values behind the cheapest cut, of several the last: those that are made again."""
        count = len(self._number)
        if not count or not self._edges:
            return set()
        start, end = 2 * count, 2 * count + 1
        sizes = np.array([nbytes(v) + A_VALUE for v in self._number], float)
        sizes = np.maximum(1, np.ceil(sizes * min(1.0, MOST_FLOW / sizes.sum()))).astype(np.int64)
        most = int(sizes.sum()) + 1
        rows = [*range(count), *(count + a for a, _ in self._edges), *(start for _ in self._ends[0])]
        rows += [count + v for v in self._ends[1]]
        columns = [*range(count, 2 * count), *(b for _, b in self._edges), *self._ends[0], *(end for _ in self._ends[1])]
        room = np.array([*sizes, *[most] * (len(rows) - count)], np.int32)
        network = csr_array((room, (np.array(rows), np.array(columns))), shape=(end + 1, end + 1))
        network.sum_duplicates()
        network.data = np.minimum(network.data, most).astype(np.int32)
        left = network - maximum_flow(network, start, end).flow
        left.eliminate_zeros()  # edges without room
        behind = set(breadth_first_order(left.T.tocsr(), end, return_predecessors=False).tolist())
        return {v for v, n in self._number.items() if n in behind}
