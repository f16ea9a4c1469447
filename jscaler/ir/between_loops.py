"""What keeps loops of one time axis apart: an op between them that needs what all iterations of the first make."""

from collections.abc import Mapping
from dataclasses import dataclass

from jscaler.ir.graph import Graph
from jscaler.ir.loop import Loop, chain_of
from jscaler.ir.op import Op
from jscaler.ir.tensor import PTensor
from jscaler.ir.walk import closure


@dataclass(frozen=True)
class Between:
    """``op`` reads ``tensor``, which all iterations of a loop have made, by ``maker``."""

    op: Op
    tensor: PTensor
    maker: Op | None

    def __str__(self) -> str:
        where = f" (at {self.op.source})" if self.op.source else ""
        maker = f", which '{self.maker.path}' makes" if self.maker is not None else ""
        return f"'{self.op.path}'{where} needs '{self.tensor.name}' of all micro-batches{maker}"

    @property
    def ops(self) -> tuple[str, ...]:
        """Paths of the two."""
        return (self.op.path, *((self.maker.path,) if self.maker is not None else ()))


def between_loops(graph: Graph, loops: Mapping[str, Loop], differentiated: bool = False) -> Between | None:
    """The first op that reads what all iterations of one of ``loops`` leave, and that another waits for.

    Forward ops go first, and of these the ops of a loop over layers.

    Args:
        differentiated: only ops that a gradient flows through (no teacher's, no update's), and whose results are awaited.
    """
    # what all iterations have made -> the tensor that is shown for it, and what one iteration makes of it
    whole = {y.stack: (y.stack, y.slice) for loop in loops.values() for y in loop.ys}
    whole |= {c.final: (c.final, c.out) for loop in loops.values() for c in loop.carries}
    parts = {op.path for op in graph.ops if not loops.keys().isdisjoint(chain_of(op.loop, graph.loops))}
    needed = {*closure((t for op in graph.ops if op.path in parts for t in op.inputs), graph.flow.operands)}
    awaited = parts | {op.path for op in graph.ops if not needed.isdisjoint(op.outputs)}
    if not differentiated:  # a backward op that others wait for may need no result of its forward op
        awaited |= {op.forward.path for op in graph.ops if op.forward is not None and op.path in awaited}
    again = {op.again.path for op in graph.ops if op.again is not None}
    readers: list[tuple[Op, PTensor]] = []
    for op in graph.ops:
        tensor = next((t for t in op.inputs if t in whole), None)
        if tensor is None or op.path not in awaited:
            continue
        if not is_of_the_step(op):
            shown, part = whole[tensor]
            whole.update((t, (shown if op.path in parts else t, part)) for t in op.outputs)
        elif not differentiated or op.kind == "backward" or op.backward is not None or op.path in again:
            readers.append((op, tensor))
    if not readers:
        return None
    op, tensor = min(readers, key=lambda pair: (pair[0].kind != "forward", pair[0].path in parts or pair[0].loop is None))
    shown, part = whole[tensor]
    return Between(op, shown, _summed(graph, part))


def is_of_the_step(op: Op) -> bool:
    """Whether the user's step has ``op``, or its forward; others put parts together, cast them, or cut them again."""
    return op.source_info is not None or op.forward is not None


def _summed(graph: Graph, total: PTensor) -> Op | None:
    """What makes the summands of a loop's sum: not the op that adds them to it."""
    adds = graph.flow.maker(total)
    if adds is None or adds.anywhere != "sum":
        return adds
    return graph.producer.get(adds.inputs[1])
