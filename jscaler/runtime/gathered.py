"""Arrays that lie anywhere in a job of many processes, as numpy arrays on each of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def gathered(arrays: Sequence[Any]) -> list[Any]:
    """The values of ``arrays``, on every process. All call it, with as many of the same types; alone, it copies them."""
    if jax.process_count() == 1:
        return list(jax.device_get(list(arrays)))
    own = [_own(words_of(x)) for x in arrays]
    given = [
        np.zeros(words.shape, words.dtype) if one is None else one
        for words, one in zip(map(words_of, arrays), own, strict=True)
    ]
    held, every = multihost_utils.process_allgather((np.array([one is not None for one in own]), given))
    found = [rows[holds.argmax()] for holds, rows in zip(held.T, every, strict=True)]
    return list(map(_as_before, arrays, found))


def words_of(leaf: Any) -> Any:
    """A leaf as numpy can have it: of a random key, its words."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_before(leaf: Any, found: np.ndarray) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(leaf)) if _is_key(leaf) else found


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _own(leaf: Any) -> Any:
    """The whole of an array, where this process has some of it."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if not leaf.addressable_shards:
        return None
    if not leaf.is_fully_replicated:
        assert isinstance(leaf.sharding, NamedSharding), "on several devices a step has no other"
        leaf = jax.block_until_ready(jax.jit(lambda x: x, out_shardings=NamedSharding(leaf.sharding.mesh, P()))(leaf))
    return np.asarray(leaf.addressable_data(0))
