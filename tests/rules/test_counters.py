"""Counters of threefry: 64-bit indices in two words."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.extend.random import threefry2x32_p
from parts import fragment

import jscaler
from jscaler.lax_primitives.counters import global_index, product

words = st.integers(0, 2**32 - 1)

sizes = st.sampled_from([1, 3, 2**16, 2**16 + 1, 2**32])


@given(st.lists(words, min_size=1, max_size=4), st.integers(0, 2**64 - 1), sizes)
@example([2**32 - 1], 2**64 - 1, 2**32)
@example([2**32 - 1], 2**64 - 1, 2**16)
def test_products_are_exact_modulo_two_to_the_64(values: list[int], by: int, size: int) -> None:
    values = [value % size for value in values]
    with jax.disable_jit():
        high, low = product(jnp.asarray(values, jnp.uint32), by, size)
    found = [(int(h) << 32) + int(x) for h, x in zip(high, low, strict=True)]
    assert found == [value * by % 2**64 for value in values]


@pytest.mark.parametrize(
    "whole", [(5, 4, 3), (2**14, 2**11, 2**9), (3 * 2**20, 7, 2**13), (2**31, 2**31), (2**30, 3, 2, 3)]
)
def test_an_index_is_that_of_the_whole(whole: tuple[int, ...]) -> None:
    starts = [0 if size < 8 else size - 3 for size in whole]
    local = tuple(min(size, 3) for size in whole)
    high, low = global_index(
        lambda d: jnp.uint32(starts[d]) + jnp.arange(local[d], dtype=jnp.uint32), range(len(whole)), whole, local
    )
    for place in np.ndindex(*local):
        strides = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
        expected = sum((starts[d] + i) * strides[d] for d, i in enumerate(place))
        assert (int(high[place]) << 32) + int(low[place]) == expected


@pytest.mark.smoke
def test_a_part_of_more_than_four_thousand_million_bits_is_drawn_alone() -> None:
    whole, key = (2**20, 2**13), jax.random.key(3)
    made = fragment(lambda k: jax.random.bits(k, whole, "uint32"), key)
    local: Any = made.local({"a": 2**18, "b": 2**10})
    assert all(math.prod(v.aval.shape) <= 32 for eqn in local.eqns for v in eqn.outvars)
    place = (2**17 + 5, 1000)
    (bits,) = jax.core.eval_jaxpr(local, (), key, *map(jnp.int32, place))
    rows, columns = np.meshgrid(place[0] * 4 + np.arange(4), place[1] * 8 + np.arange(8), indexing="ij")
    index = rows.astype(np.uint64) * whole[1] + columns.astype(np.uint64)
    assert index.min() > 2**32
    high, low = ((index >> shift).astype(np.uint32) for shift in (np.uint64(32), np.uint64(0)))
    first, second = jax.random.key_data(key)
    expected = np.bitwise_xor(*threefry2x32_p.bind(first, second, jnp.asarray(high), jnp.asarray(low)))
    np.testing.assert_array_equal(bits, expected)


@pytest.mark.aot
def test_such_a_part_compiles_for_cuda() -> None:
    def step(key: jax.Array, x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(key, 0.5, (*x.shape, 2**16))
        return jnp.where(kept, x[:, None], 0).sum(axis=1)

    arguments = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((2**17,), jnp.float32)
    lowered = jscaler.parallelize("data_parallel(batch='x')", devices=8)(step).lower(*arguments)
    lowered.compile(target="8xH100-80GB")  # XLA has no `mulhi` there
