"""A hop between device groups as it runs: whole parts; or pieces, cut here and joined there.

A value that crosses is one array of its devices' parts in a row (`lower.emit.stacked`): so any layout has one, value
shares and uneven blocks too. What else a crossing does is done inside of the groups. A process does what its own devices
have to do with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jscaler.lower.emit import stacked
from jscaler.lower.emit_crossing import arrive, leave
from jscaler.materialize.canonical import orderless
from jscaler.materialize.crossing import Crossing
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.point_to_point import BoxMove
from jscaler.runtime.devices import devices_of, is_here, own_devices
from jscaler.runtime.process_messages import Messages, Parts

Hop = Callable[[Any], Any]


def find_hop(crossing: Crossing, dtype: Any, devices: Sequence[Any], arriving: Any, known: dict[Any, Any]) -> Hop | None:
    """From the one end of ``crossing`` to the other, where the value lies as ``arriving`` says; what is given is kept.

    It takes and returns None where this process has nothing of the value; at neither end there is no hop.

    Args:
        known: what hops between ``devices`` run, of which what is equal is compiled once; filled here.
    """
    ends = [devices[d] for d in crossing.devices]
    if not any(map(is_here, ends)):
        return None
    alone = len(crossing.source.mesh.devices) == len(crossing.target.mesh.devices) == 1
    if (not crossing.source.sizes or alone) and all(map(is_here, ends)):
        # JAX takes a sixth longer where it is given the sharding that a device is
        there = next(iter(arriving.device_set)) if isinstance(arriving, SingleDeviceSharding) else arriving
        return lambda value: jax.device_put(value, there)
    if not crossing.source.sizes or alone or crossing.is_equal or _all_whole(crossing):
        return _WholeParts(crossing, dtype, devices, arriving, known)
    key = crossing, jnp.dtype(dtype)
    if key not in known:
        known[key] = CrossingRun(crossing, dtype, devices, known)
    run = known[key]
    return lambda value: rewrapped(run(value), arriving)


class _WholeParts:
    """Every device of the consumers' group gets the part of one of the producers'."""

    def __init__(
        self, crossing: Crossing, dtype: Any, devices: Sequence[Any], arriving: Any, known: dict[Any, Any]
    ) -> None:
        source = (
            _copies(crossing, devices)
            if _all_whole(crossing)
            else {there: here for move in crossing.moves for here, there in ends_of(crossing, move, devices)}
        )
        to = devices_of(arriving)
        part = crossing.target.local_shape
        self._messages = Messages([(source[device], device) for device in to], part, dtype, known)
        self._arriving, self._own = arriving, own_devices(arriving)
        self._shape = stacked(len(to), part) if part else ()

    def __call__(self, value: jax.Array | None) -> jax.Array | None:
        came = self._messages(_held(value))
        if not came:
            return None
        own = [came[device] for device in self._own]
        return jax.make_array_from_single_device_arrays(self._shape, self._arriving, own)


def _all_whole(crossing: Crossing) -> bool:
    """Whether every device at either end has all of it."""
    return orderless(crossing.source) and orderless(crossing.target)


def _copies(crossing: Crossing, devices: Sequence[Any]) -> dict[Any, Any]:
    """For each consumer the producer whose copy it takes: itself, or each in turn."""
    held = [devices[d] for d in crossing.source.mesh.devices]
    wanted = [devices[d] for d in crossing.target.mesh.devices]
    return {there: there if there in held else held[i % len(held)] for i, there in enumerate(wanted)}


class CrossingRun:
    """``run(parts) -> parts``: from the producers' devices to the consumers', by pieces, with all that a crossing does.

    The parts that come are in the order of the target's mesh.
    """

    def __init__(self, crossing: Crossing, dtype: Any, devices: Sequence[Any], known: dict[Any, Any]) -> None:
        self.crossing = crossing
        here = _flat(crossing.devices[: len(crossing.source.mesh.devices)])
        there = _flat(crossing.target.mesh.devices)
        self._from, self._to = (_sharding(mesh, devices) for mesh in (here, there))
        self._leave = self._arrive = None
        if own_devices(self._from):
            shape = crossing.source.local_shape
            part = self._struct(here, shape, dtype, self._from)
            self._leave = _program(lambda x: leave(crossing, x, here), self._from, [shape], [part])
        if own_devices(self._to):
            shapes = [m.shape for m in crossing.moves]
            pieces = [self._struct(there, shape, dtype, self._to) for shape in shapes]
            self._arrive = _program(lambda *xs: (arrive(crossing, xs, there, dtype),), self._to, shapes, pieces)
        self._messages = [Messages(ends_of(crossing, m, devices), m.shape or (1,), dtype, known) for m in crossing.moves]
        self._zeros = [self._nothing(m, dtype) for m in crossing.moves]

    @staticmethod
    def _struct(mesh: DeviceMesh, shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(stacked(len(mesh.devices), shape), dtype, sharding=sharding)

    def __call__(self, parts: jax.Array | None) -> jax.Array | None:
        """Cross; ``parts`` are kept."""
        pieces = self._leave(rewrapped(parts, self._from)) if self._leave is not None else [None] * len(self._messages)
        came = [messages(_held(piece)) for messages, piece in zip(self._messages, pieces, strict=True)]
        if self._arrive is None:
            return None
        (made,) = self._arrive(*map(self._joined, came, self.crossing.moves, self._zeros))
        return made

    def _joined(self, came: Parts, move: BoxMove, zeros: Parts) -> jax.Array:
        """A piece on all of the consumers' devices; who gets none has zeros."""
        own = [came.get(device, zero) for device, zero in zeros.items()]
        return jax.make_array_from_single_device_arrays(stacked(len(devices_of(self._to)), move.shape), self._to, own)

    def _nothing(self, move: BoxMove, dtype: Any) -> dict[Any, jax.Array]:
        part = np.zeros(move.shape or (1,), dtype)
        return {device: jax.device_put(part, device) for device in own_devices(self._to)}


def _held(value: jax.Array | None) -> dict[Any, jax.Array]:
    """What the devices of this process have of a value."""
    return {} if value is None else {shard.device: shard.data for shard in value.addressable_shards}


def ends_of(crossing: Crossing, move: BoxMove, devices: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Sender and receiver of each message; of copies they are the same."""
    numbers = crossing.devices
    pairs = move.pairs or [(p, p) for p in range(len(numbers)) if any(write.active[p] for write in move.writes)]
    return [(devices[numbers[a]], devices[numbers[b]]) for a, b in pairs]


def rewrapped(parts: jax.Array | None, sharding: Any) -> jax.Array | None:
    """The parts, where they lie, in the order of ``sharding``."""
    if parts is None:
        return None
    held = _held(parts)
    return jax.make_array_from_single_device_arrays(parts.shape, sharding, [held[d] for d in own_devices(sharding)])


def _flat(devices: Sequence[int]) -> DeviceMesh:
    return DeviceMesh(tuple(devices), (("x", len(devices)),))


def _sharding(mesh: DeviceMesh, devices: Sequence[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array([devices[d] for d in mesh.devices]), ("x",)), P("x"))


def _program(run: Any, sharding: NamedSharding, shapes: Sequence[tuple[int, ...]], structs: Sequence[Any]) -> Any:
    """``run`` on each device's parts, of ``shapes``, compiled."""

    def local(*xs: Any) -> Any:
        made = run(*(x.reshape(shape) for x, shape in zip(xs, shapes, strict=True)))
        return tuple(jnp.reshape(x, x.shape or (1,)) for x in made)

    mapped = jax.shard_map(local, mesh=sharding.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(mapped).lower(*structs).compile()
