"""Dims that are added, dropped, turned and reshaped."""

from typing import Any

from jax.extend import core

from jscaler.ir.equations import shape
from jscaler.lax_primitives.primitive import Part, Primitive, Shaped
from jscaler.lax_primitives.reductions import along
from jscaler.lax_primitives.reshapes import reshape
from jscaler.lax_primitives.spec import Spec, dims


def broadcast_in_dim(eqn: core.JaxprEqn) -> Spec:
    target = eqn.params["shape"]
    result = dims(target, range(len(target)))
    places = eqn.params["broadcast_dimensions"]
    source = tuple(() if size == 1 else result[place] for size, place in zip(shape(eqn.invars[0]), places, strict=True))
    return Spec((source,), (result,), linear="move")


def transpose(eqn: core.JaxprEqn) -> Spec:
    source = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    return Spec((source,), (tuple(source[p] for p in eqn.params["permutation"]),), linear="move")


def squeeze(eqn: core.JaxprEqn) -> Spec:
    source = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    return Spec((source,), (tuple(d for i, d in enumerate(source) if i not in eqn.params["dimensions"]),), linear="move")


def expand_dims(eqn: core.JaxprEqn) -> Spec:
    source = list(dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0])))))
    new = {d % len(shape(eqn.outvars[0])) for d in eqn.params["dimensions"]}
    result = tuple(() if i in new else source.pop(0) for i in range(len(shape(eqn.outvars[0]))))
    return Spec((dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0])))),), (result,), linear="move")


def tile(eqn: core.JaxprEqn) -> Spec:
    """A dim of the result is the repetitions, and in each the operand's dim."""
    source = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    again = dims(eqn.params["reps"], [("again", d) for d in range(len(source))])
    return Spec((source,), (tuple(r + d for r, d in zip(again, source, strict=True)),), linear="move")


def sized(parameter: str) -> Shaped:
    """The result's shape as a parameter."""
    return lambda part, eqn: {parameter: part.shape(eqn.outvars[0])}


def _broadcast(part: Part, eqn: core.JaxprEqn) -> dict[str, Any]:
    return {"shape": part.extended(eqn.outvars[0])}


def _tile(part: Part, eqn: core.JaxprEqn) -> dict[str, Any]:
    sizes = zip(part.shape(eqn.outvars[0]), part.shape(eqn.invars[0]), eqn.params["reps"], strict=True)
    return {"reps": tuple(all_ // one if one else reps for all_, one, reps in sizes)}


RECORDS = (
    Primitive(
        "broadcast_in_dim", broadcast_in_dim, shaped=_broadcast, by_row=True, zero="any", counts=True, role="moves",
        refilled=True, cost="fused", seen="moves",
    ),
    Primitive(
        "reshape", reshape, shaped=sized("new_sizes"), zero="any", hands_on=True, counts=True, role="moves", cost="alias",
        seen="moves",
    ),
    Primitive(
        "transpose", transpose, by_row=True, zero="any", hands_on=True, counts=True, role="moves", cost="fused",
        seen="moves",
    ),
    Primitive(
        "squeeze", squeeze, by_row=True, zero="any", hands_on=True, counts=True, role="moves", cost="alias", seen="moves"
    ),
    Primitive("expand_dims", expand_dims, by_row=True, hands_on=True, counts=True, cost="alias"),
    Primitive("rev", along("dimensions", "move", "it is reversed"), cost="fused", seen="moves"),
    Primitive(
        "tile", tile, shaped=_tile, zero="any", hands_on=True, counts=True, role="moves", cost="fused", seen="moves"
    ),
)  # fmt: skip
