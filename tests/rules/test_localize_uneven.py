"""Parts of unequal sizes: all run at the largest, and what a smaller part has beyond its own reaches no result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from of_the_day import of_the_day
from parts import backward, check_splits, check_uneven, fragment, uneven

from jscaler.verification.whole_against_parts import blocks

rng = np.random.default_rng(4)
x = rng.normal(size=(4, 6))
y = rng.normal(size=(4, 6))
w = rng.normal(size=(6, 5))
key = jax.random.key(5)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise": (lambda x, y: jnp.tanh(x) * y, (x, y)),
    "dot": (lambda x, w: x @ w, (x, w)),
    "batched dot": (lambda x, w: jnp.einsum("abc,acd->abd", x, w), (x.reshape(3, 2, 4), rng.normal(size=(3, 4, 5)))),
    "sum and max": (lambda x: (x.sum(0), x.max(0), x.min(1)), (x,)),
    "any and all": (lambda b: (b.any(0), b.all(1)), (x > 0,)),
    "extremes far from zero": (lambda x: (x.max(0), (-x).min(0), x.max(1), (-x).min(1)), (-1 - x**2,)),
    "all of all": (lambda b: (b.all(0), b.all(1)), (np.ones((4, 6), bool),)),
    "largest of integers": (lambda i: (i.max(0), i.min(0), i.sum(1)), (np.arange(-12, 12, dtype=np.int32).reshape(4, 6),)),
    "mean of logs and quotients": (lambda x, y: (jnp.log(jnp.abs(x)) / y).mean(0), (x, y)),
    "norm": (lambda x: jnp.sqrt((x**2).sum(0)), (x,)),
    "positions": (lambda x: (x * jnp.arange(6)).sum(1), (x,)),
    "causal": (lambda x: jnp.where(jnp.tril(jnp.ones((6, 6), bool))[:4], x, -1e9), (x,)),
    "refined": (lambda x: (x.reshape(4, 3, 2) * jnp.arange(24).reshape(4, 3, 2)).reshape(12, 2), (x,)),
    "merged": (lambda x, y: (x.reshape(24) + jnp.arange(24)) @ y.reshape(24), (x, y)),
    "heads": (lambda x, w: (x @ w).reshape(4, 5, 2).transpose(1, 0, 2).sum(0), (x, rng.normal(size=(6, 10)))),
    "softmax": (lambda x: jax.nn.softmax(x), (x,)),
    "look-up": (lambda table, ids: jnp.take(table, ids, axis=0), (rng.normal(size=(7, 4)), np.array([0, 6, 3, 3, -1, 9]))),
    "writing": (lambda x, u: x.at[jnp.array([1, 3])].set(u).at[2].add(1.0), (x, rng.normal(size=(2, 6)))),
    "window": (lambda x, i: lax.dynamic_slice_in_dim(x, i, 3, 1), (x, np.int32(2))),
    "blocks": (lambda x: jnp.pad(jnp.split(jnp.concatenate([x, 2 * x], 1), 3, 1)[1], ((0, 0), (4, 4))), (x,)),
}  # fmt: skip


@pytest.mark.parametrize("name", of_the_day(PROGRAMS, always=["extremes far from zero"]))
def test_whole_against_unequal_parts_forward_and_backward(name: str) -> None:
    fun, args = PROGRAMS[name]
    check_uneven(fun, *args)


@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_unequal_parts_draw_exactly_the_bits_of_the_whole(dtype: str) -> None:
    check_uneven(lambda k: jax.random.bits(k, (4, 6), dtype), key, exact=True)


def test_bits_of_other_generators() -> None:
    check_uneven(lambda k: jax.random.bits(k, (4, 6), "uint32"), jax.random.key(5, impl="rbg"), exact=True)


def test_an_unequal_and_an_equal_split_at_once() -> None:
    made = fragment(lambda x, w: (jnp.tanh(x) @ w).reshape(4, 2, 2) * jnp.arange(2), x, rng.normal(size=(6, 4)))
    splits = [{"a": (3, 1), "b": 2}, {"b": (1, 5), "a": (1, 1, 2)}, {"c": 2, "b": (4, 2), "d": 2}]
    check_splits(made, (x, rng.normal(size=(6, 4))), splits)


def test_groups_of_a_convolution() -> None:
    """XLA:CPU joins groups of one feature to a convolution with zeros between them: not a number would reach all."""

    def depthwise(x: Any, kernel: Any) -> Any:
        dims = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=dims, feature_group_count=6)

    args = rng.normal(size=(2, 4, 6)), rng.normal(size=(3, 1, 6))
    pair = backward(depthwise, *args)
    assert pair is not None
    for fun, given in ((depthwise, args), pair):
        made = fragment(fun, *given)
        samples, (rows,), (group,) = made.rule.operands[0]
        check_splits(
            made, given, [{group: how} for how in uneven(6)] + [{rows: 2, group: (5, 1)}, {group: 3, samples[0]: 2}]
        )


@pytest.mark.smoke
def test_what_is_beyond_a_part_reaches_no_sum() -> None:
    made = fragment(lambda x, w: x @ w, x, w)
    assert str(made.rule) == "a b, b c -> a c"
    part = made.local({"b": (5, 1)})
    assert [v.aval.shape for v in part.invars] == [(4, 5), (5, 5), ()]
    mine, theirs = np.full((4, 5), np.nan), np.full((5, 5), np.inf)
    mine[:, :1], theirs[:1] = x[:, 5:], w[5:]
    (share,) = jax.core.eval_jaxpr(part, [], mine, theirs, np.int32(1))
    np.testing.assert_allclose(share, x[:, 5:] @ w[5:])


def test_equal_parts_are_not_masked() -> None:
    made = fragment(lambda x, w: x @ w, x, w)
    assert [e.primitive.name for e in made.local({"b": 2}).eqns] == ["dot_general"]
    assert "select_n" in [e.primitive.name for e in made.local({"b": (5, 1)}).eqns]


def test_ways_to_cut_are_unequal() -> None:
    assert uneven(6) == [(5, 1), (3, 1, 2)]
    assert uneven(2) == []
    assert blocks(6, 3) == (2, 2, 2)


def test_the_padding_of_a_smaller_part_takes_back_the_promise_of_unique_indices() -> None:
    """It adds nothing, but to row 0: where additions race, one of another part's rows would be lost."""

    def fun(i: jax.Array, u: jax.Array) -> jax.Array:
        return jnp.zeros((6, 4)).at[i].add(u, unique_indices=True, indices_are_sorted=True)

    args = (np.array([0, 2, 5]), np.ones((3, 4)))
    made = fragment(fun, *args)
    (index,) = made.rule.operands[0][0]
    for split, promised in (({index: 3}, True), ({index: (2, 1)}, False)):
        (add,) = [e for e in made.local(split).eqns if e.primitive.name == "scatter-add"]
        assert add.params["unique_indices"] == add.params["indices_are_sorted"] == promised
        check_splits(made, args, [split])
