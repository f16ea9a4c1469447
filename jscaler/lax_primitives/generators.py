"""What is made of nothing, or of a random key.

``iota`` and random bits depend on where the part lies. Bits are drawn by the element's global index, so that a part draws
exactly the bits of the whole.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.random import threefry2x32_p

from jscaler.ir.equations import dtype, shape
from jscaler.lax_primitives.counters import global_index
from jscaler.lax_primitives.elementwise import elementwise, trailing
from jscaler.lax_primitives.primitive import Part, Primitive
from jscaler.lax_primitives.shapes import sized
from jscaler.lax_primitives.spec import Dims, Label, Spec, dims


def iota(eqn: core.JaxprEqn) -> Spec:
    return Spec((), (dims(shape(eqn.outvars[0]), range(len(shape(eqn.outvars[0])))),))


def _own_iota(part: Part, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    dim = eqn.params["dimension"]
    dtype = eqn.params["dtype"]
    out = eqn.outvars[0]
    positions, sizes = part.positions(out, dim, jnp.int32), part.extended(out)
    if sizes[dim] != positions.size:  # the rows around a part, which then lies in a row
        positions = positions[0] - part.around(out, dim).before + lax.iota(jnp.int32, sizes[dim])
    return [lax.broadcast_in_dim(positions.astype(dtype), sizes, (dim,))]


def random_bits(eqn: core.JaxprEqn) -> Spec:
    """Bits are a function of the key and the element's global index, so every dim can be split (see localize)."""
    keys = len(shape(eqn.invars[0]))
    result = dims(shape(eqn.outvars[0]), range(len(shape(eqn.outvars[0]))))
    return Spec((result[:keys],), (result,), blocked=_drawn_together(eqn.invars[0], result[:keys], ("fry",)))


def _drawn_together(key: Any, labels: Dims, each: tuple[str, ...]) -> dict[Label, str]:
    """Batches of keys may be split only for generators that draw from every key by itself, named in ``each``."""
    by_itself = str(dtype(key)) in {f"key<{name}>" for name in each}
    return {} if by_itself else {label: "its keys are drawn from together" for dim in labels for label in dim}


def _own_bits(part: Part, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Threefry in its partitionable form is a function of the key and the 64-bit global index of the element."""
    (key,), out = values, eqn.outvars[0]
    width, keys = eqn.params["bit_width"], len(shape(eqn.invars[0]))
    by_index = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and "fry" in str(key.dtype)
    if not by_index or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        return [_draw_whole(part, eqn, key)]
    local = part.shape(out)
    dims = range(keys, len(local))
    high, low = global_index(lambda d: part.positions(out, d, jnp.uint32), dims, eqn.params["shape"], local)
    # one key stays a scalar: broadcast, it would go through every round of XLA:CPU's loop as an array
    words = jax.random.key_data(key)
    first, second = (words[..., i] for i in (0, 1))
    if keys:
        first, second = (lax.expand_dims(word, range(keys, len(local))) for word in (first, second))
    high, low = threefry2x32_p.bind(first, second, high, low)
    if width == 64:
        return [(high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)]
    return [(high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])]


def _draw_whole(part: Part, eqn: core.JaxprEqn, key: Any) -> Any:
    """Other generators have no form by index: draw the whole's bits, then take the part's."""
    out = eqn.outvars[0]
    keys = len(shape(eqn.invars[0]))
    bits = eqn.primitive.bind(key, **eqn.params)
    for dim in range(keys, len(shape(out))):
        bits = jnp.take(bits, part.positions(out, dim, jnp.int32), axis=dim)
    return bits


def random_fold_in(eqn: core.JaxprEqn) -> Spec:
    spec = elementwise()(eqn)
    return dataclasses.replace(spec, blocked=_drawn_together(eqn.invars[0], spec.results[0], ("fry", "rbg")))


def random_split(eqn: core.JaxprEqn) -> Spec:
    """New keys along new dims, which are drawn together."""
    keys = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    result = dims(shape(eqn.outvars[0]), range(len(shape(eqn.outvars[0]))))
    new = {label: "its keys are split together" for dim in result[len(keys) :] for label in dim}
    return Spec((keys,), (result,), blocked=new | _drawn_together(eqn.invars[0], keys, ("fry", "rbg")))


INSIDE = "it is the inside of a random key"

RECORDS = (
    Primitive("iota", iota, bound=_own_iota, by_row=True, refilled=True, cost="fused"),
    Primitive("platform_index", iota, cost="fused"),  # which of several implementations the devices' platform has
    Primitive("empty", iota, shaped=sized("shape"), cost="fused"),
    Primitive("empty2", iota, cost="fused"),
    Primitive("random_bits", random_bits, bound=_own_bits, weight=45, cost="drawn"),
    Primitive("random_clone", elementwise(), cost="fused"),
    Primitive("random_seed", elementwise(), cost="fused"),
    Primitive("random_fold_in", random_fold_in, cost="fused"),
    Primitive("random_split", random_split, cost="fused"),
    Primitive("random_wrap", trailing(INSIDE), cost="fused"),
    Primitive("random_unwrap", trailing(INSIDE), cost="fused"),
)
