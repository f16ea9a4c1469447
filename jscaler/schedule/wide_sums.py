"""Sums of gradients over parts in time, in more bits than the gradients have.

each part          g16' ──► cast ──► + ──► carry in 32 bits
after the last     sum32 ──► cast ──► g16                     who wants the gradient in its own dtype
                   sum32 ──────────► update of a master       who would cast it up again reads the sum as it is
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import dtype, make_jaxpr, swapped
from jscaler.ir import Body, Graph, Op, PTensor
from jscaler.lax_primitives import is_cast


def wide_sum(tensor: PTensor, asked: str | None, name: str) -> PTensor | None:
    """The sum of ``tensor``'s parts in the dtype that a plan asks for, if that has more bits."""
    if asked is None or tensor.role != "gradient" or not jnp.issubdtype(tensor.dtype, jnp.floating):
        return None
    if not jnp.promote_types(tensor.dtype, asked) == jnp.dtype(asked) != tensor.dtype:
        return None
    return PTensor(name, tensor.aval.update(dtype=jnp.dtype(asked), weak_type=False), tensor.role)


def add_wide(bodies: BodyTable, wide: Any, part: Any) -> Body:
    """The add of a part to what is there in more bits."""
    return bodies.traced(lambda sofar, x: [sofar + x.astype(sofar.dtype)], [wide, part], key="add wide")


def cast(bodies: BodyTable, aval: Any, kind: Any) -> Body:
    return bodies.traced(lambda x: [x.astype(kind)], [aval], key=("cast", jnp.dtype(kind)))


def read_wide(graph: Graph, wide: Mapping[PTensor, PTensor], bodies: BodyTable) -> Graph:
    """``graph``, in which who only casts a gradient to more bits reads its wide sum.

    Args:
        wide: gradient -> the sum that it is a cast of.
    """
    if not wide:
        return graph
    ops = tuple(_reads_wide(op, wide, bodies) for op in graph.ops)
    kept = {t for op in ops for t in op.inputs} | set(graph.outputs)
    kept |= {t for loop in graph.loops.values() for t in (*loop.operands, *loop.returned)}
    gone = {t: w for t, w in wide.items() if t not in kept}
    calls = tuple(
        dataclasses.replace(call, gradients=tuple(gone.get(g, g) for g in call.gradients)) for call in graph.calls
    )
    ops = tuple(op for op in ops if not (len(op.outputs) == 1 and op.outputs[0] in gone))
    return dataclasses.replace(graph, ops=ops, calls=calls)


def _reads_wide(op: Op, wide: Mapping[PTensor, PTensor], bodies: BodyTable) -> Op:
    places = [i for i, t in enumerate(op.inputs) if t in wide and op.body is not None]
    places = [i for i in places if _only_cast_up(op.body.jaxpr, i, wide[op.inputs[i]])]  # type: ignore[union-attr]
    if not places:
        return op
    assert op.body is not None
    jaxpr = op.body.jaxpr
    table: dict[core.Var, core.Var] = {}
    invars = list(jaxpr.invars)
    for i in places:
        invars[i] = core.Var(wide[op.inputs[i]].aval)
        table[jaxpr.invars[i]] = invars[i]
    eqns = [e.replace(invars=[swapped(table, v) for v in e.invars]) for e in jaxpr.eqns]
    body = bodies.intern(make_jaxpr(eqns, invars, jaxpr.outvars, jaxpr))
    inputs = tuple(wide[t] if i in places else t for i, t in enumerate(op.inputs))
    return dataclasses.replace(op, inputs=inputs, body=body)


def _only_cast_up(jaxpr: core.Jaxpr, place: int, sum_: PTensor) -> bool:
    """Whether a program does nothing with an operand but cast it to a dtype that has all bits of ``sum_``."""
    variable = jaxpr.invars[place]
    readers = [e for e in jaxpr.eqns if variable in e.invars]
    return (
        bool(readers)
        and variable not in jaxpr.outvars
        and all(
            is_cast(e)
            and jnp.issubdtype(dtype(e.outvars[0]), jnp.floating)
            and jnp.promote_types(dtype(e.outvars[0]), sum_.dtype) == dtype(e.outvars[0])
            for e in readers
        )
    )
