"""Specs of what few models use: batched matrix functions, ragged products, approximate top-k, callbacks to the host.

`UNKNOWN` names what has no rule on purpose, and why; it replicates with a warning, as does anything else not in the table.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jscaler.capture.jaxprs import shape
from jscaler.ir.op import user_line
from jscaler.rules.table import Dims, Label, Spec, SpecFunction, dims

WHY = {
    "rare": "eig hessenberg householder_product schur tridiagonal tridiagonal_solve",
    "it holds functions that see whole operands": "custom_linear_solve linear_call",
    "it draws in an order of its own": "random_gamma rng_bit_generator rng_uniform",
    "its combiner is a program": "reduce reduce_window select_and_scatter",
    "a plan decides how tensors lie": "sharding_constraint",
    "it names a mesh axis": "psum pmax pmin ppermute all_gather all_to_all axis_index ragged_all_to_all",
    "it changes a reference": "get swap",
    "it orders effects": "create_token after_all",
}
UNKNOWN = {name: why for why, names in WHY.items() for name in names.split()}


def matrices(minor: Callable[[core.JaxprEqn], int], why: str) -> SpecFunction:
    """Leading dims are a batch; the last ``minor`` of every operand and result are seen whole."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        blocked: dict[Label, str] = {}

        def one(side: str, index: int, sizes: tuple[int, ...]) -> Dims:
            batch = ranks - own
            names: list[Any] = [i if i < batch else (side, index, i) for i in range(len(sizes))]
            labels = dims(sizes, names)
            blocked.update({label: why for dim in labels[batch:] for label in dim})
            return labels

        own, ranks = minor(eqn), len(shape(eqn.invars[0]))
        operands = tuple(one("in", i, shape(v)) for i, v in enumerate(eqn.invars))
        return Spec(operands, tuple(one("out", i, shape(v)) for i, v in enumerate(eqn.outvars)), blocked=blocked)

    return spec


def approx_top_k(eqn: core.JaxprEqn) -> Spec:
    """All dims pass but the one whose largest are taken."""
    sizes = shape(eqn.invars[0])
    axis = eqn.params["reduction_dimension"] % len(sizes)
    operand = dims(sizes, range(len(sizes)))
    made = dims((shape(eqn.outvars[0])[axis],), ["made"])[0]
    result = (*operand[:axis], made, *operand[axis + 1 :])
    why = "its largest are taken, which needs all of it"
    return Spec((operand,), (result,) * len(eqn.outvars), blocked=dict.fromkeys((*operand[axis], *made), why))


def ragged_dot_general(eqn: core.JaxprEqn) -> Spec:
    """A product whose rows come in groups of given sizes: what is not grouped passes as in a dot."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    left: list[Any] = [("l", i) for i in range(len(shape(eqn.invars[0])))]
    right: list[Any] = [("r", i) for i in range(len(shape(eqn.invars[1])))]
    for kind, pairs in (("c", zip(contract_l, contract_r, strict=True)), ("b", zip(batch_l, batch_r, strict=True))):
        for i, j in pairs:
            left[i] = right[j] = (kind, i)
    groups = numbers.rhs_group_dimensions
    for j in groups:
        right[j] = "group"
    (ragged,) = numbers.lhs_ragged_dimensions
    free_l = [n for i, n in enumerate(left) if i not in (*contract_l, *batch_l)]
    free_r = [n for j, n in enumerate(right) if j not in (*contract_r, *batch_r, *groups)]
    stacked = ["group"] if ragged in contract_l else []
    sizes = shape(eqn.invars[2])
    tensors = [
        dims(shape(eqn.invars[0]), left),
        dims(shape(eqn.invars[1]), right),
        dims(sizes, [*(("size", i) for i in range(len(sizes) - 1)), "group"]),
        *(dims(shape(v), [("offset", i) for i in range(len(shape(v)))]) for v in eqn.invars[3:]),
    ]
    result = dims(shape(eqn.outvars[0]), [*stacked, *(left[i] for i in batch_l), *free_l, *free_r])
    of_groups = (left[ragged], "group")
    blocked = {
        label: "its rows lie in groups whose sizes the program computes"
        for tensor in (*tensors, result)
        for dim in tensor
        for label in dim
        if label[0] in of_groups or label[0][0] in ("size", "offset")
    }
    return Spec(tuple(tensors), (result,), blocked=blocked, linear="pair")


def callback(eqn: core.JaxprEqn) -> Spec:
    """A call of the host sees its operands whole, once."""
    why = f"{called(eqn)} sees it whole"
    blocked: dict[Label, str] = {}

    def one(side: str, index: int, sizes: tuple[int, ...]) -> Dims:
        labels = dims(sizes, [(side, index, i) for i in range(len(sizes))])
        blocked.update({label: why for dim in labels for label in dim})
        return labels

    operands = tuple(one("in", i, shape(v)) for i, v in enumerate(eqn.invars))
    return Spec(operands, tuple(one("out", i, shape(v)) for i, v in enumerate(eqn.outvars)), blocked=blocked)


def called(eqn: core.JaxprEqn) -> str:
    """What a host callback is and where it was written."""
    function = getattr(eqn.params.get("callback"), "callback_func", None)
    name = getattr(function, "__name__", None) or eqn.params.get("fmt")
    return f"the host callback{f' {name!r}' if name else ''} of {user_line(eqn.source_info)}"


CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")


def pairwise(eqn: core.JaxprEqn) -> Spec:
    """Each result is its operand."""
    each: Sequence[Dims] = [dims(shape(v), [(i, d) for d in range(len(shape(v)))]) for i, v in enumerate(eqn.invars)]
    return Spec(tuple(each), tuple(each), pairwise=True)
