"""Values of dots are known in either order of their operands, and told apart where a dim goes elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jscaler.verification.trace import trace_local
from jscaler.verification.values import Values

SQUARE = jax.ShapeDtypeStruct((4, 4, 4), jnp.float32)
FREE, BATCHED = (((2,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
HIGH, LOW = lax.Precision.HIGHEST, lax.Precision.DEFAULT


def plain(a: Any, b: Any) -> jax.Array:
    return lax.dot_general(a, b, FREE)


def same(one: Any, other: Any) -> bool:
    """Whether two functions of ``a`` and ``b`` are known to compute the same value."""
    values = Values()
    results = [values.results(trace_local(lambda a, b, f=f: [f(a, b)], {}, [SQUARE] * 2), 2) for f in (one, other)]
    return results[0] == results[1]


EQUAL = {
    "swapped": (
        lambda a, b: plain(a, b).transpose(2, 3, 0, 1),
        lambda a, b: lax.dot_general(b, a, (((0,), (2,)), ((), ()))),
    ),
    "batched": (
        lambda a, b: lax.dot_general(a, b, BATCHED).transpose(0, 2, 1),
        lambda a, b: lax.dot_general(b, a, (((1,), (2,)), ((0,), (0,)))),
    ),
    "twice": (lambda a, b: plain(a, b).transpose(1, 2, 3, 0).transpose(3, 0, 1, 2), plain),
    "precision": (
        lambda a, b: lax.dot_general(a, b, FREE, precision=(HIGH, LOW)).transpose(2, 3, 0, 1),
        lambda a, b: lax.dot_general(b, a, (((0,), (2,)), ((), ())), precision=(LOW, HIGH)),
    ),
}
DIFFERENT = {
    "not transposed": (plain, lambda a, b: lax.dot_general(b, a, (((0,), (2,)), ((), ())))),
    "transposed otherwise": (
        lambda a, b: plain(a, b).transpose(1, 0, 2, 3),
        lambda a, b: plain(a, b).transpose(0, 1, 3, 2),
    ),
    "another dim is summed": (plain, lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())))),
    "another pairing": (
        lambda a, b: lax.dot_general(a, b, (((1, 2), (0, 1)), ((), ()))),
        lambda a, b: lax.dot_general(a, b, (((1, 2), (1, 0)), ((), ()))),
    ),
    "operands": (plain, lambda a, b: plain(b, a)),
    "precision": (plain, lambda a, b: lax.dot_general(a, b, FREE, precision=HIGH)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_a_transposed_dot_is_the_dot_of_swapped_operands(case: str) -> None:
    assert same(*EQUAL[case])


@pytest.mark.parametrize("case", DIFFERENT)
def test_other_dots_are_other_values(case: str) -> None:
    assert not same(*DIFFERENT[case])
