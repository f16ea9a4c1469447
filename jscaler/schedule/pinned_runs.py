"""Runs: the ops of one part in time of one region. They follow each other in an order, and are pinned in it."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError

from jscaler.errors import OrderError
from jscaler.ir import Graph, Op, flat
from jscaler.ir.loop import Item, nests
from jscaler.ir.walk import closure, sorter_of
from jscaler.primitives import Order
from jscaler.schedule.order import dependencies


@dataclass
class Runs:
    """Which run an op belongs to.

    Attributes:
        of: op path -> the number of its run.
        regions: of every run.
        places: the loops in whose bodies there are runs, and None for the program.
    """

    of: dict[str, int] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    places: dict[str | None, None] = field(default_factory=dict)

    def add(self, place: str | None, region: str, paths: Iterable[str]) -> None:
        """The next run of a region; where nothing else is asked for, it follows the one before."""
        self.of.update(dict.fromkeys(paths, len(self.regions)))
        self.regions.append(region)
        self.places[place] = None


def pins(graph: Graph, runs: Runs, orders: Sequence[Order]) -> list[Order]:
    """Orders that have each run wait for the one before it; runs follow each other as data and ``orders`` allow.

    Raises:
        OrderError: they allow no order.
    """
    levels: list[Sequence[Item]] = [graph.tree] if None in runs.places else []
    levels += [nest.items for nest in nests(graph.tree) if nest.loop.name in runs.places]
    found: list[Order] = []
    for items in levels:
        sequence = [op for op in _sequence(items, runs, orders) if op.path in runs.of]
        groups = [list(group) for _, group in itertools.groupby(sequence, key=lambda op: runs.of[op.path])]
        for before, after in itertools.pairwise(groups):
            read, made = ({t for op in before for t in op.inputs}, {t for op in after for t in op.outputs})
            last = [op for op in before if read.isdisjoint(op.outputs)]
            first = [op for op in after if any(t not in made for t in op.inputs)]
            found += [Order(a.path, b.path) for b in first for a in last]
    return found


def _sequence(items: Sequence[Item], runs: Runs, orders: Sequence[Order]) -> list[Op]:
    """The ops of one level in an order that data and ``orders`` allow; a run that has begun goes on while it can."""
    before = dependencies(items, orders)
    run: list[int | None] = [runs.of.get(item.path) if isinstance(item, Op) else None for item in items]
    _keep_to_itself(run, runs.regions, before)
    try:
        sorter = sorter_of(before)
    except CycleError as error:
        cycle = {op.path for op in flat(items[i] for i in error.args[1])}
        asked = "; ".join(f"{o.before} < {o.after}" for o in orders if {o.before, o.after} <= cycle)
        raise OrderError(f"the order is cyclic, together with the data: {asked}; drop one of the op_order calls") from None
    ready, current, found = set[int](), None, list[Op]()
    while sorter.is_active():
        ready.update(sorter.get_ready())
        at = min(ready, key=lambda i: (run[i] is None or run[i] != current, i))
        ready.remove(at)
        current = run[at] if run[at] is not None else current
        item = items[at]
        found += [item] if isinstance(item, Op) else []
        sorter.done(at)
    return found


def _keep_to_itself(run: Sequence[int | None], regions: Sequence[str], waits: Mapping[int, set[int]]) -> None:
    """Have each run of a region wait for the one before it, unless that waits for it."""
    members: dict[int, list[int]] = {}
    for i, number in enumerate(run):
        if number is not None:
            members.setdefault(number, []).append(i)
    for before, after in itertools.pairwise(sorted(members)):
        awaited = closure(members[before], waits.__getitem__)
        if regions[before] == regions[after] and set(members[after]).isdisjoint(awaited):
            for i in members[after]:
                waits[i].update(members[before])
