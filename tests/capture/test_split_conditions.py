"""Conditions are cut into one for each group of results that share work."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jscaler.capture.jaxprs import evaluate, make_jaxpr, trace_flat
from jscaler.capture.split_conditions import split_cond

x, y = np.arange(6.0, dtype=np.float32), np.ones((2, 3), np.float32)


def pieces(fun: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """How many conditions there are before and after; what they compute is compared, for both branches."""
    jaxpr = trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(jnp.asarray(a)) for a in args])
    eqns = [piece for eqn in jaxpr.eqns for piece in split_cond(eqn)]
    after = make_jaxpr(eqns, jaxpr.invars, jaxpr.outvars, jaxpr)
    for a, b in zip(evaluate(jaxpr, args), evaluate(after, args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return tuple(sum(e.primitive.name == "cond" for e in j.eqns) for j in (jaxpr, after))


def normalized(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = y.sum()
    return x / total, y / total


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    ("name", "fun", "count"),
    [
        ("apart", lambda p, x, y: lax.cond(p, lambda x, y: (x + 1, y), lambda x, y: (x, y * 2), x, y), 2),
        ("shared", lambda p, x, y: lax.cond(p, normalized, lambda x, y: (x, y), x, y), 1),
        ("a shared number", lambda p, x, y: lax.cond(p, lambda s: (x * (s + 1), y * (s + 1)), lambda s: (x, y), x[1]), 2),
        ("swapped", lambda p, x, y: lax.cond(p, lambda x, z: (x, z), lambda x, z: (z, x), x, x + 1), 2),
        ("a constant", lambda p, x, y: lax.cond(p, lambda x: (x, 1.0), lambda x: (-x, 2.0), x), 2),
        ("called", lambda p, x, y: lax.cond(p, jax.jit(lambda x, y: (x + 1, y + 2)), lambda x, y: (x, y), x, y), 2),
        ("one", lambda p, x, y: lax.cond(p, jnp.sin, jnp.cos, x), 1),
    ],
)  # fmt: skip
def test_results_that_share_nothing_are_apart(name: str, fun: Callable[..., Any], count: int, flag: bool) -> None:
    assert pieces(fun, np.bool_(flag), x, y) == (1, count)


def staged(fun: Callable[..., Any], *args: Any) -> list[list[tuple[int, ...]]]:
    """The shapes of each condition's results, where numbers are handed out of branches; what they compute is compared."""
    jaxpr = trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(jnp.asarray(a)) for a in args])
    eqns = [piece for eqn in jaxpr.eqns for piece in split_cond(eqn, staged=True)]
    after = make_jaxpr(eqns, jaxpr.invars, jaxpr.outvars, jaxpr)
    for a, b in zip(evaluate(jaxpr, args), evaluate(after, args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return [[v.aval.shape for v in e.outvars] for e in eqns if e.primitive.name == "cond"]  # type: ignore[union-attr]


def clipped(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    norm = jnp.sqrt((x**2).sum() + (y**2).sum())
    return x / norm, y / norm


def trusted(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is handed out at the second stage is made of what was at the first."""
    a, b = clipped(x, y)
    return a * jnp.linalg.norm(y), b * jnp.linalg.norm(a)


NUMBER, X, Y = (), (6,), (2, 3)
STAGED: dict[str, tuple[Callable[..., Any], list[list[tuple[int, ...]]]]] = {
    "shared by a sum": (normalized, [[NUMBER], [X], [Y]]),
    "clipped": (clipped, [[NUMBER], [NUMBER], [NUMBER], [X], [Y]]),
    "in two stages": (trusted, [[NUMBER]] * 3 + [[NUMBER]] * 4 + [[X], [Y]]),
    "one result": (lambda x, y: (x / x.sum(), y), [[NUMBER], [X]]),
    "a contraction": (lambda x, y: (x, (y @ y.T) @ y), [[(2, 2)], [Y]]),
    "keys": (
        lambda x, y: (x + jax.random.normal(jax.random.key(x[0].astype(int)), x.shape), y), [[NUMBER], [X]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", STAGED)
def test_numbers_are_handed_out_where_no_gradient_flows(name: str, flag: bool) -> None:
    fun, shapes = STAGED[name]
    found = staged(lambda p, x, y: lax.cond(p, fun, lambda x, y: (x, y), x, y), np.bool_(flag), x, y)
    assert sorted(found) == sorted(shapes)


def test_both_branches_may_hand_out() -> None:
    found = staged(lambda i, x, y: lax.switch(i, [clipped, normalized, trusted], x, y), np.int32(2), x, y)
    assert [X] in found
    assert [Y] in found


OPTIMIZERS = {
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_leaves_of_optimizer_state_are_apart(name: str) -> None:
    params = {"w": x, "b": y}
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(params)
    leaves, tree = jax.tree.flatten((params, state))

    def step(*leaves: Any) -> Any:
        params, state = jax.tree.unflatten(tree, leaves)
        return optimizer.update(jax.tree.map(jnp.sin, params), state, params)

    before, after = pieces(step, *leaves)
    assert before >= 1
    assert after >= before + 2, "each parameter with its moments, and the counts"
