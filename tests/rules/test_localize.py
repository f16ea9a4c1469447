"""Localize: shapes shrink, iota and random bits know where the part lies, literals stay global."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day
from parts import check, check_both, check_splits, fragment

from jscaler.verification.whole_against_parts import FragmentInParts

rng = np.random.default_rng(2)
x = rng.normal(size=(4, 6))
key = jax.random.key(5)


def local(made: FragmentInParts, **parts: int) -> Any:
    return made.local(parts)


DRAWS: dict[str, Callable[..., Any]] = {
    **{f"uint{b}": lambda k, b=b: jax.random.bits(k, (4, 6), f"uint{b}") for b in (8, 16, 32, 64)},
    "flat": lambda k: jax.random.bits(k, (24,), "uint8"),
    "refined": lambda k: jax.random.bits(k, (24,), "uint64").reshape(2, 2, 6),
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (4, 6)),
    "uniform": lambda k: jax.random.uniform(k, (4, 6)),
    "uniform, float32": lambda k: jax.random.uniform(k, (4, 6), jnp.float32, 2, 5),
    "uniform, bfloat16": lambda k: jax.random.uniform(k, (4, 6), jnp.bfloat16),
    "normal": lambda k: jax.random.normal(k, (4, 6)),
    "normal, float32": lambda k: jax.random.normal(k, (4, 6), jnp.float32),
    "normal, bfloat16": lambda k: jax.random.normal(k, (4, 6), jnp.bfloat16),
    "truncated normal": lambda k: jax.random.truncated_normal(k, -2.0, 2.0, (4, 6)),
    "gumbel": lambda k: jax.random.gumbel(k, (4, 6)),
    "integers": lambda k: jax.random.randint(jax.random.fold_in(k, 3), (4, 6), 0, 100),
    "one each": lambda k: jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(k, i), (6,), "uint32"))(jnp.arange(4)),
}


@pytest.mark.parametrize("name", of_the_day(DRAWS))
def test_parts_draw_exactly_the_bits_of_the_whole(name: str) -> None:
    check(DRAWS[name], key, exact=True)


def test_draws_can_be_split_in_every_dim() -> None:
    made = fragment(DRAWS["normal"], key)
    assert made.open == {"a": 4, "b": 6}


def test_splitting_a_key_needs_no_warning() -> None:
    check(lambda k: jax.random.bits(jax.random.split(k)[1], (4, 6)), key, exact=True)


@pytest.mark.smoke
def test_dropout_drops_the_same_elements_forward_and_backward() -> None:
    def dropout(x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)

    made = check_both(dropout, x, key)
    assert made.open == {"a": 4, "b": 6}
    check_splits(made, (x, key), [{"a": 2, "b": 3}, {"b": 2, "a": 4}], exact=True)


@pytest.mark.parametrize("bits", of_the_day([8, 16, 32, 64], 4))
def test_bits_split_on_several_dims_and_batches_of_keys(bits: int) -> None:
    def draw(keys: jax.Array) -> jax.Array:
        return jax.vmap(lambda k: jax.random.bits(k, (2, 4), f"uint{bits}"))(keys)

    keys = jax.random.split(key, 6)
    made = check(draw, keys, exact=True)
    assert made.open == {"a": 6, "b": 2, "c": 4}
    check_splits(made, (keys,), [{"a": 2, "b": 2}, {"c": 2, "a": 3}, {"b": 2, "c": 4, "a": 6}], exact=True)
    refined = fragment(lambda k: jax.random.bits(k, (24,), f"uint{bits}").reshape(2, 3, 4), key)
    check_splits(refined, (key,), [{"a": 2, "c": 2}, {"b": 3, "c": 4}], exact=True)


def test_one_key_stays_a_scalar() -> None:
    """As an array it would be carried through every round of XLA:CPU's loop."""
    jaxpr = local(fragment(DRAWS["uint32"], key), a=2)
    (threefry,) = (e for e in jaxpr.eqns if e.primitive.name == "threefry2x32")
    assert [v.aval.shape for v in threefry.invars] == [(), (), (2, 6), (2, 6)]


def test_bits_of_other_generators_are_drawn_whole_and_cut() -> None:
    check(DRAWS["uint32"], jax.random.key(5, impl="rbg"), exact=True)


def test_shapes_shrink() -> None:
    made = fragment(lambda x: jnp.broadcast_to(x[:, None], (4, 3, 6)).reshape(12, 6), x)
    assert str(made.rule) == "a b -> (a c) b"
    part = local(made, a=2, b=3)
    assert [v.aval.shape for v in part.invars] == [(2, 2), (), ()]
    assert [v.aval.shape for v in part.outvars] == [(6, 2)]


def test_the_part_index_comes_last_one_for_each_split_factor() -> None:
    made = fragment(lambda x: x * jnp.arange(6), x)
    part = local(made, b=2, a=4)
    assert [v.aval.dtype for v in part.invars] == [x.dtype, np.int32, np.int32]
    (result,) = jax.core.eval_jaxpr(part, [], np.ones((1, 3)), np.int32(1), np.int32(0))
    np.testing.assert_array_equal(result, [[3, 4, 5]])


def test_a_mean_divides_by_the_whole_number() -> None:
    made = fragment(lambda x: x.mean(0), x)
    assert made.rule.shares == {("a", 0): "add"}
    (share,) = jax.core.eval_jaxpr(local(made, a=2), [], x[:2], np.int32(0))
    np.testing.assert_allclose(share, x[:2].sum(0) / 4)


POSITIONS: dict[str, Callable[..., Any]] = {
    "causal": lambda x: jnp.where(jnp.tril(jnp.ones((6, 6), bool))[:4], x, -1e9),
    "refined": lambda x: (x.reshape(4, 3, 2) * jnp.arange(24).reshape(4, 3, 2)).reshape(12, 2),
    "merged": lambda x: x.reshape(24) + jnp.arange(24),
    "one hot": lambda x: x @ jax.nn.one_hot(jnp.arange(6) % 4, 4),
    "minor": lambda x: x.reshape(2, 2, 6).transpose(1, 0, 2).reshape(4, 6) * jnp.arange(4)[:, None],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_iota_counts_from_where_the_part_lies(name: str) -> None:
    check_both(POSITIONS[name], x)


def test_two_factors_at_once() -> None:
    made = fragment(lambda x, w: (jnp.tanh(x) @ w).reshape(4, 2, 2) * jnp.arange(2), x, rng.normal(size=(6, 4)))
    assert str(made.rule) == "a b, b (c d) -> a c d"
    args = (x, rng.normal(size=(6, 4)))
    check_splits(made, args, [{"a": 2, "d": 2}, {"c": 2, "d": 2}, {"d": 2, "c": 2, "a": 4}])
