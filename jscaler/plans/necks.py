"""The narrow places of a forward pass, and what lies between two of them.

A neck is an activation that all that follows it depends on through it alone::

    x ──┬──► norm ──► heads ──► out ──┬──► + ──┬──► norm ──► up ──► down ──► + ──►
        └─────────────────────────────┘   ▲    └────────────────────────────┘   ▲
                                          neck                                  neck

Only what stems from the same trunk counts: not weights, what no gradient flows through, or another encoder's result
before it is met. Nor does what passes by: what equal ops of one layer and of the next read (a position bias, the result of
an encoder), and a handful of bytes (an auxiliary loss).
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import jax.numpy as jnp

from jscaler.ir import Op, PTensor, flat
from jscaler.ir.loop import Item, reads_of
from jscaler.ir.walk import Sets, dependents, in_order
from jscaler.plans.attention import holds_contraction
from jscaler.primitives import Planner

HANDFUL = 8  # what is smaller than a neck by this factor may pass beside it


@dataclass(frozen=True)
class Stretch:
    """What lies between two necks.

    Attributes:
        items: ops and loops that a gradient flows through, in order.
        neck: what they hand on.
    """

    items: tuple[Item, ...]
    neck: PTensor

    def ops(self) -> Iterator[Op]:
        """The ops, those in loops too."""
        return flat(self.items)

    def reads(self, tensor: PTensor) -> bool:
        """Whether anything in it reads ``tensor``."""
        return any(tensor in reads_of(item) for item in self.items)


def stretches(graph: Planner, call: int | None, weights: Set[PTensor]) -> list[Stretch]:
    """The forward pass of a gradient call from neck to neck, in order; what follows the last is left out.

    Args:
        weights: parameters, and what is made of them alone.
    """
    written = [item for item in graph.tree if _flows(item, call)]
    items = as_late_as_possible(written)
    made = {t for item in items for t in _made(item) if t not in weights and jnp.issubdtype(t.dtype, jnp.inexact)}
    reads = [tuple(t for t in dict.fromkeys(reads_of(item)) if t in made) for item in items]
    readers: dict[PTensor, list[int]] = {}
    for place, tensors in enumerate(reads):
        for tensor in tensors:
            readers.setdefault(tensor, []).append(place)
    walk = _Walk(items, weights, readers)
    found = [walk.step(i, reads[i], [t for t in _made(item) if t in readers]) for i, item in enumerate(items)]
    place = {id(item): i for i, item in enumerate(written)}
    return sorted(
        (one for one in found if one is not None),
        key=lambda one: statistics.median_low(place[id(item)] for item in one.items),  # some of it may stand elsewhere
    )


def as_late_as_possible(items: Sequence[Item]) -> list[Item]:
    """``items`` with each close in front of who reads it: a decoder's keys, made of an encoder's result, in their layer."""
    maker = {t: i for i, item in enumerate(items) for t in _made(item)}
    readers: dict[int, list[int]] = {i: [] for i in range(len(items))}
    depth = [0] * len(items)
    for i, item in enumerate(items):
        for source in {maker[t] for t in reads_of(item) if t in maker} - {i}:
            readers[source].append(i)
            depth[i] = max(depth[i], depth[source] + 1)
    return [items[i] for i in in_order(readers, lambda i: (depth[i], -i))][::-1]


def _flows(item: Item, call: int | None) -> bool:
    return any(op.kind == "forward" and op.call == call and op.backward is not None for op in flat([item]))


def _made(item: Item) -> Iterable[PTensor]:
    return item.outputs if isinstance(item, Op) else item.loop.results


@dataclass
class _Trunk:
    """Activations that have a source in common: those still to be read, and what has run since their last neck."""

    live: set[PTensor] = field(default_factory=set)
    since: list[Item] = field(default_factory=list)


@dataclass
class _Walk:
    """The forward pass up to some item; ``readers`` are the places of those that read a tensor."""

    items: Sequence[Item]
    weights: Set[PTensor]
    readers: Mapping[PTensor, Sequence[int]]
    joined: Sets[PTensor] = field(default_factory=Sets)
    trunks: dict[PTensor, _Trunk] = field(default_factory=dict)

    def step(self, place: int, reads: Sequence[PTensor], made: Sequence[PTensor]) -> Stretch | None:
        """Take one item more; a stretch, if it ends one."""
        if not made:
            return None
        trunk = self._one([*reads, *made])
        trunk.since.append(self.items[place])
        trunk.live.update(made)
        trunk.live.difference_update([t for t in reads if self.readers[t][-1] == place])
        neck = max(made, key=lambda t: t.nbytes)
        if sum(t.nbytes for t in trunk.live if t != neck and not self._passes_by(t, place)) * HANDFUL > neck.nbytes:
            return None
        stretch = Stretch(tuple(trunk.since), neck)
        trunk.since = []
        return stretch

    def _one(self, tensors: Sequence[PTensor]) -> _Trunk:
        """The trunk of all ``tensors``, which is one from now on."""
        roots = dict.fromkeys(map(self.joined.root, tensors))
        met = [self.trunks.pop(root) for root in roots if root in self.trunks]
        for root in roots:
            self.joined.join(tensors[0], root)
        trunk = _Trunk({t for one in met for t in one.live}, [item for one in met for item in one.since])
        self.trunks[self.joined.root(tensors[0])] = trunk
        return trunk

    def _passes_by(self, tensor: PTensor, place: int) -> bool:
        """Whether all that will read ``tensor`` is like what has read it, a kernel or more before ``place``: in layers."""
        before = {self._body(i): i for i in self.readers[tensor] if i <= place}
        after = {self._body(i) for i in self.readers[tensor] if i > place}
        return after <= before.keys() and any(self._stems_from(place, before[body]) for body in after)

    def _stems_from(self, place: int, reader: int) -> bool:
        """Whether what is made at ``place`` is made of what ``reader`` makes, by a product with a weight."""
        behind = dependents(self.items[reader : place + 1], (self.items[reader],), reads_of, _made)[1:]
        products = {item for item in behind if isinstance(item, Op) and self._has_kernel(item)}
        return self.items[place] in dependents(behind, products, reads_of, _made)

    def _has_kernel(self, op: Op) -> bool:
        return holds_contraction(op) and not self.weights.isdisjoint(op.inputs)

    def _body(self, place: int) -> int:
        """What tells equal readers from others; a loop is like no other."""
        item = self.items[place]
        return id(item.body) if isinstance(item, Op) else id(item)
