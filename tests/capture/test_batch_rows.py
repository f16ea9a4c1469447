"""Where the batch's rows are is told by what changes: an element that holds row r changes with row r alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.capture.batch_rows import BatchRows, Digits
from jscaler.capture.jaxprs import inline, open_jaxpr

ROWS, DIM = 8, 6


@jscaler.op("b d, d -> b d")
def scaled(x: jax.Array, by: jax.Array) -> jax.Array:
    return x * by


def passed_through(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, i: (jnp.tanh(c), c * i), jnp.concatenate([x, y]), jnp.arange(3.0))[1]


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[int, Digits]]] = {
    "elementwise": (lambda x, y: x * y, {0: Digits(1, 8)}),
    "views": (lambda x, y: jnp.concatenate([x, y]), {0: Digits(2, 8)}),
    "views of views": (lambda x, y: jnp.concatenate([jnp.concatenate([x, y]), x]), {0: Digits(3, 8)}),
    "a view": (lambda x, y: jnp.concatenate([x, y])[ROWS:], {0: Digits(1, 8)}),
    "split": (lambda x, y: jnp.split(jnp.concatenate([x, y]), 2)[1], {0: Digits(1, 8)}),
    "every other": (lambda x, y: jnp.stack([x, y], 1).reshape(2 * ROWS, DIM), {0: Digits(1, 8)}),
    "every second": (lambda x, y: jnp.stack([x, y], 1).reshape(2 * ROWS, DIM)[::2], {0: Digits(1, 8)}),
    "repeated": (lambda x, y: jnp.repeat(x, 2, 0), {0: Digits(1, 8)}),
    "tiled": (lambda x, y: jnp.tile(x, (3, 1)), {0: Digits(3, 8)}),
    "apart": (lambda x, y: jnp.concatenate([x, y]).reshape(2, ROWS, DIM), {1: Digits(1, 8)}),
    "columns first": (lambda x, y: x.T.reshape(DIM * ROWS), {0: Digits(6, 8)}),
    "half the columns": (lambda x, y: x.T.reshape(2, 3 * ROWS), {1: Digits(3, 8)}),
    "swapped views": (lambda x, y: jnp.roll(jnp.concatenate([x, y]), ROWS, 0), {0: Digits(2, 8)}),
    "a user's op": (lambda x, y: scaled(jnp.concatenate([x, y]), jnp.arange(6.0)), {0: Digits(2, 8)}),
    "carried": (passed_through, {1: Digits(2, 8)}),
    "each with each": (lambda x, y: x @ y.T, {0: Digits(1, 8), 1: Digits(1, 8)}),
    "joined": (lambda x, y: jnp.concatenate([x, y]).sum(0), {}),
}


def found_rows(fun: Callable[..., Any], x: jax.Array, y: jax.Array) -> tuple[dict[int, Digits], list[str]]:
    program = inline(open_jaxpr(jax.make_jaxpr(fun)(x, y))[0])
    rows = BatchRows({v: {0: Digits(1, ROWS)} for v in program.invars})
    needs = [rows.add(eqn) for eqn in program.eqns]
    return dict(rows.rows(program.outvars[0])), needs


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_where_they_change(name: str) -> None:
    fun, expected = PROGRAMS[name]
    x, y = (jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, DIM))) for seed in range(2))
    found, _ = found_rows(fun, x, y)
    assert found == expected
    if len(found) != 1:  # rows of both operands change what is each with each
        return
    (dim, digits), whole = *found.items(), fun(x, y)
    for row in range(ROWS):
        changed = np.asarray(fun(x.at[row].add(1.0), y.at[row].add(1.0)) != whole)
        seen = np.moveaxis(changed, dim, 0).reshape(digits.outer, digits.count, -1)
        assert seen[:, row].any()
        assert not np.delete(seen, row, axis=1).any()


def test_what_an_equation_needs_of_the_batch() -> None:
    x = jnp.ones((ROWS, DIM))
    needs = {name: found_rows(PROGRAMS[name][0], x, x)[1] for name in PROGRAMS}
    assert set(needs["views"]) == set(needs["elementwise"]) == {"kept"}
    assert needs["joined"][-1] == "joined"
    assert needs["each with each"][-1] == "mixed"
    assert found_rows(lambda x, y: jnp.sort(x, 0), x, x)[1][-1] == "mixed"
