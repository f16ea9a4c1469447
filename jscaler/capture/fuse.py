"""Fuse neighbouring forward ops into one, before autodiff: their backward is then ``jax.vjp`` of the fused body.

    x ──► logits ──► cross entropy ──► loss          x ──► fused ──► loss
          ▲                                  becomes       ▲
          kernel                                           kernel

What only the members read is inside the fused op, forward and backward: it is never handed on, and an algorithm that
runs the op in pieces never holds it whole.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jscaler.capture.bodies import BodyTable
from jscaler.capture.differentiated import differentiated
from jscaler.capture.jaxprs import evaluate
from jscaler.errors import PlanError, listing
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.loop import made_by, reads_of
from jscaler.ir.op import names_of, sub_dims
from jscaler.ir.walk import between, dependents


def fuse(graph: Graph, paths: Sequence[str], path: str, bodies: BodyTable) -> Graph:
    """``graph`` with the forward ops at ``paths`` as one op at ``path``, and its gradient call differentiated again.

    Raises:
        UnknownNameError: no such op.
        PlanError: ops that cannot be one: of different gradient calls, not forward, with another op in between, or the
            new path is taken.
    """
    members = sorted((graph[p] for p in dict.fromkeys(paths)), key=graph.ops.index)
    _check(graph, members, path)
    own = set(members)
    made = [t for op in members for t in op.outputs]
    inputs = tuple(dict.fromkeys(t for op in members for t in op.inputs if t not in made))
    outputs = tuple(t for t in made if _read_outside(graph, t, own))

    def body(*args: Any) -> list[Any]:
        values = dict(zip(inputs, args, strict=True))
        for op in members:
            assert op.body is not None
            values.update(zip(op.outputs, evaluate(op.body.jaxpr, [values[t] for t in op.inputs]), strict=True))
        return [values[t] for t in outputs]

    last = members[-1]
    fused = Op(
        path, "forward", inputs, outputs, bodies.traced(body, [t.aval for t in inputs]), last.source_info, last.call,
        named=names_of((*inputs, *outputs), sub_dims(members)), loop=last.loop, remat=last.remat,
    )  # fmt: skip
    return differentiated(dataclasses.replace(graph, ops=_in_order(graph, members, fused)), last.call, bodies)


def _check(graph: Graph, members: Sequence[Op], path: str) -> None:
    if len(members) < 2:
        raise PlanError(f"fuse takes two or more ops; {listing([op.path for op in members]) or 'none'} was given")
    wrong = [op.path for op in members if op.kind != "forward"]
    if wrong:
        raise PlanError(f"fuse takes forward ops, and their backwards follow; {listing(wrong)} are none")
    calls = {op.call for op in members}
    if len(calls) > 1:
        raise PlanError(f"{listing([op.path for op in members])} belong to different gradient calls and cannot be one op")
    first, last = graph.ops.index(members[0]), graph.ops.index(members[-1])
    if any(op.loop != members[0].loop for op in graph.ops[first : last + 1]) or len({op.remat for op in members}) > 1:
        raise PlanError(
            f"{listing([op.path for op in members])} cannot be one op: the edge of a loop or of a checkpointed region lies "
            "between them; fuse ops of one body"
        )
    if path in graph.by_path and graph[path] not in members:
        raise PlanError(f"the graph has an op '{path}' already; give the fused op another name")
    others = between(graph.ops, set(members), reads_of, made_by)
    if others:
        raise PlanError(
            f"{listing([op.path for op in members])} cannot be one op: {listing([op.path for op in others])} reads some "
            "of them and is read by others; fuse it too"
        )


def _read_outside(graph: Graph, tensor: PTensor, own: set[Op]) -> bool:
    """Whether anything but the members and the gradient call's backward, which is made anew, reads ``tensor``."""
    call = next(iter(own)).call
    readers = [op for op in graph.consumers.get(tensor, ()) if op not in own]
    if any(op.kind != "backward" or op.call != call for op in readers) or tensor in graph.outputs:
        return True
    if any(tensor in (*loop.operands, *loop.returned) for loop in graph.loops.values() if loop.forward is None):
        return True
    return any(tensor == c.loss or tensor in c.wrt for c in graph.calls)


def _in_order(graph: Graph, members: Sequence[Op], fused: Op) -> tuple[Op, ...]:
    """The fused op in the place of its last member, and what reads a member behind it."""
    own, end = set(members), graph.ops.index(members[-1])
    behind = set(dependents(graph.ops[:end], own, reads_of, made_by))
    before, waiting = ([op for op in graph.ops[:end] if op not in own and (op in behind) == late] for late in (False, True))
    return (*before, fused, *waiting, *graph.ops[end + 1 :])
