"""Gather and scatter-add: index dims, whole windows and batch dims split, looked-up dims do not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parts import backward, check, check_both, fragment

from jscaler.verification.parts import Fragment

rng = np.random.default_rng(1)
table = rng.normal(size=(6, 4))
cube = rng.normal(size=(3, 6, 4))
tokens = rng.integers(0, 6, (2, 3))
row = rng.integers(0, 4, (3,))
OUTSIDE = np.array([0, 9, 3, -8])  # beyond both ends


def one_hot_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


GATHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rows": (lambda t, i: t[i], (table, tokens)),
    "columns": (lambda t, i: t[:, i], (table, row)),
    "middle": (lambda t, i: t[:, i], (cube, tokens)),
    "two coordinates": (lambda t, i, j: t[i, j], (table, row, row)),
    "apart": (lambda t, i, j: t[i, :, j], (cube, rng.integers(0, 3, 4), rng.integers(0, 4, 4))),
    "along an axis": (lambda t, i: jnp.take_along_axis(t, i, 1), (table, rng.integers(0, 4, (6, 3)))),
    "along axis 0": (lambda t, i: jnp.take_along_axis(t, i, 0), (table, rng.integers(0, 6, (2, 4)))),
    "a batch of rows": (jax.vmap(lambda t, i: t[i]), (cube, rng.integers(0, 6, (3, 2)))),
    "a batch, minor": (jax.vmap(lambda t, i: t[i], (2, 1), 1), (cube.transpose(1, 2, 0), rng.integers(0, 6, (2, 3)))),
    "fill": (lambda t, i: jnp.take(t, i, 0, mode="fill"), (table, OUTSIDE)),
    "fill with zero": (lambda t, i: t.at[i].get(mode="fill", fill_value=0), (table, OUTSIDE)),
    "clip": (lambda t, i: jnp.take(t, i, 0, mode="clip"), (table, OUTSIDE)),
    "wrap": (lambda t, i: jnp.take(t, i, 0, mode="wrap"), (table, OUTSIDE)),
    "windows": (
        lambda t, i: jax.vmap(lambda i: lax.dynamic_slice(t, (i, 0), (2, 4)))(i), (table, rng.integers(0, 4, 3)),
    ),
    "of a partial sum": (lambda t, i: t.sum(0)[i], (cube, tokens)),
    "of a partial sum, outside": (lambda t, i: t.sum(0).at[i].get(mode="fill", fill_value=0), (cube, OUTSIDE)),
    "of a partial sum, filled with one": (lambda t, i: t.sum(0).at[i].get(mode="fill", fill_value=1), (cube, OUTSIDE)),
    "of a partial maximum": (lambda t, i: t.max(0)[i], (cube, tokens)),
    "one row of one": (lambda t, i: t[i], (table[:1], np.zeros(3, np.int64))),
    "cross entropy": (one_hot_loss, (rng.normal(size=(2, 3, 6)), tokens)),
}  # fmt: skip

SCATTERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "onto zeros": (lambda i, u: jnp.zeros((6, 4)).at[i].add(u), (tokens, rng.normal(size=(2, 3, 4)))),
    "onto a tensor": (lambda t, i, u: t.at[i].add(u), (table, tokens, rng.normal(size=(2, 3, 4)))),
    "columns": (lambda i, u: jnp.zeros((6, 4)).at[:, i].add(u), (row, rng.normal(size=(6, 3)))),
    "a number": (lambda t, i: t.at[i].add(1.0), (table, row)),
    "outside": (lambda i, u: jnp.zeros((6, 4)).at[i].add(u, mode="drop"), (OUTSIDE, rng.normal(size=(4, 4)))),
    "a partial sum": (lambda i, u: jnp.zeros((6, 4)).at[i].add(u.sum(0)), (row, rng.normal(size=(2, 3, 4)))),
    "a batch": (jax.vmap(lambda t, i, u: t.at[i].add(u)), (cube, rng.integers(0, 6, (3, 2)), rng.normal(size=(3, 2, 4)))),
    "onto a partial sum": (lambda t, i, u: t.sum(0).at[i].add(u), (cube, row, rng.normal(size=(3, 4)))),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gather(name: str) -> None:
    fun, args = GATHERS[name]
    assert "gather" in check_both(fun, *args).primitives


@pytest.mark.parametrize("name", SCATTERS)
def test_scatter_add(name: str) -> None:
    fun, args = SCATTERS[name]
    assert "scatter-add" in check_both(fun, *args).primitives


def kinds(made: Fragment) -> dict[str, str]:
    return {f.name: f.kind for f in made.rule.factors.values()}


@pytest.mark.smoke
def test_an_embedding_splits_tokens_and_features_and_not_the_vocabulary() -> None:
    made = check(lambda t, i: t[i], table, tokens)
    assert str(made.rule) == "a b, c d -> c d b"
    assert kinds(made) == {"a": "blocked", "b": "parallel", "c": "parallel", "d": "parallel"}
    assert made.blocked(0, 0) == "at gather it is looked up by index"


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_its_gradient_is_a_sum_over_tokens(dtype: Any) -> None:
    pair = backward(lambda t, i: t[i], table.astype(dtype), tokens)
    assert pair is not None
    made = fragment(*(pair[0], *pair[1]))
    assert "scatter-add" in made.primitives
    indices = made.rule.operands[1]
    assert [made.rule.factors[f].kind for (f,) in indices] == ["reduction", "reduction"]
    check(pair[0], *pair[1])


def test_what_is_added_to_a_tensor_is_added_once() -> None:
    made = fragment(*SCATTERS["onto a tensor"][:1], *SCATTERS["onto a tensor"][1])
    assert made.blocked(1, 0) == "'scatter-add' adds it to a tensor that is not zero"
