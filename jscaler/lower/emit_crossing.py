"""A ``Crossing`` as two programs: the producers' leaves pieces, the consumers' joins them.

In between every piece goes from one device to another as it is (`runtime.crossings`): no program spans both groups.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jscaler.lower.emit_collectives import exchange
from jscaler.lower.emit_point_to_point import filled, read_piece, write_piece
from jscaler.materialize.crossing import Crossing
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.point_to_point import BoxMove, Write


def leave(crossing: Crossing, local: Any, mesh: DeviceMesh) -> tuple[Array, ...]:
    """The pieces of one device of the producers' group, one for each of ``crossing.moves``, inside ``jax.shard_map``.

    Args:
        local: its part, in the source's local shape.
        mesh: of the program; its devices stand in the order of ``crossing.devices``.
    """
    held = exchange(crossing.leave, local, mesh).reshape(crossing.hop.views[0])
    position = lax.axis_index(mesh.names)
    places = range(len(mesh.devices))
    return tuple(read_piece(held, _of(move, places), position) for move in crossing.moves)


def arrive(crossing: Crossing, pieces: Sequence[Any], mesh: DeviceMesh, dtype: Any) -> Any:
    """The part of one device of the consumers' group, in the target's local shape, from the pieces that have come to it."""
    hop, places = crossing.hop, [crossing.devices.index(d) for d in mesh.devices]
    at = {place: i for i, place in enumerate(places)}
    position = lax.axis_index(mesh.names)
    buffers = [jnp.zeros((), dtype), *(jnp.zeros(view, dtype) for view in hop.views[1:])]
    for fill in hop.fills:
        write_piece(buffers, _written(fill.write, places), filled(fill, dtype), position)
    for move, piece in zip(crossing.moves, pieces, strict=True):
        for write in move.writes:
            write_piece(buffers, _written(write, places), piece, position)
    for move in crossing.relays:
        piece = read_piece(buffers[move.source], _of(move, places), position)
        piece = lax.ppermute(piece, mesh.names, [(at[a], at[b]) for a, b in move.pairs])
        for write in move.writes:
            write_piece(buffers, _written(write, places), piece, position)
    return exchange(crossing.arrive, buffers[1].reshape(crossing.arrive.source.local_shape), mesh)


def in_one_program(crossing: Crossing, local: Any, mesh: DeviceMesh) -> Any:
    """A crossing on a mesh of ``crossing.devices``, messages and all: what the verifier interprets."""
    pieces = leave(crossing, local, mesh)
    sent = [
        lax.ppermute(piece, mesh.names, move.pairs) if move.pairs else piece
        for move, piece in zip(crossing.moves, pieces, strict=True)
    ]
    return arrive(crossing, sent, mesh, local.dtype)


def _of(move: BoxMove, places: Sequence[int]) -> BoxMove:
    """``move`` as the devices at ``places`` see it."""
    return BoxMove(move.shape, move.source, tuple(move.starts[p] for p in places), move.pairs, move.writes)


def _written(write: Write, places: Sequence[int]) -> Write:
    return Write(write.buffer, write.join, tuple(write.starts[p] for p in places), tuple(write.active[p] for p in places))
