"""What keeps loops of one time axis apart: an op between them that needs what all iterations of the first make."""

from collections.abc import Mapping
from dataclasses import dataclass

from jscaler.ir.graph import Graph
from jscaler.ir.loop import Loop, chain_of
from jscaler.ir.op import Op
from jscaler.ir.tensor import PTensor
from jscaler.text.folding import folded


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
    """The first op that reads a sum which one of ``loops`` leaves; an op of a loop over layers goes first."""
    sums = {c.final: c.out for loop in loops.values() for c in loop.carries}
    outside = [op for op in graph.ops if op.kind != "update" and loops.keys().isdisjoint(chain_of(op.loop, graph.loops))]
    for op in sorted(outside, key=lambda op: op.loop is None):
        for tensor in op.inputs:
            if tensor in sums:
                return Between(op, tensor, _summed(graph, sums[tensor]))
    return None


def _summed(graph: Graph, total: PTensor) -> Op | None:
    """What makes the summands of a loop's sum: not the op that adds them to it."""
    adds = graph.producer.get(total)
    if adds is None or adds.anywhere != "sum":
        return adds
    return graph.producer.get(adds.inputs[1])
