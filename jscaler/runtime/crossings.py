"""A crossing as it runs: the producers' executable, a ``jax.device_put`` of its pieces, the consumers' executable."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.lower.emit_crossing import arrive, leave
from jscaler.materialize.crossing import Crossing
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.point_to_point import BoxMove


class CrossingRun:
    """``run(parts) -> parts``: from the producers' devices to the consumers'.

    The parts of a group are one array, (devices, *local shape), with a row on each device: so any layout has one, value
    shares and uneven blocks too. Those that come are in the order of the target's mesh.
    """

    def __init__(self, crossing: Crossing, dtype: Any, devices: Sequence[Any]) -> None:
        self.crossing = crossing
        here = _flat(crossing.devices[: len(crossing.source.mesh.devices)])
        there = _flat(crossing.target.mesh.devices)
        self._from, self._to = (_sharding(mesh, devices) for mesh in (here, there))
        pieces = [jax.ShapeDtypeStruct((len(there.devices), *m.shape), dtype, sharding=self._to) for m in crossing.moves]
        row = jax.ShapeDtypeStruct((len(here.devices), *crossing.source.local_shape), dtype, sharding=self._from)
        self._leave = _program(lambda x: leave(crossing, x[0], here), self._from, row)
        self._arrive = _program(lambda *xs: (arrive(crossing, [x[0] for x in xs], there, dtype),), self._to, *pieces)
        self._zeros = [self._nothing(m, dtype) for m in crossing.moves]

    def __call__(self, parts: jax.Array) -> jax.Array:
        """Cross; ``parts`` are kept."""
        (made,) = self._arrive(*self._hop(self._leave(_rewrapped(parts, self._from))))
        return made

    def _hop(self, pieces: Sequence[jax.Array]) -> list[jax.Array]:
        """Every piece to where it goes, in one call; who gets none has zeros."""
        found = []
        for move, piece, zeros in zip(self.crossing.moves, pieces, self._zeros, strict=True):
            rows = {shard.device: shard.data for shard in piece.addressable_shards}
            came = {receiver: rows[sender] for sender, receiver in self._pairs(move)}
            sent = jax.device_put(list(came.values()), list(came))
            whole = zeros | dict(zip(came, sent, strict=True))
            shape = (len(whole), *move.shape)
            found.append(jax.make_array_from_single_device_arrays(shape, self._to, list(whole.values())))
        return found

    def _pairs(self, move: BoxMove) -> list[tuple[Any, Any]]:
        """Sender and receiver; of copies they are the same."""
        here = _members(self._from)
        there = dict(zip(self.crossing.target.mesh.devices, _members(self._to), strict=True))
        devices = self.crossing.devices
        pairs = move.pairs or [(p, p) for p in range(len(devices)) if any(write.active[p] for write in move.writes)]
        return [(here[a], there[devices[b]]) for a, b in pairs]

    def _nothing(self, move: BoxMove, dtype: Any) -> dict[Any, jax.Array]:
        row = np.zeros((1, *move.shape), dtype)
        return {device: jax.device_put(row, device) for device in _members(self._to)}


def _flat(devices: Sequence[int]) -> DeviceMesh:
    return DeviceMesh(tuple(devices), (("x", len(devices)),))


def _sharding(mesh: DeviceMesh, devices: Sequence[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array([devices[d] for d in mesh.devices]), ("x",)), P("x"))


def _members(sharding: NamedSharding) -> list[Any]:
    return list(np.ravel(sharding.mesh.devices))  # type: ignore[arg-type]


def _rewrapped(parts: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The rows of ``parts``, where they lie, in the order of ``sharding``."""
    rows = {shard.device: shard.data for shard in parts.addressable_shards}
    return jax.make_array_from_single_device_arrays(parts.shape, sharding, [rows[d] for d in _members(sharding)])


def _program(run: Any, sharding: NamedSharding, *rows: Any) -> Any:
    """``run`` on each device's rows, compiled."""

    def local(*xs: Any) -> Any:
        return tuple(x[None] for x in run(*xs))

    mapped = jax.shard_map(local, mesh=sharding.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(mapped).lower(*rows).compile()
