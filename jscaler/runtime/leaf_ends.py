"""Leaves that are several of a step's inputs: one array over all their devices outside, an array for each stage inside.

::

    kernel [12, …], NamedSharding over stages × x0     kernel[0:4] on stage 0, kernel[4:8] on stage 1, …

The memory is the same: parts are taken from the leaf's shards, and put together from theirs, without a copy. Where no
``jax.Array`` can lie as the parts do, several of them on one device or parts of several sizes, the leaf is a
`ChunkedArray` of them. Parts may be the whole leaf on one group each: the array is then replicated over ``stages``.
"""

import functools
import itertools
import weakref
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jscaler.ir import PTensor
from jscaler.materialize import DeviceMesh
from jscaler.runtime.chunked_array import ChunkedArray, ChunkedSharding
from jscaler.runtime.devices import devices_of, own_devices

STAGES = "stages"  # the mesh axis over which the ranges lie


@dataclass(frozen=True)
class LeafEnd:
    """A leaf of the step's arguments, or of its results, that is ``count`` of its inputs, or outputs, from ``start`` on.

    Attributes:
        copies: whether each of these is the whole leaf, and no range of its dim 0.
    """

    number: int
    start: int
    shape: tuple[int, ...]
    sharding: NamedSharding | ChunkedSharding
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[Any, ...]
    copies: bool = False

    @property
    def places(self) -> range:
        """The numbers of its parts among all inputs, or outputs."""
        return range(self.start, self.start + self.count)

    @property
    def first_rows(self) -> tuple[int, ...]:
        """Where in dim 0 of the leaf each part begins."""
        if self.copies:
            return (0,) * self.count
        return tuple(itertools.accumulate((shape[0] for shape in self.shapes[:-1]), initial=0))

    @property
    def count(self) -> int:
        return len(self.parts)

    @functools.cached_property
    def _order(self) -> list[tuple[int, int]]:
        """For each device of this process, in the order of the leaf's sharding, the part that it has, and the how-manieth
        of that part's devices it is."""
        held = {d: (number, at) for number, part in enumerate(self.parts) for at, d in enumerate(own_devices(part))}
        return [held[d] for d in own_devices(self.sharding)]

    def taken_apart(self, leaf: Any, joined: "Joined | None" = None) -> Sequence[Any]:
        """The parts of ``leaf``, which lies as it should: the same memory; what it was joined of, where that is known."""
        if isinstance(self.sharding, ChunkedSharding):
            return leaf.parts
        known = joined.parts_of(leaf) if joined is not None else None
        if known is not None and known[0] == self.parts:
            return known[1]
        held = dict(zip(own_devices(self.sharding), _shards(leaf, self.sharding), strict=True))
        return [_of_shards(shape, part, held, leaf.dtype) for shape, part in zip(self.shapes, self.parts, strict=True)]

    def joined(self, parts: Sequence[Any], joined: "Joined | None" = None) -> Any:
        """The leaf of which these are the parts: the same memory."""
        if isinstance(self.sharding, ChunkedSharding):
            return ChunkedArray(parts, self.sharding)
        shards = [_shards(part, sharding) for part, sharding in zip(parts, self.parts, strict=True)]
        ordered = [shards[number][at] for number, at in self._order]
        leaf = jax.make_array_from_single_device_arrays(self.shape, self.sharding, ordered, dtype=parts[0].dtype)
        if joined is not None:
            joined.keep(leaf, self.parts, parts)
        return leaf


