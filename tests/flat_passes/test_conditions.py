"""Conditions of one predicate become one again, and compute what the several did."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, make_jaxpr, open_jaxpr, trace_flat
from jscaler.capture.split_conditions import split_cond
from jscaler.flat_passes.conditions import merge_conditions

x, y = np.arange(6.0, dtype=np.float32), np.ones((2, 3), np.float32)


def norm(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sqrt((x**2).sum() + (y**2).sum())


def clipped(p: Any, x: jax.Array, y: jax.Array) -> Any:
    """Cut into the sums, the norm, and the leaves."""
    return lax.cond(p, lambda x, y: (x / norm(x, y), y / norm(x, y)), lambda x, y: (x, y), x, y)


def nested(p: Any, x: jax.Array, y: jax.Array) -> Any:
    return lax.cond(p, lambda x, y: clipped(x.sum() > 0, x + 1, y), lambda x, y: (x, y), x, y)


def leaves(p: Any, x: jax.Array, y: jax.Array) -> Any:
    return lax.cond(p, lambda x, y: (x + 1, y), lambda x, y: (x, y * 2), x, y)


CASES: dict[str, tuple[Callable[..., Any], int, int]] = {  # function, conditions when cut, and merged
    "leaves": (leaves, 2, 1),
    "stages": (clipped, 8, 3),
    "nested": (nested, 17, 8),
    "two predicates, of one several": (lambda p, x, y: (leaves(p, x, y), lax.cond(x[0] > 1, jnp.sin, jnp.cos, y)), 3, 2),
    "two predicates": (lambda p, x, y: (lax.cond(p, jnp.sin, jnp.cos, x), lax.cond(x[0] > 1, jnp.sin, jnp.cos, y)), 2, 2),
}


def conditions(jaxpr: Any) -> int:
    inner = (open_jaxpr(j)[0] for e in jaxpr.eqns for j in core.jaxprs_in_params(e.params))
    return sum(e.primitive.name == "cond" for e in jaxpr.eqns) + sum(map(conditions, inner))


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_cut_and_merged(name: str, flag: bool) -> None:
    fun, cut, merged = CASES[name]
    whole = trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(jnp.asarray(a)) for a in (np.bool_(flag), x, y)])
    eqns = [piece for eqn in whole.eqns for piece in split_cond(eqn, staged=True)]
    once = merge_conditions(eqns)
    after = make_jaxpr(once, whole.invars, whole.outvars, whole)
    for a, b in zip(evaluate(whole, (flag, x, y)), jax.jit(lambda *xs: evaluate(after, xs))(flag, x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert (conditions(make_jaxpr(eqns, whole.invars, whole.outvars, whole)), conditions(after)) == (cut, merged)


def test_other_items_keep_their_order() -> None:
    structs = [jax.typeof(jnp.bool_(True)), jax.typeof(jnp.asarray(x))]
    jaxpr = trace_flat(lambda p, x: [jnp.sin(x) * 2, lax.cond(p, jnp.sin, jnp.cos, x), jnp.tanh(x)], structs)
    assert merge_conditions(jaxpr.eqns) == list(jaxpr.eqns)
