"""Parameters that are whole only while they are used: a backward op reads a fenced copy, which is put together again.

    forward    part ──► whole ──► f ──► y
    backward   part ─┐
                     ├─ fence ──► part' ──► whole' ──► backward of f
               dy  ──┘                                 the whole is not kept from the forward until here

The fence (an ``optimization_barrier`` over the part and the cotangent) makes the part a new value, so that nobody merges
the two wholes, and none that is made before the cotangent is there. Loops need none: what their backward reads of a stack
of parameters is another slice of it. (Rajbhandari et al., ZeRO, 2020, section 5.3; Zhao et al., PyTorch FSDP, 2023.)
"""

import dataclasses
from collections.abc import Set

from jscaler.capture.bodies import BodyTable
from jscaler.capture.recompute import with_fence_body
from jscaler.ir import Graph, Op, PTensor

REFETCHED = "@refetched"


def refetched(graph: Graph, tensors: Set[PTensor], bodies: BodyTable) -> Graph:
    """``graph``, whose backward ops outside of loops read ``tensors`` through a fence each."""
    if not tensors:
        return graph
    groups: dict[str, list[Op]] = {}  # the pieces of a backward op fetch together
    for op in graph.ops:
        if op.forward is not None and op.loop is None:
            groups.setdefault(op.forward.path, []).append(op)
    fences: dict[str, Op] = {}
    tables: dict[str, dict[PTensor, PTensor]] = {}
    for path, ops in groups.items():
        reads = dict.fromkeys(t for op in ops for t in op.inputs)
        wanted = [t for t in reads if t in tensors]
        if not wanted:
            continue
        cotangents = [t for _, t in ops[0].cotangents if t in reads]
        table = {t: PTensor(f"{t.name}{REFETCHED}@{path}", t.aval, t.role) for t in dict.fromkeys((*wanted, *cotangents))}
        fence = Op(f"{path}@refetch", "backward", tuple(table), tuple(table.values()), call=ops[0].call, anywhere="fence")
        fences[ops[0].path] = with_fence_body(fence, bodies)
        tables.update((op.path, table) for op in ops)
    made: list[Op] = []
    for op in graph.ops:
        made += [fences[op.path]] if op.path in fences else []
        made.append(op.renamed(tables.get(op.path, {})))
    return dataclasses.replace(graph, ops=tuple(made))
