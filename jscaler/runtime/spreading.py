"""States as Orbax takes them in a job of many processes: each leaf on all processes.

Of a pipeline's state a process has its own stages' leaves alone, and Orbax refuses a leaf of one process, lest each of them
writes its own. So such a leaf is shared out to all for as long as it is written, and brought home when it was read. A part
of a leaf goes to each device, one leaf after the other: every process writes as much as another, and no device holds more.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.runtime.absent import absent, is_absent
from jscaler.runtime.devices import Device, devices_of, is_here

PROCESS, LOCAL = "process", "local"  # axes


def spread(tree: Any) -> Any:
    """``tree``, each of its arrays on all processes; all of them call it. Alone, it is what was given."""
    return jax.tree.map(_spread, tree) if jax.process_count() > 1 else tree


def spread_structs(tree: Any) -> Any:
    """How arrays of these types and shardings lie where they are `spread`."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(
        lambda x: x if _is_everywhere(x.sharding) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_across(x)), tree
    )


def brought_home(tree: Any, target: Any) -> Any:
    """What was `spread`, as the structs of ``target`` say that it lies; all processes call it."""
    return jax.tree.map(_brought_home, tree, target) if jax.process_count() > 1 else tree


def _is_everywhere(sharding: Any) -> bool:
    return len({device.process_index for device in sharding.device_set}) == jax.process_count()


def _devices() -> np.ndarray:
    """Those of each process in a row; all have as many."""
    own: dict[int, list[Device]] = {}
    for device in jax.devices():
        own.setdefault(device.process_index, []).append(device)
    return np.array([own[process] for process in sorted(own)])


def _across(leaf: Any) -> NamedSharding:
    """Over all devices, where a dim divides by their number; else over processes; and a copy each where none divides."""
    devices = _devices()
    sizes = () if _is_key(leaf) else leaf.shape
    for count, axes in ((devices.size, (LOCAL, PROCESS)), (len(devices), (PROCESS,))):
        cut = next((dim for dim, size in enumerate(sizes) if size and size % count == 0), None)
        if cut is not None:
            return NamedSharding(Mesh(devices, (PROCESS, LOCAL)), P(*(None,) * cut, axes))
    return NamedSharding(Mesh(devices, (PROCESS, LOCAL)), P())


def _spread(leaf: jax.Array) -> jax.Array:
    if not isinstance(leaf, jax.Array) or _is_everywhere(leaf.sharding):
        return leaf
    if _is_key(leaf):
        impl = jax.random.key_impl(leaf)
        words = _spread(jax.random.key_data(leaf))
        wrap = jax.jit(lambda x: jax.random.wrap_key_data(x, impl=impl), out_shardings=_across(leaf))
        return jax.block_until_ready(wrap(words))
    across, owner = _across(leaf), devices_of(leaf.sharding)[0]
    whole = None if is_absent(leaf.sharding) else _whole(leaf)  # by all that have some of it, together
    within = [LOCAL if LOCAL in (axes or ()) else None for axes in across.spec]
    rows = NamedSharding(across.mesh, P(PROCESS, *within))  # a row of each process: it, or zeros
    shape = (jax.process_count(), *leaf.shape)
    own = []
    for device, index in rows.addressable_devices_indices_map(shape).items():
        assert index is not None
        if whole is not None and is_here(owner):
            own.append(jax.device_put(whole[None, *index[1:]], device))
        else:
            own.append(jnp.zeros((1, *rows.shard_shape(shape)[1:]), leaf.dtype, device=device))
    given = jax.make_array_from_single_device_arrays(shape, rows, own)
    return jax.block_until_ready(jax.jit(_one_of_them, out_shardings=across)(given))


def _whole(leaf: jax.Array) -> jax.Array:
    """All of it, on one device of this process, which has some of it."""
    if not leaf.is_fully_replicated:
        assert isinstance(leaf.sharding, NamedSharding)
        leaf = jax.block_until_ready(jax.jit(lambda x: x, out_shardings=NamedSharding(leaf.sharding.mesh, P()))(leaf))
    return leaf.addressable_data(0)


def _one_of_them(rows: Any) -> Any:
    """The row that is not zeros, to the bit: numbers are added as the words that they are, so that -0.0 stays."""
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        return jnp.any(rows, 0) if rows.dtype == bool else jnp.sum(rows, 0, dtype=rows.dtype)
    words = lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * rows.dtype.itemsize}"))
    return lax.bitcast_convert_type(jnp.sum(words, 0, dtype=words.dtype), rows.dtype)


def _brought_home(leaf: jax.Array, target: Any) -> jax.Array:
    there = target.sharding
    if _is_everywhere(there):
        return leaf
    impl = jax.random.key_impl(leaf) if _is_key(leaf) else None
    local = _whole(leaf if impl is None else jax.random.key_data(leaf))
    if is_absent(there):
        return absent([target], [there])[0]
    if impl is not None:
        return jax.jit(lambda x: jax.random.wrap_key_data(x, impl=impl), out_shardings=there)(np.asarray(local))
    return jax.make_array_from_callback(leaf.shape, there, lambda index: local[index])


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
