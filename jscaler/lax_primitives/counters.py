"""The global index of a part's elements as threefry counts them: 64 bits in two words, as JAX may lack types of 64 bits."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

WORD = 32


def global_index(positions: Callable[[int], Any], dims: Sequence[int], whole: Sequence[int], local: Sequence[int]) -> Any:
    """The row-major index of each element of a part, as ``(high, low)`` words of shape ``local``.

    Args:
        positions: dim of the part -> the global positions of its rows there, a uint32 vector.
        dims: the dims that count, in order; the index is the same along the others.
        whole: the sizes of these dims in the whole.
    """
    high = low = jnp.zeros(tuple(local), jnp.uint32)
    stride = 1
    for dim, size in zip(reversed(dims), reversed(whole), strict=True):
        place = positions(dim)
        if stride * size <= 2**WORD:  # the index within the dims so far is one word
            low = low + lax.broadcast_in_dim(place * jnp.uint32(stride), tuple(local), (dim,))
        else:
            more, least = (lax.broadcast_in_dim(w, tuple(local), (dim,)) for w in product(place, stride))
            low = low + least
            high = high + more + (low < least).astype(jnp.uint32)
        stride *= size
    return high, low


def product(values: Any, by: int) -> tuple[Any, Any]:
    """``values · by`` modulo 2^64 as (high, low) words, of uint32 ``values`` and a number below 2^64."""
    above, below = by >> WORD, jnp.uint32(by % 2**WORD)
    high = lax.mulhi(values, below)
    return (high + values * jnp.uint32(above) if above else high), values * below
