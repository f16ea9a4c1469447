"""Transitions as ``lax`` collectives, inside ``jax.shard_map``: members in the order of the layout's axes.

A layout may lie on another mesh than the program's: coarser axes, another device order. ``members`` translates.

Between processes on CPUs XLA hands collectives to gloo, whose reduce-scatter waits for ever where a small one follows an
all-gather or a send (jaxlib 0.10.2, not 0.12: 64 KiB and less, every time), and takes longer than a *ring* (64 MiB by two
processes on two cores: 0.33 s, with 0.12 0.21 s, and 0.11 s): of n members each sends an n-th to the next, which adds its
own, n - 1 times. So sums go round one there; small ones are reduced to all, and each member takes its part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jscaler.ir.mask import Combiner
from jscaler.lower.emit_point_to_point import run_regions
from jscaler.lower.members import Members, axis_names, members, to_next
from jscaler.materialize import Adapter, DeviceMesh, Layout, Transition
from jscaler.materialize.transitions import moves, regions_between
from jscaler.rules.neutral import neutral

RING_FROM = 2**16  # bytes of a member's summand from which a ring is faster than an all-reduce
REDUCE: dict[Combiner, Callable[..., Any]] = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}  # between devices
REDUCE_LOCAL: dict[Combiner, Callable[..., Any]] = {"add": jnp.sum, "max": jnp.max, "min": jnp.min}  # on one device


def exchange(adapter: Adapter, local: Any, mesh: DeviceMesh, reduce_dtype: str | None = None, gloo: bool = False) -> Any:
    """Run an adapter on one device's part: view it refined, walk the path, view it back; copied from and to the host's
    memory where a layout says so.

    Args:
        local: the part, in the source's local shape.
        mesh: the mesh that the program runs over.
        reduce_dtype: the dtype in which value shares are added; by default the part's own.
        gloo: whether XLA hands collectives to gloo.
    """
    if reduce_dtype is not None and adapter.adds:
        return exchange(adapter, local.astype(reduce_dtype), mesh, gloo=gloo).astype(local.dtype)
    if adapter.source.memory == "host":  # collectives run in device memory
        local = jax.device_put(local, jax.memory.Space.Device)
    for stage in adapter.stages:
        local = _fit(local.reshape(stage.view), stage.start.local_sizes)
        for layout, step in zip(stage.layouts, stage.steps, strict=False):
            if step.to is not None:
                local = SEND[step.kind](local, layout, step, mesh)
            else:
                who = members(mesh, layout.mesh, step.axes)
                if gloo and step.kind == "reduce_scatter" and step.combiner == "add":
                    local = _scattered_by_gloo(local, step, who, mesh, to_next(mesh, layout.mesh, step.axes))
                else:
                    local = RUN[step.kind](local, step, who)
        local = _fit(local, stage.result)
    local = local.reshape(adapter.target.local_shape)
    return jax.device_put(local, jax.memory.Space.Host) if adapter.target.memory == "host" else local


def _fit(local: Any, sizes: tuple[int, ...]) -> Any:
    """Pad ``local`` with zeros, or crop it, at the end of each dim."""
    if any(s < size for s, size in zip(local.shape, sizes, strict=True)):
        local = jnp.pad(local, [(0, max(0, size - s)) for s, size in zip(local.shape, sizes, strict=True)])
    return local if local.shape == sizes else local[tuple(slice(size) for size in sizes)]


def _permute(local: Any, layout: Layout, step: Transition, mesh: DeviceMesh) -> Any:
    assert step.to is not None
    position = {d: i for i, d in enumerate(mesh.devices)}
    pairs = [(position[a], position[b]) for a, b in moves(layout, step.to).tolist()]
    if not pairs:
        return local
    stay = set(position.values()) - {b for _, b in pairs}
    return lax.ppermute(local, axis_names(mesh.names), pairs + [(p, p) for p in sorted(stay)])


def _point_to_point(local: Any, layout: Layout, step: Transition, mesh: DeviceMesh) -> Any:
    if jnp.issubdtype(local.dtype, jax.dtypes.prng_key):  # keys have no zero: send their words
        words = jnp.moveaxis(jax.random.key_data(local), -1, 0)
        sent = [_point_to_point(word, layout, step, mesh) for word in words]
        return jax.random.wrap_key_data(jnp.stack(sent, -1), impl=jax.random.key_impl(local))
    assert step.to is not None
    position = {d: i for i, d in enumerate(mesh.devices)}
    order = [position[d] for d in layout.mesh.devices]
    regions = regions_between(layout, step.to)
    (wanted,) = run_regions(regions, local.reshape(regions.shapes[0]), axis_names(mesh.names), order)
    return wanted.reshape(step.to.local_sizes)


def _dim(dim: int | None) -> int:
    assert dim is not None
    return dim


def _all_reduce(local: Any, step: Transition, who: Members) -> Any:
    if local.dtype == jnp.bool_:  # reduced as counts: a sum of booleans is their "or"
        return REDUCE[step.combiner](local.astype(jnp.int32), **who.over).astype(jnp.bool_)
    return REDUCE[step.combiner](local, **who.over)


def _all_gather(local: Any, step: Transition, who: Members) -> Any:
    return lax.all_gather(local, **who.over, axis=_dim(step.source), tiled=True)


def _reduce_scatter(local: Any, step: Transition, who: Members) -> Any:
    target = _dim(step.target)
    if step.combiner == "add" and local.dtype == jnp.bool_:
        return _reduce_scatter(local.astype(jnp.int32), step, who).astype(jnp.bool_)
    if step.combiner == "add":
        return lax.psum_scatter(local, **who.over, scatter_dimension=target, tiled=True)
    # XLA scatters sums only: exchange the shares' blocks, as many bytes, and join what arrives
    parts = (who.size, local.shape[target] // who.size)
    blocks = local.reshape(*local.shape[:target], *parts, *local.shape[target + 1 :])
    arrived = lax.all_to_all(blocks, **who.over, split_axis=target, concat_axis=target, tiled=True)
    return REDUCE_LOCAL[step.combiner](arrived, axis=target)


def _scattered_by_gloo(
    local: Any, step: Transition, who: Members, mesh: DeviceMesh, pairs: Sequence[tuple[int, int]]
) -> Any:
    """A reduce-scatter of sums: that of block i begins at the member behind member i, and ends there. Small ones as above.

    Args:
        pairs: from each member to the next, as positions in ``mesh``.
    """
    if local.dtype == jnp.bool_:
        return _scattered_by_gloo(local.astype(jnp.int32), step, who, mesh, pairs).astype(jnp.bool_)
    if local.nbytes < RING_FROM:
        return _slice(_all_reduce(local, step, who), step, who)
    target = _dim(step.target)
    index, size = who.index(), local.shape[target] // who.size

    def block(number: Any) -> Any:
        return lax.dynamic_slice_in_dim(local, number % who.size * size, size, axis=target, allow_negative_indices=False)

    def hop(number: Any, total: Any) -> Any:
        return lax.ppermute(total, axis_names(mesh.names), pairs) + block(index - number)

    return lax.fori_loop(2, who.size + 1, hop, block(index - 1))  # written out, it takes XLA more than twice as long


def _all_to_all(local: Any, step: Transition, who: Members) -> Any:
    return lax.all_to_all(local, **who.over, split_axis=_dim(step.target), concat_axis=_dim(step.source), tiled=True)


def _slice(local: Any, step: Transition, who: Members) -> Any:
    dim = _dim(step.target)
    size = local.shape[dim] // who.size
    return lax.dynamic_slice_in_dim(local, who.index() * size, size, axis=dim, allow_negative_indices=False)


def _value_mask(local: Any, step: Transition, who: Members) -> Any:
    """The first member keeps the value; the others hold what leaves it unchanged."""
    return jnp.where(who.index() == 0, local, neutral(step.combiner, local.dtype))


SEND: dict[str, Callable[[Any, Layout, Transition, DeviceMesh], Any]] = {
    "permute": _permute,
    "point_to_point": _point_to_point,
}
RUN: dict[str, Callable[[Any, Transition, Members], Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "value_mask": _value_mask,
}
