"""In which dtype gradients are added between devices.

A gradient in few bits that goes on to a master copy in more is added in the master's: what each device holds is rounded
already, and the sum is not rounded at every hop. To add in fewer bits, which sends fewer bytes, is asked for::

    params32 ─ cast ─► params16 ─► loss          d(params16) ──► Σ over devices ──► cast ──► d(params32) ──► update
                                                                 in 32 bits, unless reduce_dtype says 16
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jscaler.capture.jaxprs import dtype
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.walk import closure
from jscaler.lax_primitives import is_cast


def summing_dtypes(graph: Graph, ops: Sequence[Op], asked: str | None) -> Mapping[PTensor, str]:
    """The dtype in which value shares of a tensor are added, where it is not the tensor's own.

    Args:
        asked: the dtype that a plan asks for, which holds for all gradients.
    """
    if asked is None:
        return _masters(graph)
    gradients = [t for op in ops if op.kind == "backward" and not op.again for t in op.outputs]
    gradients += [t for loop in graph.loops.values() if loop.forward for t in (*loop.inner, *loop.results)]
    return dict.fromkeys((t for t in gradients if t.role == "gradient" and _is_real(t) and t.dtype != asked), asked)


def _masters(graph: Graph) -> dict[PTensor, str]:
    """Gradients of parameters that a cast to more bits reads; the parameter may be a cast one, and its gradient too."""
    found: dict[PTensor, str] = {}

    def before_cast(tensor: PTensor) -> list[PTensor]:
        maker = graph.producer.get(tensor)
        return [t for t in maker.inputs if t.shape == tensor.shape] if maker is not None and _only_casts(maker) else []

    for tensor in closure((g for call in graph.calls for g in call.gradients if _is_real(g)), before_cast):
        wider = [d for op in graph.consumers.get(tensor, ()) for d in _wider(op, tensor)]
        if wider:
            found[tensor] = max(wider, key=lambda d: jnp.dtype(d).itemsize)
    for loop in graph.loops.values():  # what a loop stacks or carries is summed inside of it, or behind it
        pairs = [*((y.stack, y.slice) for y in loop.ys), *((c.final, c.out) for c in loop.carries)]
        found |= {inner: found[outer] for outer, inner in pairs if outer in found}
    for op in graph.ops:  # a summand that is scattered in every iteration
        if op.anywhere == "sum" and op.inputs[1].role == "gradient":
            wide = found.get(op.outputs[0], jnp.dtype(op.outputs[0].dtype).name)
            if jnp.dtype(wide).itemsize > op.inputs[1].itemsize:
                found[op.inputs[1]] = wide
    return found


def _is_real(tensor: PTensor) -> bool:
    return bool(tensor.shape) and jnp.issubdtype(tensor.dtype, jnp.floating)


def _only_casts(op: Op) -> bool:
    return op.body is not None and all(map(is_cast, op.body.jaxpr.eqns))


def _wider(op: Op, tensor: PTensor) -> list[str]:
    """The dtypes with more bits to which ``op`` casts ``tensor``, where it does nothing else with it."""
    if op.body is None:
        return []
    variable = op.body.jaxpr.invars[op.inputs.index(tensor)]
    readers = [e for e in op.body.jaxpr.eqns if variable in e.invars]
    casts = [dtype(e.outvars[0]) for e in readers if is_cast(e)]
    wider = [d for d in casts if _bytes(d) > tensor.itemsize and len(casts) == len(readers)]
    return [jnp.dtype(d).name for d in wider]


def _bytes(kind: Any) -> int:
    return jnp.dtype(kind).itemsize if jnp.issubdtype(kind, jnp.floating) else 0
