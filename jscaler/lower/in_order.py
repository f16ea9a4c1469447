"""``in_order``: a fence that ``op_order`` puts around what an op reads, and that holds in the compiled program.

An ``optimization_barrier`` is enough where XLA schedules first and drops barriers later, as for GPUs. XLA for CPU drops
them first of all, so that there what comes later reads a bit of what comes before::

    a ──► never = a[0] < 1 and a[0] > 1        no compiler knows that this is false (nor need it)
    x ──► x' = select(never, 0, x) ──► b       b cannot run before a; its numbers are those of x, bit by bit
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

# By this name the fence is known to all who know JAX's own: it changes no value, and is never merged with another.
in_order_p = core.Primitive("optimization_barrier")
in_order_p.multiple_results = True


def in_order(reads: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """The arrays ``reads`` as new values, for readers that run after all of ``before`` are there.

    Example:
        >>> late = in_order([x], before=[first])  # doctest: +SKIP
    """
    return in_order_p.bind(*reads, *before, late=len(reads))[: len(reads)]


def _barrier(*xs: Any, late: int) -> list[Any]:
    del late
    return list(lax.optimization_barrier(xs))


def _select(*xs: Any, late: int) -> list[Any]:
    signals = [_never(x) for x in xs[late:] if x.size]
    if not signals:
        return list(xs)
    never = signals[0]
    for signal in signals[1:]:
        never = never | signal
    return [_unless(never, x) for x in xs[:late]] + list(xs[late:])


def _never(x: jax.Array) -> jax.Array:
    """A bit that is not set, made of an element of ``x``."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    first = jnp.ravel(x)[0]
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = first.real
    if first.dtype == jnp.bool_:
        first = first.astype(jnp.int32)
    return (first < 1) & (first > 1)


def _unless(never: jax.Array, x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_unless(never, jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jnp.where(never, jnp.zeros((), x.dtype), x)


in_order_p.def_impl(_barrier)
in_order_p.def_abstract_eval(lambda *avals, late: list(avals))
mlir.register_lowering(in_order_p, mlir.lower_fun(_barrier, multiple_results=True))
mlir.register_lowering(in_order_p, mlir.lower_fun(_select, multiple_results=True), platform="cpu")
