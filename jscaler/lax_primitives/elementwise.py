"""Arithmetic on each element by itself, casts and choices: every operand dim is the result dim at the same place."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jscaler.ir.equations import dtype, shape
from jscaler.lax_primitives.primitive import Primitive
from jscaler.lax_primitives.spec import Spec, SpecFunction, dims


def elementwise(linear: str = "") -> SpecFunction:
    """Every operand dim is the result dim at the same place; scalars and size-1 dims broadcast."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        rank = len(shape(eqn.outvars[0]))
        operands = tuple(dims(shape(v), range(rank)) if shape(v) else () for v in eqn.invars)
        return Spec(operands, tuple(dims(shape(v), range(rank)) for v in eqn.outvars), linear=linear)

    return spec


def convert(eqn: core.JaxprEqn) -> Spec:
    """Casts are linear between floats, unless they narrow: a partial sum in fewer bits is another number.

    One to the same type (from a weak one) is linear; one to a wider integer is not, as a sum may have gone round.
    """
    source, target = (np.dtype(dtype(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    widens = all(jnp.issubdtype(d, jnp.floating) for d in (source, target)) and target.itemsize > source.itemsize
    return elementwise("move" if widens or source == target else "")(eqn)


def divide(eqn: core.JaxprEqn) -> Spec:
    """Linear in the dividend; integer division rounds each share, and is not."""
    floating = jnp.issubdtype(dtype(eqn.invars[0]), jnp.inexact)
    return elementwise("first" if floating else "")(eqn)


def bitcast(eqn: core.JaxprEqn) -> Spec:
    """Elementwise between words of one size; else the minor dim holds the pieces of a word."""
    same = len(shape(eqn.invars[0])) == len(shape(eqn.outvars[0]))
    return (elementwise() if same else trailing("it holds the pieces of a word"))(eqn)


def trailing(why: str) -> SpecFunction:
    """Leading dims pass; dims that only one side has are blocked (the words of a random key)."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        ranks = [len(shape(v)) for v in (*eqn.invars, *eqn.outvars)]
        common = min(ranks)
        longest = max((*eqn.invars, *eqn.outvars), key=lambda v: len(shape(v)))
        labels = dims(shape(longest), range(len(shape(longest))))
        blocked = {label: why for d in labels[common:] for label in d}
        operands = tuple(labels[: len(shape(v))] for v in eqn.invars)
        return Spec(operands, tuple(labels[: len(shape(v))] for v in eqn.outvars), blocked=blocked)

    return spec


def _by_element(name: str, linear: str = "", **facts: Any) -> Primitive:
    return Primitive(name, **{"spec": elementwise(linear), "by_row": True, "cost": "fused"} | facts)


PLAIN = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz cos cosh digamma eq_to erf_inv erfc
    exp2 expm1 floor igamma igamma_grad_a igammac integer_pow is_finite le_to lgamma log1p log2 lt_to mulhi nextafter not
    one_minus_square polygamma population_count pow regularized_incomplete_beta rem round shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh square tan xor zeta
"""
# what names a fragment that holds nothing heavier
WEIGHTS = {"erf": 40, "tanh": 39, "logistic": 38, "exp": 37, "log": 36, "rsqrt": 35, "sqrt": 25}
ON_NUMPY = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}  # fmt: skip
EXTREMA: dict[str, dict[str, Any]] = {
    "max": {"combiner": "max", "numpy": np.maximum},
    "min": {"combiner": "min", "numpy": np.minimum},
    "or": {"combiner": "max"},  # of booleans
    "and": {"combiner": "min"},
}

RECORDS = (
    *(_by_element(name) for name in PLAIN.split()),
    *(_by_element(name, weight=weight) for name, weight in WEIGHTS.items()),
    *(_by_element(name, numpy=fun) for name, fun in ON_NUMPY.items()),
    *(_by_element(name, seen="joins", **facts) for name, facts in EXTREMA.items()),
    _by_element("reduce_precision", hands_on=True, counts=True, seen="same"),
    _by_element("threefry2x32", cost="drawn"),
    # linear in all operands together
    _by_element("add", "add", zero="all", counts=True, combiner="add", numpy=np.add, seen="joins"),
    _by_element("add_any", "add", zero="all", counts=True, combiner="add", seen="joins"),
    _by_element("sub", "add", zero="all", counts=True, numpy=np.subtract),
    _by_element("neg", "add", zero="any", counts=True, numpy=np.negative),
    *(_by_element(name, "add") for name in ("complex", "conj", "imag", "real")),
    # in each alone, in the first alone
    _by_element("mul", "each", zero="any", counts=True, numpy=np.multiply, seen="scales"),
    _by_element("div", spec=divide, counts=True),
    # what moves
    _by_element("copy", "move", zero="any", counts=True, hands_on=True, cost="alias", seen="same"),
    _by_element("stop_gradient", "move", counts=True, hands_on=True, cost="alias"),
    _by_element("name", "move", by_row=False, cost="alias"),
    _by_element(
        "convert_element_type", spec=convert, zero="any", counts=True, hands_on=True, role="moves", seen="casts"
    ),
    _by_element(
        "select_n", "select", data=lambda count: range(1, count), zero="all", hands_on=True, seen="moves",
        weight=20, word="where",
    ),
    Primitive("bitcast_convert_type", bitcast, cost="fused"),
)  # fmt: skip
