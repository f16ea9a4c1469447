"""A transpose right after a dot is the dot of the other order; what else reads the dot keeps both."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jscaler.capture.jaxprs import evaluate, make_jaxpr, trace_flat
from jscaler.flat_passes.swaps import swap_dots

A, B = np.random.default_rng(0).normal(size=(2, 3, 4, 5)), np.random.default_rng(1).normal(size=(2, 4, 6, 3))
PLAIN, BATCHED = (((1, 2), (3, 1)), ((), ())), (((1,), (3,)), ((0,), (0,)))  # leave 2·5 and 2·6; batch 2, 4·5 and 4·6


def dot(a: Any, b: Any, numbers: Any = PLAIN, **more: Any) -> jax.Array:
    return lax.dot_general(a, b, numbers, **more)


CASES: dict[str, tuple[Any, list[str]]] = {
    "plain": (lambda a, b: [dot(a, b).transpose(2, 3, 0, 1)], ["dot_general"]),
    "batched": (lambda a, b: [dot(a, b, BATCHED).transpose(0, 3, 4, 1, 2)], ["dot_general"]),
    "undone": (lambda a, b: [dot(a, b).transpose(2, 3, 0, 1).transpose(2, 3, 0, 1)], ["dot_general"]),
    "precision": (
        lambda a, b: [dot(a, b, precision=(lax.Precision.HIGHEST, lax.Precision.DEFAULT)).transpose(2, 3, 0, 1)],
        ["dot_general"],
    ),
    "within an operand": (lambda a, b: [dot(a, b).transpose(3, 2, 0, 1)], ["dot_general", "transpose"]),
    "batch moves": (lambda a, b: [dot(a, b, BATCHED).transpose(3, 4, 0, 1, 2)], ["dot_general", "transpose"]),
    "read twice": (lambda a, b: [(y := dot(a, b)).transpose(2, 3, 0, 1), jnp.cos(y)], ["dot_general", "transpose", "cos"]),
    "handed out": (lambda a, b: [(y := dot(a, b)).transpose(2, 3, 0, 1), y], ["dot_general", "transpose"]),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_stay_and_transposes_go(case: str) -> None:
    fun, left = CASES[case]
    with jax.enable_x64(True):
        jaxpr = trace_flat(fun, [jax.typeof(jnp.asarray(x)) for x in (A, B)])
        swapped = make_jaxpr(swap_dots(jaxpr.eqns, jaxpr.outvars), jaxpr.invars, jaxpr.outvars, jaxpr)
        assert [e.primitive.name for e in swapped.eqns] == left
        for eqn in swapped.eqns:
            if eqn.primitive.name == "dot_general" and case == "precision":
                assert eqn.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
        for ours, numpys in zip(evaluate(swapped, [A, B]), evaluate(jaxpr, [A, B]), strict=True):
            np.testing.assert_allclose(ours, numpys, rtol=1e-14, atol=1e-14)
