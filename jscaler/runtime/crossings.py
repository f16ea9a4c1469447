"""A hop between device groups as it runs: whole parts by ``jax.device_put``; or pieces, cut here and joined there.

A value that crosses is one array of its devices' parts in a row (`lower.emit.stacked`): so any layout has one, value
shares and uneven blocks too. What else a crossing does is done inside of the groups.
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

Hop = Callable[[jax.Array], jax.Array]


def find_hop(crossing: Crossing, dtype: Any, devices: Sequence[Any], arriving: Any, known: "dict[Any, CrossingRun]") -> Hop:
    """From the one end of ``crossing`` to the other, where the value lies as ``arriving`` says; what is given is kept.

    Args:
        known: the runs of other values between ``devices``, of which equal ones are compiled once; filled here.
    """
    alone = len(crossing.source.mesh.devices) == len(crossing.target.mesh.devices) == 1
    if not crossing.source.sizes or alone:
        # JAX takes a sixth longer where it is given the sharding that a device is
        there = next(iter(arriving.device_set)) if isinstance(arriving, SingleDeviceSharding) else arriving
        return lambda value: jax.device_put(value, there)
    if crossing.is_equal or _all_whole(crossing):
        return _WholeParts(crossing, devices, arriving)
    key = crossing, jnp.dtype(dtype)
    if key not in known:
        known[key] = CrossingRun(crossing, dtype, devices)
    run = known[key]
    return lambda value: rewrapped(run(value), arriving)


class _WholeParts:
    """Every device of the consumers' group gets the part of one of the producers'."""

    def __init__(self, crossing: Crossing, devices: Sequence[Any], arriving: Any) -> None:
        source = (
            _copies(crossing, devices)
            if _all_whole(crossing)
            else {there: here for move in crossing.moves for here, there in ends_of(crossing, move, devices)}
        )
        self._arriving = arriving
        self._to = members(arriving)
        self._from = [source[device] for device in self._to]
        self._shape = stacked(len(self._to), crossing.target.local_shape)

    def __call__(self, value: jax.Array) -> jax.Array:
        parts = {shard.device: shard.data for shard in value.addressable_shards}
        sent = jax.device_put([parts[device] for device in self._from], self._to)
        return jax.make_array_from_single_device_arrays(self._shape, self._arriving, sent)


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

    def __init__(self, crossing: Crossing, dtype: Any, devices: Sequence[Any]) -> None:
        self.crossing, self._devices = crossing, devices
        here = _flat(crossing.devices[: len(crossing.source.mesh.devices)])
        there = _flat(crossing.target.mesh.devices)
        self._from, self._to = (_sharding(mesh, devices) for mesh in (here, there))
        pieces = [self._struct(there, m.shape, dtype, self._to) for m in crossing.moves]
        part = self._struct(here, crossing.source.local_shape, dtype, self._from)
        self._leave = _program(lambda x: leave(crossing, x, here), self._from, [crossing.source.local_shape], [part])
        shapes = [m.shape for m in crossing.moves]
        self._arrive = _program(lambda *xs: (arrive(crossing, xs, there, dtype),), self._to, shapes, pieces)
        self._zeros = [self._nothing(m, dtype) for m in crossing.moves]

    @staticmethod
    def _struct(mesh: DeviceMesh, shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(stacked(len(mesh.devices), shape), dtype, sharding=sharding)

    def __call__(self, parts: jax.Array) -> jax.Array:
        """Cross; ``parts`` are kept."""
        (made,) = self._arrive(*self._hop(self._leave(rewrapped(parts, self._from))))
        return made

    def _hop(self, pieces: Sequence[jax.Array]) -> list[jax.Array]:
        """Every piece to where it goes, in one call; who gets none has zeros."""
        found = []
        for move, piece, zeros in zip(self.crossing.moves, pieces, self._zeros, strict=True):
            rows = {shard.device: shard.data for shard in piece.addressable_shards}
            came = {receiver: rows[sender] for sender, receiver in ends_of(self.crossing, move, self._devices)}
            sent = jax.device_put(list(came.values()), list(came))
            whole = zeros | dict(zip(came, sent, strict=True))
            shape = stacked(len(whole), move.shape)
            found.append(jax.make_array_from_single_device_arrays(shape, self._to, list(whole.values())))
        return found

    def _nothing(self, move: BoxMove, dtype: Any) -> dict[Any, jax.Array]:
        part = np.zeros(move.shape or (1,), dtype)
        return {device: jax.device_put(part, device) for device in members(self._to)}


def ends_of(crossing: Crossing, move: BoxMove, devices: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Sender and receiver of each message; of copies they are the same."""
    numbers = crossing.devices
    pairs = move.pairs or [(p, p) for p in range(len(numbers)) if any(write.active[p] for write in move.writes)]
    return [(devices[numbers[a]], devices[numbers[b]]) for a, b in pairs]


def members(sharding: Any) -> list[Any]:
    """The devices of a sharding, in the order of its mesh."""
    if not isinstance(sharding, NamedSharding):
        return list(sharding.device_set)
    return list(np.ravel(sharding.mesh.devices))  # type: ignore[arg-type]


def rewrapped(parts: jax.Array, sharding: Any) -> jax.Array:
    """The parts, where they lie, in the order of ``sharding``."""
    held = {shard.device: shard.data for shard in parts.addressable_shards}
    return jax.make_array_from_single_device_arrays(parts.shape, sharding, [held[d] for d in members(sharding)])


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
