"""A gradient call differentiated again, once its forward ops are others than those that were captured."""

import dataclasses

from jscaler.capture.autodiff import Differentiator
from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.loop import chain_of


def differentiated(graph: Graph, index: int | None, bodies: BodyTable, start: int | None = None) -> Graph:
    """``graph`` with the backward of gradient call ``index`` made anew for its forward ops; gradients keep their names.

    Args:
        start: where its backward ops belong, if it has none; else where the first is.
    """
    if start is None:
        start = next((i for i, op in enumerate(graph.ops) if op.call == index and op.kind == "backward"), None)
    if index is None or start is None:
        return graph
    call = graph.calls[index]
    forward = [op for op in graph.ops if op.call == index and op.kind == "forward"]
    mine = [op for op in graph.ops if op.call == index and op.kind == "backward"]
    gone = {name for op in mine for name in chain_of(op.loop, graph.loops)}
    loops = {name: loop for name, loop in graph.loops.items() if name not in gone}
    differentiator = Differentiator(bodies, index, loops)
    gradients = differentiator.run(forward, call.loss, call.wrt)
    known = dict(zip(gradients, call.gradients, strict=True))

    def named(tensor: PTensor) -> PTensor:
        return known.get(tensor, tensor)

    made = [op.mapped(named) for op in differentiator.ops]
    handles = {op.forward.path: op for op in made if op.forward is not None}
    ops: list[Op] = []
    for i, op in enumerate((*graph.ops, None)):
        ops += made if i == start else []
        if op is not None and op.call != index:
            ops.append(op)
        elif op is not None and op.kind == "forward":
            ops.append(dataclasses.replace(op, backward=handles.get(op.path)))
    loops |= {n: loop.mapped(named) for n, loop in differentiator.made.items()}
    return dataclasses.replace(graph, ops=tuple(ops), loops=loops)
