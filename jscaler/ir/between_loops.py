"""What keeps loops of one time axis apart: an op between them that needs what all iterations of the first make."""

from collections.abc import Mapping
from dataclasses import dataclass

from jscaler.ir.graph import Graph
from jscaler.ir.loop import Loop, chain_of
from jscaler.ir.op import Op
from jscaler.ir.tensor import PTensor
from jscaler.ir.walk import closure
from jscaler.text.folding import folded

MERGE = "@merge"  # ends the path of an op that puts the rows of all iterations into one tensor


@dataclass(frozen=True)
class Between:
    """``op`` reads ``tensor``, which all iterations of a loop have made, by ``maker``."""

    op: Op
    tensor: PTensor
    maker: Op | None

    def __str__(self) -> str:
        where = f" (at {self.op.source})" if self.op.source else ""
        maker = f", which '{folded(self.maker.path)}' makes" if self.maker is not None else ""
        return f"'{folded(self.op.path)}'{where} needs '{folded(self.tensor.name)}' of all micro-batches{maker}"

    @property
    def ops(self) -> tuple[str, ...]:
        """Paths of the two."""
        return (self.op.path, *((self.maker.path,) if self.maker is not None else ()))


def between_loops(graph: Graph, loops: Mapping[str, Loop]) -> Between | None:
    """The first op that needs a sum which one of ``loops`` leaves before another may begin, or else all rows.

    An op of a loop over layers goes first.
    """
    sums = {c.final: c.out for loop in loops.values() for c in loop.carries}
    rows = {y.stack: y.slice for loop in loops.values() for y in loop.ys}

    def inside(op: Op) -> bool:
        return not loops.keys().isdisjoint(chain_of(op.loop, graph.loops))

    def beyond(tensor: PTensor) -> list[PTensor]:
        made = [t for op in graph.consumers.get(tensor, ()) for t in op.outputs]
        return [*made, *graph.flow.targets(tensor)]

    def is_waited_for(op: Op) -> bool:
        return any(t in graph.producer and inside(graph.producer[t]) for t in closure(op.outputs, beyond))

    outside = [op for op in graph.ops if op.kind != "update" and not inside(op)]
    for op in sorted(outside, key=lambda op: op.loop is None):
        tensor = next((t for t in op.inputs if t in sums), None)
        if tensor is not None and (op.kind == "forward" or is_waited_for(op)):  # a forward's own backward waits
            return Between(op, tensor, _summed(graph, sums[tensor]))
    for op in outside:
        if op.path.endswith(MERGE) and op.inputs[0] in rows and is_waited_for(op):
            (tensor,) = op.outputs
            reader = next((reader for reader in graph.flow.readers(tensor) if reader.source), None)  # of the user's own
            if reader is not None:
                return Between(reader, tensor, graph.producer.get(rows[op.inputs[0]]))
    return None


def _summed(graph: Graph, total: PTensor) -> Op | None:
    """What makes the summands of a loop's sum: not the op that adds them to it."""
    adds = graph.producer.get(total)
    if adds is None or adds.anywhere != "sum":
        return adds
    return graph.producer.get(adds.inputs[1])
