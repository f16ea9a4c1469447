"""Look-ups by index: gathers, scatters, dynamic slices. Looked-up dims are split by looking up one's own rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from of_the_day import of_the_day
from parts import backward, check, check_both, check_splits, fragment, primitives_in, why_blocked

from jscaler.verification.whole_against_parts import FragmentInParts

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
    "clip two coordinates": (lambda t, i: t.at[i, i].get(mode="clip"), (table, OUTSIDE)),
    "fill two coordinates": (lambda t, i, j: t.at[i, j].get(mode="fill"), (table, OUTSIDE, np.array([0, 1, 9, 2]))),
    "numbers": (lambda t, i: t.at[i].get(mode="fill", fill_value=-7), (tokens, np.array([0, 1, 5]))),
    "smallest number": (lambda t, i: jnp.take(t, i, 0, mode="fill"), (tokens.astype(np.int8), np.array([0, 5]))),
    "flags": (lambda t, i: jnp.take(t, i, 0, mode="fill"), (table > 0, OUTSIDE)),
    "bytes": (lambda t, i: t[i], (np.arange(12.0), rng.integers(0, 12, 5).astype(np.uint8))),
    "minus one": (lambda t, i: t[i], (table, np.array([-1, -6, 5]))),
    "refined rows": (lambda t, i: t.reshape(12, 2)[i], (rng.normal(size=(2, 6, 2)), rng.integers(0, 12, 5))),
    "refined columns": (lambda t, i: jnp.take_along_axis(t.reshape(3, 24), i, 1), (cube, rng.integers(0, 24, (3, 5)))),
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

ONCE = np.array([4, 1, 2])
SLICES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "one": (lambda t, i: lax.dynamic_index_in_dim(t, i, 0, False), (table, np.int32(3))),
    "two": (lambda t, i: lax.dynamic_slice(t, (i, 0), (2, 4)), (table, np.int64(9))),
    "both dims": (lambda t, i, j: lax.dynamic_slice(t, (i, j), (3, 2)), (table, np.int8(-2), np.int8(1))),
    "flags": (lambda t, i: lax.dynamic_slice(t, (i, 0), (2, 4)), (table > 0, np.int64(1))),
    "refined": (lambda t, i: lax.dynamic_slice(t.reshape(24), (i,), (5,)), (np.arange(24).reshape(6, 4), np.int32(7))),
    "of a sum": (lambda t, i: lax.dynamic_slice(t.sum(0), (i, 0), (2, 4)), (cube, np.int64(3))),
    "update": (lambda t, i, u: lax.dynamic_update_slice(t, u, (i, 0)), (table, np.int64(3), table[:2] + 1)),
    "update both dims": (lambda t, i, u: lax.dynamic_update_slice(t, u, (i, i)), (table, np.int32(9), table[:3, :2])),
    "update refined": (
        lambda t, i, u: lax.dynamic_update_slice(t.reshape(24), u, (i,)), (table, np.int32(5), np.arange(7.0)),
    ),
    "update the whole": (lambda t, i, u: lax.dynamic_update_slice(t, u, (i, i)), (table, np.int32(0), table + 1)),
}  # fmt: skip

SCATTERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "onto zeros": (lambda i, u: jnp.zeros((6, 4)).at[i].add(u), (tokens, rng.normal(size=(2, 3, 4)))),
    "onto a tensor": (lambda t, i, u: t.at[i].add(u), (table, tokens, rng.normal(size=(2, 3, 4)))),
    "columns": (lambda i, u: jnp.zeros((6, 4)).at[:, i].add(u), (row, rng.normal(size=(6, 3)))),
    "a number": (lambda t, i: t.at[i].add(1.0), (table, row)),
    "minus": (lambda t, i, u: t.at[i].subtract(u), (table, tokens, rng.normal(size=(2, 3, 4)))),
    "times": (lambda t, i, u: t.at[i].multiply(u, unique_indices=True), (table, ONCE, rng.normal(size=(3, 4)))),
    "times numbers": (lambda t, i, u: t.at[i].multiply(u), (tokens[0], np.array([1, 1, 0]), np.array([2, 3, 4]))),
    "least": (lambda t, i, u: t.at[i].min(u), (table, tokens, rng.normal(size=(2, 3, 4)))),
    "most": (lambda t, i, u: t.at[i].max(u, mode="clip"), (table, OUTSIDE, rng.normal(size=(4, 4)))),
    "set": (lambda t, i, u: t.at[i].set(u), (table, np.array([4, 1, 9]), rng.normal(size=(3, 4)))),
    "set once": (
        lambda t, i, u: t.sum(0).at[i].set(u.sum(0), unique_indices=True),
        (cube, ONCE, rng.normal(size=(2, 3, 4))),
    ),
    "set a column": (lambda t, i: t.at[:, i].set(0.0), (table, np.int32(2))),
    "flags": (lambda t, i: t.at[i].set(True), (table > 0, row)),
    "two coordinates": (lambda i, j, u: jnp.zeros((6, 4)).at[i, j].add(u), (row, row, rng.normal(size=3))),
    "clipped": (lambda i, u: jnp.zeros((6, 4)).at[i].add(u, mode="clip"), (OUTSIDE, rng.normal(size=(4, 4)))),
    "promised": (
        lambda i, u: jnp.zeros((6, 4)).at[i].add(u, mode="promise_in_bounds"),
        (tokens, rng.normal(size=(2, 3, 4))),
    ),
    "segments": (lambda u, i: jax.ops.segment_sum(u, i, 6), (rng.normal(size=(4, 2)), np.array([0, 2, 2, 5]))),
    "segments, beyond": (lambda u, i: jax.ops.segment_sum(u, i, 6), (rng.normal(size=(4, 2)), np.array([0, -1, 7, 5]))),
    "largest of segments": (lambda u, i: jax.ops.segment_max(u, i, 6), (rng.normal(size=(4, 2)), np.array([0, 2, 2, 5]))),
    "outside": (lambda i, u: jnp.zeros((6, 4)).at[i].add(u, mode="drop"), (OUTSIDE, rng.normal(size=(4, 4)))),
    "a partial sum": (lambda i, u: jnp.zeros((6, 4)).at[i].add(u.sum(0)), (row, rng.normal(size=(2, 3, 4)))),
    "a batch": (jax.vmap(lambda t, i, u: t.at[i].add(u)), (cube, rng.integers(0, 6, (3, 2)), rng.normal(size=(3, 2, 4)))),
    "onto a partial sum": (lambda t, i, u: t.sum(0).at[i].add(u), (cube, row, rng.normal(size=(3, 4)))),
}


@pytest.mark.parametrize("name", of_the_day(GATHERS))
def test_gather(name: str) -> None:
    fun, args = GATHERS[name]
    assert "gather" in primitives_in(check_both(fun, *args))


@pytest.mark.parametrize("name", of_the_day(SLICES, 2))
def test_dynamic_slices(name: str) -> None:
    fun, args = SLICES[name]
    made = check_both(fun, *args)
    assert any("dynamic" in p for p in primitives_in(made))
    assert all(f.size in made.open.values() for d in made.rule.operands[0] for f in [made.rule.factors[n] for n in d])


@pytest.mark.parametrize("name", of_the_day(SCATTERS))
def test_scatter_add(name: str) -> None:
    fun, args = SCATTERS[name]
    made = check_both(fun, *args)
    assert any("scatter" in p for p in primitives_in(made))
    assert len(made.rule.operands[0]) != 2 or made.rule.results[0][0][0] in made.open, "rows are split"


def kinds(made: FragmentInParts) -> dict[str, str]:
    return {f.name: f.kind for f in made.rule.factors.values()}


@pytest.mark.smoke
def test_an_embedding_splits_tokens_and_features_and_the_vocabulary_into_a_sum() -> None:
    made = check(lambda t, i: t[i], table, tokens)
    assert str(made.rule) == "a b, c d -> c d b"
    assert kinds(made) == {"a": "reduction", "b": "parallel", "c": "parallel", "d": "parallel"}
    check_splits(made, (table, tokens), [{"a": 2, "c": 2}, {"d": 3, "a": 3, "b": 2}])


def test_its_gradient_is_split_as_the_vocabulary_is() -> None:
    def loss(t: jax.Array, i: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vjp(lambda t: t[i], t)[1](dy)[0]

    made = check(loss, table, tokens, rng.normal(size=(2, 3, 4)))
    ((rows,), (columns,)), cotangent = made.rule.results[0], made.rule.operands[2]
    assert (made.rule.factors[rows].kind, (columns,)) == ("parallel", cotangent[2])
    assert [made.rule.factors[f].kind for (f,) in cotangent] == ["reduction", "reduction", "parallel"]
    check_splits(made, (table, tokens, rng.normal(size=(2, 3, 4))), [{rows: 2, cotangent[0][0]: 2}])


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_its_gradient_is_a_sum_over_tokens(dtype: Any) -> None:
    pair = backward(lambda t, i: t[i], table.astype(dtype), tokens)
    assert pair is not None
    made = fragment(*(pair[0], *pair[1]))
    assert "scatter-add" in primitives_in(made)
    indices = made.rule.operands[1]
    assert [made.rule.factors[f].kind for (f,) in indices] == ["reduction", "reduction"]
    check(pair[0], *pair[1])


def test_what_is_added_to_a_tensor_is_added_once() -> None:
    made = fragment(*SCATTERS["onto a tensor"][:1], *SCATTERS["onto a tensor"][1])
    assert why_blocked(made, 1, 0) == "'scatter-add' adds it to a tensor that is not zero"


def test_cross_entropy_picks_the_label_of_a_split_vocabulary() -> None:
    def picked(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(logits, labels[..., None], -1)[..., 0].mean()

    made = check_both(picked, rng.normal(size=(2, 3, 6)), tokens)
    assert kinds(made) == dict.fromkeys("abc", "reduction")


def test_rows_looked_up_by_rows_are_not_split() -> None:
    made = check(lambda t: t[t % 6], np.arange(6))
    assert why_blocked(made, 0, 0) == "'gather' reduces it and keeps it"
    made = check(lambda i, u: jnp.zeros(6).at[i].add(u + jnp.arange(6.0)), np.arange(6)[::-1].copy(), rng.normal(size=6))
    assert made.open  # the result's rows by themselves, or what is added


def test_random_keys_are_looked_up_whole() -> None:
    keys = jax.random.split(jax.random.key(1), 6)
    made = check(lambda k, i: k[i], keys, row)
    assert why_blocked(made, 0, 0) == "at gather random keys are looked up, and no key is zero"


def test_windows_longer_than_a_row_say_so() -> None:
    made = fragment(*GATHERS["windows"][:1], *GATHERS["windows"][1])
    assert why_blocked(made, 0, 0) == "at gather windows of it, longer than a row, are looked up"


def test_what_is_set_is_not_split_by_index() -> None:
    made = fragment(SCATTERS["set"][0], *SCATTERS["set"][1])
    assert why_blocked(made, 1, 0) == "at scatter two parts may write one element"