class Joined:
    """The parts of leaves that a step has returned, as long as somebody has these: the next step takes none apart."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[Any, ...], Sequence[Any]]] = {}

    def keep(self, leaf: Any, shardings: tuple[Any, ...], parts: Sequence[Any]) -> None:
        """Remember the parts of ``leaf``, as long as somebody has it."""
        key = id(leaf)
        self._known[key] = weakref.ref(leaf, lambda _: self._known.pop(key, None)), shardings, parts

    def parts_of(self, leaf: Any) -> tuple[tuple[Any, ...], Sequence[Any]] | None:
        """How its parts lie, and the parts."""
        known = self._known.get(id(leaf))
        return known[1:] if known is not None and known[0]() is leaf else None


def _shards(array: Any, sharding: Any) -> list[Any]:
    """What the devices hold, in the order of the sharding."""
    if isinstance(sharding, SingleDeviceSharding):
        return [array] if own_devices(sharding) else []
    if array.is_fully_replicated or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):  # the first device's, else
        held = {shard.device: shard.data for shard in array.addressable_shards}
        return [held[d] for d in own_devices(sharding)]
    return [array.addressable_data(i) for i in range(len(sharding.addressable_devices))]


def _of_shards(shape: tuple[int, ...], sharding: Any, held: Mapping[Any, Any], dtype: Any) -> Any:
    """The array of what devices hold, in their order (arrays of keys take no other)."""
    own = [held[d] for d in own_devices(sharding)]
    return jax.make_array_from_single_device_arrays(shape, sharding, own, dtype=dtype)


@dataclass(frozen=True)
class LeafEnds:
    """The leaves of a step's arguments, or of its results: which are one of its inputs, and which are several.

    Attributes:
        shardings: of the leaves.
        of_parts: of the inputs, or outputs.
        stacked: the leaves that are several.
        starts: of each leaf, the first of its inputs.
    """

    shardings: tuple[Any, ...]
    of_parts: tuple[Any, ...]
    stacked: tuple[LeafEnd, ...]
    starts: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many inputs, or outputs, there are."""
        return len(self.of_parts)

    @staticmethod
    def of(
        tensors: Sequence[PTensor],
        shardings: Sequence[Any],
        groups: Sequence[DeviceMesh],
        counts: Sequence[int],
        copies: Container[PTensor] = (),
    ) -> "LeafEnds":
        """From the inputs of a graph, or its outputs, with their device groups.

        Args:
            counts: how many of them each leaf is; empty where each is one.
            copies: those that are a whole leaf once more.
        """
        if not counts:
            return LeafEnds(tuple(shardings), tuple(shardings), (), tuple(range(len(tensors))))
        found, stacked, starts, start = [], [], [], 0
        for number, count in enumerate(counts):
            own = slice(start, start + count)
            if count == 1:
                found.append(shardings[start])
            else:
                shapes, copied = tuple(t.shape for t in tensors[own]), tensors[start + 1] in copies
                if copied:
                    whole, shape = copies_sharding(shapes[0], shardings[own], groups[own]), shapes[0]
                else:
                    whole = leaf_sharding(shapes, shardings[own], groups[own])
                    shape = (sum(s[0] for s in shapes), *shapes[0][1:])
                stacked.append(LeafEnd(number, start, shape, whole, shapes, tuple(shardings[own]), copied))
                found.append(whole)
            starts.append(start)
            start += count
        return LeafEnds(tuple(found), tuple(shardings), tuple(stacked), tuple(starts))

    def numbers(self, leaves: Sequence[int]) -> list[int]:
        """The inputs that these leaves are."""
        ends = (*self.starts[1:], self.total)
        return [i for leaf in leaves for i in range(self.starts[leaf], ends[leaf])]

    def leaf_of(self, number: int) -> int:
        """The leaf that an input is, or is part of."""
        return int(np.searchsorted(self.starts, number, side="right")) - 1

    def taken_apart(self, leaves: Sequence[Any], known: Joined) -> Sequence[Any]:
        """The inputs that ``leaves`` are."""
        if not self.stacked:
            return leaves
        found: list[Any] = []
        done = 0
        for end in self.stacked:
            found += leaves[done : end.number]
            found += end.taken_apart(leaves[end.number], known)
            done = end.number + 1
        return [*found, *leaves[done:]]

    def joined(self, values: Sequence[Any], known: Joined) -> Sequence[Any]:
        """The leaves that outputs are."""
        if not self.stacked:
            return values
        found: list[Any] = []
        done = 0
        for end in self.stacked:
            found += values[done : end.start]
            done = end.start + end.count
            found.append(end.joined(values[end.start : done], known))
        return [*found, *values[done:]]


