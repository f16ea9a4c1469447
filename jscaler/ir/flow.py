"""``Flow``: where tensors come from and where they go, through ops and through the loops that hand them on.

A loop joins its tensors by edges, each of a kind. An edge leads from a tensor to one that may hold the same values::

                      ┌───────────bypass───────────┐
                      │                            ▼
    init ───entry──► inside ─► ops ─► out ──exit──► final        a carry: ``bypass`` hands on what it begins with
                      ▲                │
                      └──────back──────┘                         the next iteration takes what this one leaves

    stack ──slice──► slice ─► ops ─► slice ──stack──► stack      stacks have one dim more, in front
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from jscaler.ir.loop import Loop
from jscaler.ir.op import Op
from jscaler.ir.tensor import PTensor
from jscaler.ir.walk import closure, grouped

EdgeKind = Literal["entry", "slice", "back", "bypass", "exit", "stack"]

ACYCLIC: tuple[EdgeKind, ...] = ("entry", "slice", "bypass", "exit", "stack")  # all that stay within an iteration


class Edge(NamedTuple):
    """The way of values from one tensor to another."""

    source: PTensor
    target: PTensor
    kind: EdgeKind


@dataclass(frozen=True, repr=False)
class Flow:
    """The ways of tensors through a graph: `Graph.flow`.

    Attributes:
        loops: by name.
        producer: tensor -> the op that makes it.
        consumers: tensor -> the ops that read it, in order.
        position: op path -> its place in the order of the program.
    """

    loops: Mapping[str, Loop]
    producer: Mapping[PTensor, Op]
    consumers: Mapping[PTensor, Sequence[Op]]
    position: Mapping[str, int]

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The edges of all loops, loop by loop."""
        edges: list[Edge] = []
        for loop in self.loops.values():
            edges += [Edge(x.stack, x.slice, "slice") for x in loop.xs]
            edges += [Edge(y.slice, y.stack, "stack") for y in loop.ys]
            for c in loop.carries:
                edges += [Edge(c.init, c.inside, "entry"), Edge(c.out, c.inside, "back")]
                edges += [Edge(c.out, c.final, "exit"), Edge(c.inside, c.final, "bypass")]
        return tuple(edges)

    @cached_property
    def _into(self) -> Mapping[PTensor, Sequence[Edge]]:
        return grouped((edge.target, edge) for edge in self.edges)

    @cached_property
    def _out_of(self) -> Mapping[PTensor, Sequence[Edge]]:
        return grouped((edge.source, edge) for edge in self.edges)

    @cached_property
    def linked(self) -> Mapping[PTensor, tuple[tuple[PTensor, int], ...]]:
        """Tensor -> the tensors that hold the same dims before, in and after loops, and how far these dims shift."""
        pairs: list[tuple[PTensor, tuple[PTensor, int]]] = []
        for loop in self.loops.values():
            pairs += [(a, (b, 0)) for c in loop.carries for a, b in itertools.permutations(c.tensors, 2) if a != b]
            for s in (*loop.xs, *loop.ys):
                pairs += [(s.stack, (s.slice, -1)), (s.slice, (s.stack, 1))]
        return {t: tuple(links) for t, links in grouped(pairs).items()}

    def neighbours(self, tensor: PTensor) -> list[PTensor]:
        """The tensors that `linked` has for ``tensor``, whatever their shift."""
        return [other for other, _ in self.linked.get(tensor, ())]

    def sources(self, tensor: PTensor, *kinds: EdgeKind) -> list[PTensor]:
        """The tensors whose edges of ``kinds`` end at ``tensor``; without ``kinds``, of every kind."""
        return [edge.source for edge in self._into.get(tensor, ()) if not kinds or edge.kind in kinds]

    def targets(self, tensor: PTensor, *kinds: EdgeKind) -> list[PTensor]:
        """The tensors that edges of ``kinds`` lead to from ``tensor``; without ``kinds``, edges of every kind."""
        return [edge.target for edge in self._out_of.get(tensor, ()) if not kinds or edge.kind in kinds]

    def operands(self, tensor: PTensor) -> Iterable[PTensor]:
        """What the op reads that makes ``tensor``; of a tensor of a loop, its sources within an iteration."""
        maker = self.producer.get(tensor)
        return maker.inputs if maker is not None else self.sources(tensor, *ACYCLIC)

    def maker(self, tensor: PTensor) -> Op | None:
        """The op that makes ``tensor``, or what loops hand on to it; None where that is an input or a constant."""
        reached = closure([tensor], lambda t: self.sources(t, *ACYCLIC))
        return next((self.producer[t] for t in reached if t in self.producer), None)

    def readers(self, tensor: PTensor) -> list[Op]:
        """The ops that read ``tensor``, in order; of what a loop takes or hands on, also those inside it and behind it.

        Last comes the op that makes the next value of the last carry that begins with ``tensor``: nobody else may read it.
        """
        reached = closure([tensor], lambda t: self.targets(t, *ACYCLIC))
        ops = {op.path: op for t in reached for op in self.consumers.get(t, ())}
        outs = [out for inside in self.targets(tensor, "entry") for out in self.sources(inside, "back")]
        makers = (self.maker(out) for out in outs[-1:])
        return [*sorted(ops.values(), key=lambda op: self.position[op.path]), *(op for op in makers if op is not None)]
