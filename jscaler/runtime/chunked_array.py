"""``ChunkedArray``: a stack of layers whose ranges lie on several device groups, as one leaf of the state.

::

    interleaved, 2 chunks on each of 2 groups          kernel [8, …]
                                                       [0:2] on group 0   [2:4] on group 1
                                                       [4:6] on group 0   [6:8] on group 1

A ``jax.Array`` has one piece of memory on a device, and here a device has two; nor are its pieces of several sizes. So the
leaf is a tuple of arrays, the chunks, which are what the step takes and returns: nothing is moved or put together between
steps. To everybody else it is one array: numpy, ``jnp`` and operators read it as a whole, which puts it together each time.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.runtime.absent import absent, is_absent
from jscaler.runtime.gathered import gathered
from jscaler.text.units import counted

EVERYWHERE = "devices"  # the mesh axis of a leaf that lies on all devices, as an ordinary array


@dataclass(frozen=True)
class ChunkedSharding:
    """Where the chunks of a leaf lie, which are ranges of its dim 0.

    Attributes:
        sizes: of the ranges, in rows.
        parts: a JAX sharding for each.
        num_devices: on how many devices they lie, which need not be at hand.
    """

    sizes: tuple[int, ...]
    parts: tuple[Any, ...]
    num_devices: int

    @functools.cached_property
    def device_set(self) -> set[Any]:
        return set().union(*(part.device_set for part in self.parts))

    @property
    def is_fully_addressable(self) -> bool:
        return all(part.is_fully_addressable for part in self.parts)

    @property
    def rows(self) -> list[slice]:
        """The range of each chunk."""
        return [slice(*own) for own in itertools.pairwise(itertools.accumulate(self.sizes, initial=0))]

    def everywhere(self, shape: Sequence[int]) -> NamedSharding:
        """That of an ordinary array on all of these devices: cut along the first dim that divides by their number."""
        dim = next((dim for dim, size in enumerate(shape) if size and size % self.num_devices == 0), None)
        spec = P() if dim is None else P(*(None,) * dim, EVERYWHERE)
        if any(isinstance(getattr(part, "mesh", None), AbstractMesh) for part in self.parts):
            return NamedSharding(AbstractMesh((self.num_devices,), (EVERYWHERE,)), spec)
        devices = sorted(self.device_set, key=lambda device: device.id)
        return NamedSharding(Mesh(np.array(devices), (EVERYWHERE,)), spec)

    def placed(self, value: Any) -> "ChunkedArray":
        """``value``, an array of any kind, in chunks that lie so."""
        if isinstance(value, ChunkedArray):
            value = value.whole() if value.is_fully_addressable else value.on_host()
        elif isinstance(value, jax.Array) and not value.is_fully_addressable:
            (value,) = gathered([value])
        return ChunkedArray([_placed(value[own], part) for own, part in zip(self.rows, self.parts, strict=True)], self)


class ChunkedStruct(jax.ShapeDtypeStruct):
    """The type of a leaf that lies in chunks: to JAX and Orbax an array on all devices, which is cut when it is there.

    Attributes:
        chunks: how it lies then.
    """

    __slots__ = ("chunks",)

    def __init__(self, shape: Sequence[int], dtype: Any, chunks: ChunkedSharding):
        super().__init__(tuple(shape), dtype, sharding=chunks.everywhere(shape))
        self.chunks = chunks


class ChunkShard(NamedTuple):
    """What a device has of a leaf in chunks; a device may have several. As ``jax.Array.addressable_shards`` has them."""

    device: Any
    index: tuple[slice, ...]
    data: Any


class ChunkedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A leaf of the state in chunks, each a ``jax.Array`` on the device group that runs its layers.

    ``np.asarray``, ``jnp.asarray``, indexing and operators read the whole; ``jax.jit`` takes it as ``jnp.asarray(leaf)``. A
    step of jscaler takes it as it is, under any plan.

    Args:
        parts: the chunks, ranges of dim 0 in order.
        sharding: where they lie; by default as they do.

    Example:
        >>> leaf = jscaler.ChunkedArray([jnp.zeros((2, 3)), jnp.ones((1, 3))])
        >>> leaf.shape, float(jnp.asarray(leaf).sum()), [part.shape for part in leaf.parts]
        ((3, 3), 3.0, [(2, 3), (1, 3)])
        >>> float((2 * leaf + 1).max()), leaf.whole().shape, type(leaf.on_host()).__name__  # ordinary arrays
        (3.0, (3, 3), 'ndarray')
        >>> leaf.ndim, leaf.size, leaf.itemsize, leaf.nbytes, str(leaf.dtype), str(leaf.aval)
        (2, 9, 4, 36, 'float32', 'float32[3,3]')
        >>> len(leaf.devices()), len(leaf.addressable_shards), leaf.is_fully_addressable
        (1, 2, True)
        >>> other = leaf.copy().block_until_ready()
        >>> other.copy_to_host_async(); other.delete()
        >>> other.is_deleted(), leaf.is_deleted()
        (True, False)
    """

    weak_type = False
    committed = True
    is_fully_replicated = False

    def __init__(self, parts: Sequence[jax.Array], sharding: ChunkedSharding | None = None):
        self.parts = tuple(parts)
        sizes = tuple(part.shape[0] for part in self.parts)
        self.sharding = sharding or _as_they_lie(self.parts)
        self.shape: tuple[int, ...] = (sum(sizes), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """Of its numbers."""
        return self.parts[0].dtype

    @property
    def aval(self) -> Any:
        """Its abstract value, as of a ``jax.Array``."""
        return jax.core.ShapedArray(self.shape, self.dtype)

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.parts[0].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has all of its devices."""
        return all(part.is_fully_addressable for part in self.parts)

    @property
    def addressable_shards(self) -> list[ChunkShard]:
        """What this process's devices have, chunk by chunk, with its place in the whole."""
        found = []
        for own, part in zip(self.sharding.rows, self.parts, strict=True):
            for shard in part.addressable_shards:
                start, stop, _ = shard.index[0].indices(part.shape[0])
                rows = slice(own.start + start, own.start + stop)
                found.append(ChunkShard(shard.device, (rows, *shard.index[1:]), shard.data))
        return found

    def devices(self) -> set[Any]:
        """All devices that have some of it."""
        return self.sharding.device_set

    def is_deleted(self) -> bool:
        """Whether the memory of a chunk was given away."""
        return any(part.is_deleted() for part in self.parts)

    def delete(self) -> None:
        """Let go of the memory of all chunks. (What stands for other processes' chunks has none, and is used again.)"""
        for part in self.parts:
            if not is_absent(part.sharding):
                part.delete()

    def block_until_ready(self) -> "ChunkedArray":
        """Wait for all chunks."""
        jax.block_until_ready(self.parts)
        return self

    def copy_to_host_async(self) -> None:
        """Begin to copy all chunks to the host."""
        for part in self.parts:
            part.copy_to_host_async()

    def copy(self) -> "ChunkedArray":
        """Another with the same values, which lies as this one."""
        return ChunkedArray([jnp.copy(part) for part in self.parts], self.sharding)

    def whole(self, sharding: Any = None) -> jax.Array:
        """An ordinary array of its values.

        Args:
            sharding: where it lies; by default in parts on all of the chunks' devices.
        """
        there = self.sharding.everywhere(self.shape) if sharding is None else sharding
        found = self.on_host()
        if not isinstance(found, np.ndarray):
            return jax.device_put(found, there)
        return jax.make_array_from_callback(self.shape, there, lambda index: found[index])

    def on_host(self) -> Any:
        """Its values as a numpy array; of random keys, which numpy does not have, as an array of JAX on one device.

        All processes of a job call it.
        """
        return joined(gathered(self.parts))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.concatenate([np.asarray(part) for part in self.parts])
        return found if dtype is None else found.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Operators, and numpy's functions of one element: as JAX has them."""
        if method != "__call__" or options:
            return NotImplemented
        return getattr(jnp, ufunc.__name__)(*(x.whole() if isinstance(x, ChunkedArray) else x for x in inputs))

    def __jax_array__(self) -> jax.Array:
        return self.whole()

    def __getitem__(self, index: Any) -> jax.Array:
        return self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        """Methods of arrays (``sum``, ``astype``, ``at``): of the whole."""
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"a ChunkedArray has no '{name}'")
        return getattr(self.whole(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        chunks = counted(len(self.parts), "chunk")
        return f"ChunkedArray({self.dtype}{list(self.shape)}, {chunks} on {counted(len(self.devices()), 'device')})"


def joined(values: Sequence[Any]) -> Any:
    """The values of chunks behind each other."""
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(values)
    first = min(jax.local_devices(), key=lambda device: device.id)
    return jnp.concatenate([jax.device_put(value, first) for value in values])


def _as_they_lie(parts: Sequence[jax.Array]) -> ChunkedSharding:
    devices = set().union(*(part.sharding.device_set for part in parts))
    return ChunkedSharding(tuple(p.shape[0] for p in parts), tuple(p.sharding for p in parts), len(devices))


def _placed(value: Any, sharding: Any) -> jax.Array:
    if is_absent(sharding):
        return absent([value], [sharding])[0]
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def is_equivalent(here: Any, there: Any, ndim: int) -> bool:
    """Whether arrays of ``ndim`` dims lie the same under two shardings, each JAX's or of chunks."""
    if here == there:
        return True
    if isinstance(here, ChunkedSharding) and isinstance(there, ChunkedSharding):
        pairs = zip(here.parts, there.parts, strict=False)
        return here.sizes == there.sizes and all(is_equivalent(a, b, ndim) for a, b in pairs)
    if isinstance(here, ChunkedSharding) or isinstance(there, ChunkedSharding):
        return False
    return here.is_equivalent_to(there, ndim)


def arrays_of(leaf: Any) -> tuple[Any, ...]:
    """The arrays that a leaf is: its chunks, or itself."""
    return leaf.parts if isinstance(leaf, ChunkedArray) else (leaf,)
