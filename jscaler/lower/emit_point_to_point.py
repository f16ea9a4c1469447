"""``PointToPoint`` as ``lax`` operations, inside ``jax.shard_map``: slice a piece, ``ppermute`` it, write it.

Every device runs the same operations. Where its piece lies, it looks up in a small constant table; a device that has
no part in a round writes back what stands there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jscaler.ir.mask import Combiner
from jscaler.materialize.point_to_point import BoxMove, Fill, PointToPoint, Write
from jscaler.rules.neutral import neutral

JOIN: dict[Combiner, Callable[[Any, Any], Any]] = {"add": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def run_regions(
    regions: PointToPoint, local: Array, axis_names: str | tuple[str, ...], order: Sequence[int] | None = None
) -> tuple[Array, ...]:
    """What each consumer wants of one device, from what the device holds.

    Args:
        regions: from ``plan_regions``.
        local: what the device holds, in the shape ``regions.shapes[0]``; devices that hold nothing pass anything.
        axis_names: all mesh axes, major first, as the mesh has them; their flat index is the device's place.
        order: for each position of ``regions`` the place of its device; by default they are the same.

    Returns:
        One buffer per consumer, in the shapes ``regions.shapes[1:]``. Zeros beyond the device's own part.

    Example:
        >>> run = jax.shard_map(lambda x: run_regions(regions, x, ("x",))[0], mesh=mesh, in_specs=P("x"),
        ...                     out_specs=P("x"), check_vma=False)  # doctest: +SKIP
    """
    assert local.shape == regions.shapes[0], f"{local.shape} is not the shape of what is held, {regions.shapes[0]}"
    position = lax.axis_index(axis_names)
    places = list(order) if order is not None else list(range(regions.num_devices))
    if places != sorted(places):
        position = _row(np.argsort(places).astype(np.int32).tolist(), position)
    buffers = [local.reshape(regions.views[0]), *(jnp.zeros(view, local.dtype) for view in regions.views[1:])]
    for fill in regions.fills:
        write_piece(buffers, fill.write, filled(fill, local.dtype), position)
    for move in (*regions.copies, *regions.rounds):
        piece = read_piece(buffers[move.source], move, position)
        if move.pairs:
            piece = lax.ppermute(piece, axis_names, [(places[a], places[b]) for a, b in move.pairs])
        for write in move.writes:
            write_piece(buffers, write, piece, position)
    return tuple(b.reshape(shape) for b, shape in zip(buffers[1:], regions.shapes[1:], strict=True))


def filled(fill: Fill, dtype: Any) -> Array:
    """What a fill writes."""
    return jnp.full(fill.shape, neutral(fill.combiner, dtype), dtype)


def read_piece(buffer: Array, move: BoxMove, position: Array) -> Array:
    """This device's piece of ``move``, out of the buffer that it reads."""
    return lax.dynamic_slice(buffer, _start(move.starts, position), move.shape, allow_negative_indices=False)


def write_piece(buffers: list[Array], write: Write, piece: Array, position: Array) -> None:
    """Write a piece where the device has a part in it."""
    start = _start(write.starts, position)
    buffer = buffers[write.buffer]
    if write.join != "set" or not all(write.active):
        before = lax.dynamic_slice(buffer, start, piece.shape, allow_negative_indices=False)
        after = piece if write.join == "set" else JOIN[write.join](before, piece)
        piece = after if all(write.active) else jnp.where(_row(write.active, position), after, before)
    if piece.shape != buffer.shape:
        piece = lax.dynamic_update_slice(buffer, piece, start, allow_negative_indices=False)
    buffers[write.buffer] = piece


def _start(starts: Sequence[tuple[int, ...]], position: Array) -> Any:
    """This device's row; plain numbers where all rows are equal."""
    if len(set(starts)) == 1:
        return starts[0]
    row = _row(starts, position)
    return [row[i] for i in range(len(starts[0]))]


def _row(table: Sequence[Any], position: Array) -> Array:
    return lax.dynamic_index_in_dim(jnp.asarray(np.array(table)), position, keepdims=False, allow_negative_indices=False)
