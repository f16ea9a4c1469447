"""Loops over parts of the batch: a backward pass ends in them, and what they leave adds up to gradients.

    micro-batches    x' ──► f ──► g ──► loss' ──► backward g ──► backward f ──► + ──► dw        ends inside
    parts of a layer            dy ──► backward g' ──► + ──► dx ──► backward f                  goes on behind the loop

A parameter that is whole only while it is used is put together inside of the first kind, in every iteration, and in front
of the second.
"""

from collections.abc import Set

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
    of_state = _made_of_state(graph)
    ends = {
        name
        for name, ops in inside.items()
        if any(op.forward is not None for op in ops) and not _goes_on(graph, graph.loops[name], of_state)
    }
    forward = {op.forward.path for name in ends for op in inside[name] if op.forward is not None}
    apart = [name for name in inside if ends.isdisjoint(chain_of(name, graph.loops))]
    return frozenset(ends | {name for name in apart if any(op.path in forward for op in inside[name])})


def _goes_on(graph: Graph, loop: Loop, of_state: Set[PTensor]) -> bool:
    """Whether a gradient that ``loop`` leaves goes on to an op that reads an activation beside it.

    What is left of a backward behind the sum over parts, and the cast of a parameter, read none.
    """

    def readers(tensor: PTensor) -> list[Op]:
        return [op for op in graph.consumers.get(tensor, ()) if op.kind == "backward"]

    def onward(tensor: PTensor) -> list[PTensor]:
        return [*graph.flow.targets(tensor, *ACYCLIC), *(t for op in readers(tensor) for t in op.outputs)]

    gradients = {*closure((t for t in loop.results if t.role == "gradient"), onward)}
    reads = (u for t in gradients for op in readers(t) if op.forward is not None for u in op.inputs)
    return any(u.shape and u not in of_state and u not in gradients for u in reads)


def _made_of_state(graph: Graph) -> set[PTensor]:
    """Parameters and other state, and what forward ops make of these alone."""
    found = {graph.inputs[i] for i in graph.next_version.values()} | {c for c, _ in graph.constants}
    found |= {t for call in graph.calls for t in call.wrt}
    for op in graph.ops:
        if op.kind != "backward" and op.loop is None and all(t in found for t in op.inputs if t.shape):
            found.update(op.outputs)
    return found
