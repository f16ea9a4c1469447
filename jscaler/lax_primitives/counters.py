"""The global index of a part's elements as threefry counts them: 64 bits in two words, without arithmetic of 64 bits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

WORD, HALF = 32, 16
LOW = (1 << HALF) - 1


def global_index(positions: Callable[[int], Any], dims: Sequence[int], whole: Sequence[int], local: Sequence[int]) -> Any:
    """The row-major index of each element of a part, as ``(high, low)`` words of shape ``local``.

    Args:
        positions: dim of the part -> the global positions of its rows there, a uint32 vector.
        dims: the dims that count, in order; the index is the same along the others.
        whole: the sizes of these dims in the whole.
    """
    shape, sizes = tuple(local), dict(zip(dims, whole, strict=True))
    minor = _minor_dims(dims, whole, local)  # the index within them is a count
    stride = math.prod(sizes[dim] for dim in minor)
    low = lax.broadcast_in_dim(lax.iota(jnp.uint32, stride).reshape([sizes[dim] for dim in minor]), shape, minor)
    high = None
    for dim in reversed(dims[: len(dims) - len(minor)]):
        if stride * sizes[dim] <= 2**WORD:  # the index within the dims so far is one word
            low = low + lax.broadcast_in_dim(positions(dim) * jnp.uint32(stride), shape, (dim,))
        else:
            more, least = (
                lax.broadcast_in_dim(word, shape, (dim,)) for word in product(positions(dim), stride, sizes[dim])
            )
            low = low + least
            carried = more + (low < least).astype(jnp.uint32)
            high = carried if high is None else high + carried
        stride *= sizes[dim]
    return jnp.zeros(shape, jnp.uint32) if high is None else high, low


def _minor_dims(dims: Sequence[int], whole: Sequence[int], local: Sequence[int]) -> tuple[int, ...]:
    """The last of ``dims``, of which the part has all, as many as one array can count."""
    found: tuple[int, ...] = ()
    count = 1
    for dim, size in zip(reversed(dims), reversed(whole), strict=True):
        count *= size
        if local[dim] != size or count >= 2 ** (WORD - 1):
            break
        found = (dim, *found)
    return found


def product(values: Any, by: int, size: int = 2**WORD) -> tuple[Any, Any]:
    """``values · by`` modulo 2^64 as (high, low) words, of uint32 ``values`` below ``size`` and a number below 2^64.

    By halves of words: XLA compiles ``lax.mulhi`` for CPUs, and not for CUDA. Of values beyond ``size``, as rows of padding
    have, the high word may be any.
    """
    above, b1, b0 = by >> WORD, jnp.uint32(by >> HALF & LOW), jnp.uint32(by & LOW)
    if size <= 2**HALF:
        high = values * b1 + (values * b0 >> HALF) >> HALF
    else:
        a1, a0 = values >> HALF, values & LOW
        cross, across = a0 * b1, a1 * b0
        middle = (a0 * b0 >> HALF) + (cross & LOW) + (across & LOW)
        high = a1 * b1 + (cross >> HALF) + (across >> HALF) + (middle >> HALF)
    return (high + values * jnp.uint32(above) if above else high), values * jnp.uint32(by % 2**WORD)
