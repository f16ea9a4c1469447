"""Products: dims that both operands have are contracted, or are a batch. A convolution stands with the windows."""

import math
from typing import Any

from jax.extend import core

from jscaler.ir.equations import shape
from jscaler.lax_primitives.primitive import Primitive
from jscaler.lax_primitives.spec import Spec, dims

CONTRACTED, BATCH, LEFT, RIGHT = "c", "b", "l", "r"


def _names(eqn: core.JaxprEqn) -> tuple[list[Any], list[Any], list[Any]]:
    """What the dims of both operands are called, and those of the result of a dot."""
    left, right = ([(side, i) for i in range(len(shape(v)))] for side, v in zip((LEFT, RIGHT), eqn.invars, strict=False))
    batch: list[Any] = []
    for kind, (dims_l, dims_r) in zip((CONTRACTED, BATCH), _numbers(eqn), strict=True):
        for i, j in zip(dims_l, dims_r, strict=True):
            left[i] = right[j] = (kind, i)
            batch += [(kind, i)] if kind == BATCH else []
    return left, right, [*batch, *(n for n in left if n[0] == LEFT), *(n for n in right if n[0] == RIGHT)]


def _numbers(eqn: core.JaxprEqn) -> Any:
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    return eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers


def _flops(eqn: core.JaxprEqn) -> float:
    """Of ragged rows as if all were in one group."""
    (contracted, _), _ = _numbers(eqn)
    return 2.0 * math.prod(shape(eqn.outvars[0])) * math.prod(shape(eqn.invars[0])[d] for d in contracted)


def dot_general(eqn: core.JaxprEqn) -> Spec:
    left, right, out = _names(eqn)
    operands = dims(shape(eqn.invars[0]), left), dims(shape(eqn.invars[1]), right)
    return Spec(operands, (dims(shape(eqn.outvars[0]), out),), linear="each")


def ragged_dot_general(eqn: core.JaxprEqn) -> Spec:
    """A product whose rows come in groups of given sizes: what is not grouped passes as in a dot."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    left, right, out = _names(eqn)
    (ragged,) = numbers.lhs_ragged_dimensions
    out = [n for n in out if n not in [(RIGHT, j) for j in numbers.rhs_group_dimensions]]
    for j in numbers.rhs_group_dimensions:
        right[j] = "group"
    stacked = ["group"] if left[ragged][0] == CONTRACTED else []
    sizes = shape(eqn.invars[2])
    tensors = [
        dims(shape(eqn.invars[0]), left),
        dims(shape(eqn.invars[1]), right),
        dims(sizes, [*(("size", i) for i in range(len(sizes) - 1)), "group"]),
        *(dims(shape(v), [("offset", i) for i in range(len(shape(v)))]) for v in eqn.invars[3:]),
    ]
    result = dims(shape(eqn.outvars[0]), [*stacked, *out])
    of_groups = (left[ragged], "group")
    blocked = {
        label: "its rows lie in groups whose sizes the program computes"
        for tensor in (*tensors, result)
        for dim in tensor
        for label in dim
        if label[0] in of_groups or label[0][0] in ("size", "offset")
    }
    return Spec(tuple(tensors), (result,), blocked=blocked, linear="pair")


RECORDS = (
    Primitive("dot_general", dot_general, combiner="add", role="contracts", flops=_flops, weight=90, word="dot"),
    Primitive("ragged_dot_general", ragged_dot_general, role="contracts", flops=_flops),
)
