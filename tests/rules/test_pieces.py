"""Split, concatenate, slice and pad: equal blocks refine a dim, and the place in a block can be split."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parts import check_both, check_splits

from jscaler.lax_primitives.equal_blocks import pad_window, slice_window

rng = np.random.default_rng(4)


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


x = real(2, 12)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str]] = {
    # name: function, operands, rule, its open factors
    "split": (lambda x: jnp.split(x, 3, 1), (x,), "a (b c) -> a c, a c, a c", "ac"),
    "split, unequal": (lambda x: jnp.split(x, [2, 8], 1), (x,), "a (b c) -> a c, a (d c), a (e c)", "ac"),
    "split, nothing in common": (lambda x: jnp.split(x, [1, 8], 1), (x,), "a b -> a 1, a c, a d", "a"),
    "a piece": (lambda x: x[:, 4:8], (x,), "a (b c) -> a c", "ac"),
    "a longer piece": (lambda x: x[:, 4:10], (x,), "a (b c) -> a (d c)", "ac"),
    "halves": (lambda x: (x[:, :6], x[:, 6:]), (x,), "a (b c) -> a c, a c", "ac"),
    "every third": (lambda x: x[:, 1::3], (x,), "a (b c) -> a b", "ab"),
    "every third of some": (lambda x: x[:, 7::3], (x,), "a (b c d) -> a c", "ac"),
    "every second of a piece": (lambda x: x[:, 5:9:2], (x,), "a (b c d) -> a c", "ac"),
    "join": (lambda x, y: jnp.concatenate([x, y], 1), (x, x + 1), "a b, a b -> a (c b)", "ab"),
    "join, unequal": (
        lambda x, y: jnp.concatenate([x, y], 1), (real(2, 4), real(2, 6)), "a (b c), a (d c) -> a (e c)", "ac",
    ),
    "rotate half": (
        lambda x: jnp.concatenate([-x[..., 6:], x[..., :6]], -1) * x, (x,), "a (b c) -> a (b c)", "ac",
    ),
    "roll": (lambda x: jnp.roll(x, 4, 1), (x,), "a (b c) -> a (d c)", "ac"),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (4, 8))), (x,), "a (b c) -> a (d c)", "ac"),
    "pad between": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 2))), (x,), "a b -> a (b c)", "ab"),
    "pad around and between": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (8, 1, 1))), (x,), "a (b c) -> a (d c e)", "ac"),
    "cut by pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-4, 0, 0))), (x,), "a (b c) -> a (d c)", "ac"),
    "cut and pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-4, 2, 0))), (x,), "a b -> a c", "a"),
    "a sum, split": (lambda x: jnp.split(x.sum(0), 3), (x,), "a (b c) -> c, c, c", "ac"),
    "a maximum, sliced": (lambda x: x.max(0)[4:8], (x,), "a (b c) -> c", "ac"),
    "sums, joined": (lambda x: jnp.concatenate([x.sum(0), x.sum(0)]), (x,), "a b -> (c b)", "ab"),
    "patch merge": (
        lambda x: jnp.concatenate([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1),
        (real(2, 4, 4, 3),), "a (b c) (d e) f -> a b d (g f)", "abdf",
    ),
    "nothing left": (lambda x: x[:, 3:3], (x,), "a b -> a c", "a"),
    "nothing joined": (lambda x, y: jnp.concatenate([x, y], 1), (x, real(2, 0)), "a b, a (c b) -> a b", "ab"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pieces(name: str) -> None:
    fun, args, rule, factors = CASES[name]
    made = check_both(fun, *args)
    assert (str(made.rule), "".join(made.open)) == (rule, factors)


@pytest.mark.parametrize("window", [slice_window, pad_window])
def test_windows_say_where_each_element_goes(window: Any) -> None:
    for size in range(1, 13):
        for a in range(4):
            for b in range(4):
                for step in range(1, 4):
                    if window is slice_window:
                        found, wide = slice_window(size, a, size - b, step), np.arange(size)
                        narrow = wide[a : size - b : step] if size - b > a else wide[:0]
                    else:
                        found = pad_window(size, a, b, step - 1)
                        narrow = np.arange(1, size + 1)
                        wide = _padded(narrow, a, b, step)
                    if found is None:
                        assert len(narrow) == 0 or len(wide) % step
                        continue
                    assert (found.narrow, found.rows * found.step) == (len(narrow), len(wide))
                    place = [(found.first + i) * found.step + found.phase for i in range(len(narrow))]
                    np.testing.assert_array_equal(wide[place], narrow)


def _padded(values: np.ndarray, low: int, high: int, step: int) -> np.ndarray:
    wide = np.zeros(low + (len(values) - 1) * step + 1 + high, int)
    wide[low : low + (len(values) - 1) * step + 1 : step] = values
    return wide


def rope(x: jax.Array, angle: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, -1)
    turned = jnp.concatenate([-second, first], -1)
    return x * jnp.cos(angle) + turned * jnp.sin(angle)


@pytest.mark.smoke
def test_attention_with_a_flat_qkv_and_rope_splits_heads() -> None:
    def attention(x: jax.Array, qkv: jax.Array, out: jax.Array, angle: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        q, k, v = (y.reshape(batch, length, 2, 4) for y in jnp.split(x @ qkv, 3, -1))
        q, k = rope(q, angle), rope(k, angle)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        return mixed.reshape(batch, length, 8) @ out

    args = (real(2, 3, 4), real(4, 24), real(8, 4), real(3, 1, 4))
    made = check_both(attention, *args)
    three, heads, *_ = made.rule.operands[1][1]
    assert made.rule.factors[heads].kind == "reduction"
    assert made.rule.factors[heads].size == 2
    assert made.rule.factors[three].reason == "at split it is cut by jnp.split: only equal blocks of it can be split"
    check_splits(made, args, [{heads: 2, made.rule.operands[0][0][0]: 2}])


def test_the_shift_of_a_window_and_its_partition() -> None:
    def shifted(x: jax.Array) -> jax.Array:
        return jnp.roll(x, -2, 1).reshape(2, 2, 4, 3).transpose(1, 0, 2, 3)

    made = check_both(shifted, real(2, 8, 3))
    assert str(made.rule) == "a (b c) d -> e a (f c) d"
    assert sorted(made.open.values()) == [2, 2, 3]
