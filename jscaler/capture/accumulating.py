"""Loops over parts of the batch: a backward pass ends in them, and what they leave adds up to gradients.

    micro-batches    x' ──► f ──► g ──► loss' ──► backward g ──► backward f ──► + ──► dw        ends inside
    parts of a layer            dy ──► backward g' ──► + ──► dx ──► backward f                  goes on behind the loop

A parameter that is whole only while it is used is put together inside of the first kind, in every iteration, and in front
of the second.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from jscaler.ir import Graph, Loop, Op, PTensor
from jscaler.ir.flow import ACYCLIC
from jscaler.ir.loop import chain_of
from jscaler.ir.walk import closure


def accumulating_loops(graph: Graph) -> frozenset[str]:
    """The names of loops in time in which a backward pass ends, and of those that hold its forward ops alone."""
    inside: dict[str, list[Op]] = {name: [] for name, loop in graph.loops.items() if loop.time}
    if not inside:
        return frozenset()
    for op in graph.ops:
        for name in chain_of(op.loop, graph.loops):
            if name in inside:
                inside[name].append(op)
    behind = _Behind(graph, _made_of_state(graph))
    ends = {
        name
        for name, ops in inside.items()
        if any(op.forward is not None for op in ops) and not behind.goes_on(graph.loops[name])
    }
    forward = {op.forward.path for name in ends for op in inside[name] if op.forward is not None}
    apart = [name for name in inside if ends.isdisjoint(chain_of(name, graph.loops))]
    return frozenset(ends | {name for name in apart if any(op.path in forward for op in inside[name])})


@dataclass
class _Behind:
    """What stands behind loops.

    Attributes:
        of_state: what is made of state alone.
    """

    graph: Graph
    of_state: Set[PTensor]
    onward: dict[PTensor, list[PTensor]] = field(default_factory=dict)
    beside: dict[PTensor, list[PTensor]] = field(default_factory=dict)

    def goes_on(self, loop: Loop) -> bool:
        """Whether a gradient that ``loop`` leaves goes on to an op that reads an activation beside it.

        What is left of a backward behind the sum over parts, and the cast of a parameter, read none.
        """
        gradients = {*closure((t for t in loop.results if t.role == "gradient"), self._onward)}
        return any(u not in gradients for t in gradients for u in self.beside[t])

    def _onward(self, tensor: PTensor) -> list[PTensor]:
        if tensor not in self.onward:
            readers = [op for op in self.graph.consumers.get(tensor, ()) if op.kind == "backward"]
            behind = (t for op in readers for t in op.outputs)
            self.onward[tensor] = list(dict.fromkeys((*self.graph.flow.targets(tensor, *ACYCLIC), *behind)))
            read = (u for op in readers if op.forward is not None for u in op.inputs)
            self.beside[tensor] = [u for u in dict.fromkeys(read) if u.shape and u not in self.of_state]
        return self.onward[tensor]


def _made_of_state(graph: Graph) -> set[PTensor]:
    """Parameters and other state, and what forward ops make of these alone."""
    found = {graph.inputs[i] for i in graph.next_version.values()} | {c for c, _ in graph.constants}
    found |= {t for call in graph.calls for t in call.wrt}
    for op in graph.ops:
        if op.kind != "backward" and op.loop is None and all(t in found for t in op.inputs if t.shape):
            found.update(op.outputs)
    return found