def leaf_sharding(
    shapes: Sequence[tuple[int, ...]], parts: Sequence[Any], groups: Sequence[DeviceMesh]
) -> NamedSharding | ChunkedSharding:
    """How a leaf lies whose parts of these shapes, along dim 0, lie so on these groups."""
    devices = [device for group in groups for device in group.devices]
    apart = len(set(shapes)) == 1 and len(set(devices)) == len(devices)
    found = _of_one_array(shapes[0], parts) if apart else None
    return found or ChunkedSharding(tuple(shape[0] for shape in shapes), tuple(parts), len(set(devices)))


def copies_sharding(shape: tuple[int, ...], parts: Sequence[Any], groups: Sequence[DeviceMesh]) -> NamedSharding:
    """How a leaf lies that lies so, whole or cut, on each of these groups; where they share devices it is a scalar."""
    devices = [device for group in groups for device in group.devices]
    found = _of_one_array(shape, parts, stacked=False) if len(set(devices)) == len(devices) else None
    if found is not None:
        return found
    assert not shape, "copies that are cut lie alike, on devices of their own"
    if any(isinstance(getattr(part, "mesh", None), AbstractMesh) for part in parts):
        return NamedSharding(AbstractMesh((len(set(devices)),), (STAGES,)), P())
    known = dict.fromkeys(device for part in parts for device in devices_of(part))
    return NamedSharding(Mesh(np.array([*known]), (STAGES,)), P())


def _of_one_array(shape: tuple[int, ...], parts: Sequence[Any], stacked: bool = True) -> NamedSharding | None:
    """The sharding of one array whose parts of ``shape`` lie so, each on its devices; None where they lie differently.

    Args:
        stacked: whether parts stand behind each other along dim 0, and are not copies.
    """
    first = parts[0]
    if isinstance(first, SingleDeviceSharding):
        alone = [next(iter(part.device_set)) for part in parts if len(part.device_set) == 1]
        spec = P(STAGES) if stacked else P()
        return NamedSharding(Mesh(np.array(alone), (STAGES,)), spec) if len(alone) == len(parts) else None
    whole = first.spec
    if stacked:
        front = whole[0] if len(whole) else None
        names = (front,) if isinstance(front, str) else tuple(front or ())
        whole = P((STAGES, *names), *whole[1:])
    if isinstance(first.mesh, AbstractMesh):
        sizes, axes = (len(parts), *first.mesh.axis_sizes), (STAGES, *first.mesh.axis_names)
        return NamedSharding(AbstractMesh(sizes, axes), whole)
    assert isinstance(first.mesh, Mesh)
    rows = [_dealt(shape, first, first.mesh, part) for part in parts]
    if any(row is None for row in rows):
        return None
    devices = np.array(rows).reshape((len(parts), *first.mesh.devices.shape))
    return NamedSharding(Mesh(devices, (STAGES, *first.mesh.axis_names)), whole)


def _dealt(shape: tuple[int, ...], first: NamedSharding, mesh: Mesh, part: Any) -> list[Any] | None:
    """The devices of ``part``, in the order in which those of ``first`` hold the same; None where they do not."""
    alike = isinstance(part, NamedSharding) and (part.mesh.shape, part.spec) == (mesh.shape, first.spec)
    if alike and isinstance(part.mesh, Mesh):
        return list(part.mesh.devices.flat)
    held: dict[Any, list[Any]] = {}
    for device, index in part.devices_indices_map(shape).items():
        held.setdefault(_key(index, shape), []).append(device)
    wanted = first.devices_indices_map(shape)
    keys = [_key(wanted[d], shape) for d in mesh.devices.flat]
    if len(part.device_set) != len(keys) or any(keys.count(key) != len(held.get(key, ())) for key in set(keys)):
        return None
    return [held[key].pop(0) for key in keys]


def _key(index: Sequence[slice], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
