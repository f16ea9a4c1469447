"""Scan, while and cond: the factors of what they carry, scan over and choose between, forward and backward."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from of_the_day import of_the_day
from parts import backward, check, check_splits, fragment, primitives_in, why_blocked

rng = np.random.default_rng(6)


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def rnn(x: jax.Array, w: jax.Array, reverse: bool = False) -> jax.Array:
    """``x`` (time, batch, features), ``w`` (features, features)."""

    def step(h: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(a + h @ w)
        return h, h

    return lax.scan(step, jnp.zeros(x.shape[1:]), x, reverse=reverse)[1]


def decay(x: jax.Array, rate: jax.Array) -> Any:
    """A loop without contraction: every channel by itself."""
    return lax.scan(lambda h, a: ((h * rate + a), h), jnp.zeros(x.shape[1:]), x)


def power(x: jax.Array, times: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < times, lambda c: (c[0] + 1, c[1] * x), (jnp.int32(0), jnp.ones_like(x)))[1]


x = real(3, 2, 4)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str]] = {
    # name: function, operands, rule, its open factors
    "recurrence": (rnn, (x, real(4, 4)), "a b c, c c -> a b c", "b"),
    "backwards in time": (functools.partial(rnn, reverse=True), (x, real(4, 4)), "a b c, c c -> a b c", "b"),
    "decay": (decay, (x, real(4)), "a b c, c -> b c, a b c", "bc"),
    "map": (lambda x, w: lax.map(lambda a: jnp.tanh(a) @ w, x), (x, real(4, 2)), "a b c, c d -> a b d", "abcd"),
    "map over rows of itself": (lambda x: lax.map(lambda a: x @ a, x), (real(3, 4),), "a b -> a a", "b"),
    "sum in a map": (lambda x: lax.map(lambda a: a.sum(), x), (x,), "a b c -> a", "abc"),
    "a sum carried": (
        lambda x: lax.scan(lambda s, a: (s + a.sum(0), None), jnp.zeros(4), x)[0], (x,), "a b c -> c", "bc",
    ),
    "a sum carried on": (
        lambda x, s: lax.scan(lambda s, a: (s + a.sum(0), None), s, x)[0], (x, real(4)), "a b c, c -> c", "c",
    ),
    "a sum scanned": (lambda x: lax.map(lambda a: 2 * a, x.sum(1)), (x,), "a b c -> a c", "abc"),
    "power": (power, (x, np.int32(3)), "a b c, · -> a b c", "abc"),
    "until small": (lambda x: lax.while_loop(lambda y: y.max() > 1, lambda y: y / 2, x), (x,), "a b c -> a b c", ""),
    "until small, by row": (jax.vmap(power), (x, np.array([0, 3, 1], np.int32)), "a b c, a -> a b c", "abc"),
    "until small, by row and column": (
        jax.vmap(jax.vmap(power), (0, None)), (x, np.array([2, 1], np.int32)), "a b c, b -> a b c", "abc",
    ),
    "summed in a while": (
        lambda x: lax.fori_loop(0, 3, lambda i, s: s + x[i].sum(0), jnp.zeros(4)), (x,), "a b c -> c", "abc",
    ),
    "cond": (
        lambda p, x, y: lax.cond(p, lambda x, y: (x * y, y), lambda x, y: (x, y * 2), x, y),
        (np.bool_(True), x, x + 1), "·, a b c, a b c -> a b c, a b c", "abc",
    ),
    "a sum in both branches": (
        lambda p, x: lax.cond(p, lambda x: x.sum(0), lambda x: jnp.zeros(x.shape[1:]), x),
        (np.bool_(True), x), "·, a b c -> b c", "abc",
    ),
    "a sum in one branch": (
        lambda p, x: lax.cond(p, lambda x: x.sum(0), lambda x: jnp.ones(x.shape[1:]), x),
        (np.bool_(False), x), "·, a b c -> b c", "bc",
    ),
    "a maximum in one branch": (
        lambda p, x: lax.cond(p, lambda x: x.max(0), lambda x: jnp.ones(x.shape[1:]), x),
        (np.bool_(True), x), "·, a b c -> b c", "abc",
    ),
    "finite or not wanted": (
        lambda p, x: lax.cond(p, lambda x: jnp.isfinite(x).all(), lambda x: False, x), (np.bool_(True), x),
        "·, a b c -> ·", "abc",
    ),
    "a maximum and a sum": (
        lambda p, x: lax.cond(p, lambda x: x.max(0), lambda x: x.sum(0), x), (np.bool_(True), x), "·, a b c -> b c", "bc",
    ),
    "three branches": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: x[..., ::-1]], x), (np.int32(5), x),
        "·, a b c -> a b c", "ab",
    ),
    "chosen by what is split": (
        lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), (x,), "a b c -> a b c", "",
    ),
    "positions inside": (
        lambda x: lax.map(lambda a: a * jnp.arange(4), x), (x,), "a b c -> a b c", "abc",
    ),
    "looked up inside": (
        lambda t, i: lax.map(lambda j: t[j], i), (real(6, 4), rng.integers(0, 6, (3, 2))), "a b, c d -> c d b", "abcd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", of_the_day(CASES))
def test_nested(name: str) -> None:
    fun, args, rule, factors = CASES[name]
    made = check(fun, *args)
    assert (str(made.rule), "".join(made.open)) == (rule, factors)
    if "while" not in primitives_in(made) and (pair := backward(fun, *args)):
        check(pair[0], *pair[1], most=1)


def test_a_weight_gradient_over_time_is_a_sum_over_the_batch() -> None:
    pair = backward(rnn, x, real(4, 4))
    assert pair is not None
    made = check(pair[0], *pair[1])
    batch = made.rule.operands[0][1][0]
    assert made.rule.factors[batch].kind == "reduction"
    assert made.rule.shares == {(batch, 1): "add"}


def test_two_factors_of_a_loop_at_once() -> None:
    made = fragment(decay, x, real(4))
    check_splits(made, (x, real(4)), [{"b": 2, "c": 2}, {"c": 4, "b": 2}])


LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "walked": (rnn, (x, real(4, 4)), "at scan it is walked step by step, and every step needs the one before"),
    "steps and rows": (lambda x: lax.map(lambda a: a @ x, x), (real(4, 4),), "it is on two dims of one tensor"),
    "carried on": (lambda x, s: lax.scan(lambda s, a: (s + x.sum(0), None), s, None, 2)[0], (real(4, 3), real(3)), "'add'"),
    "condition": (lambda x: lax.while_loop(lambda y: (y > 1).any(), lambda y: y / 2, x), (x,), "the condition of a while"),
    "windows": (
        lambda x: lax.map(lambda a: lax.reduce_window(a, 0.0, lax.add, (3,), (1,), "SAME"), x.T), (real(4, 3),),
        "windows slide along it inside a scan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_blocked_factors_say_why(name: str) -> None:
    fun, args, reason = LOOPS[name]
    made = check(fun, *args)
    assert reason in why_blocked(made, 0, 0)
