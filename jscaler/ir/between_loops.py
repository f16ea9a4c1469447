"""What keeps loops of one time axis apart: an op between them that needs what all iterations of the first add up to."""

from collections.abc import Mapping

from jscaler.ir.graph import Graph
from jscaler.ir.loop import Loop, chain_of
from jscaler.ir.op import Op
from jscaler.ir.tensor import PTensor


def between_loops(graph: Graph, loops: Mapping[str, Loop]) -> tuple[Op, PTensor] | None:
    """The first op that reads a sum which one of ``loops`` leaves, and that sum; an op of a loop over layers goes first."""
    sums = {c.final for loop in loops.values() for c in loop.carries}
    outside = [op for op in graph.ops if op.kind != "update" and loops.keys().isdisjoint(chain_of(op.loop, graph.loops))]
    for op in sorted(outside, key=lambda op: op.loop is None):
        for tensor in op.inputs:
            if tensor in sums:
                return op, tensor
    return None
