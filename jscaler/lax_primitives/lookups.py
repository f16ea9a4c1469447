"""Look-ups in a part: each part looks up the rows that are its own; the others give nothing.

So a split vocabulary makes an embedding a sum over parts, and its gradient a scatter in which each part drops what is
not its own. Positions outside the whole are dealt with first, as the mode says; what fills them is given by the first
part alone.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.lax import GatherScatterMode

from jscaler.ir.equations import shape
from jscaler.lax_primitives.primitive import Part


def gather(part: Part, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    operand = eqn.invars[0]
    numbers, mode, sizes = (eqn.params[k] for k in ("dimension_numbers", "mode", "slice_sizes"))
    local_sizes = tuple(
        local if size == whole else size
        for size, whole, local in zip(sizes, shape(operand), part.shape(operand), strict=True)
    )
    looked = _split_columns(part, operand, numbers.start_index_map, sizes)
    if not looked:
        return [eqn.primitive.bind(*values, **dict(eqn.params, slice_sizes=local_sizes))]
    most = [shape(operand)[d] - sizes[d] for d in numbers.start_index_map]
    columns, inside = _inside(values[1], most)
    columns, mine = _own_rows(part, operand, columns, looked)
    params = dict(eqn.params, slice_sizes=local_sizes, mode=GatherScatterMode.CLIP, indices_are_sorted=False)
    found = eqn.primitive.bind(values[0], jnp.stack(columns, -1), **params)
    batch = tuple(d for d in range(len(found.shape)) if d not in numbers.offset_dims)

    def over_windows(flags: Any) -> Any:
        return lax.broadcast_in_dim(flags, found.shape, batch)

    nothing = jnp.zeros_like(found)
    if mode == GatherScatterMode.FILL_OR_DROP:
        first = jnp.all(jnp.stack([part.index[leaf] == 0 for leaf in _leaves(part, operand, looked)]))
        filled = jnp.where(first, jnp.full_like(found, eqn.params["fill_value"]), nothing)
        nothing = jnp.where(over_windows(inside), nothing, filled)
        mine = mine & inside
    return [jnp.where(over_windows(mine), found, nothing)]


def scatter(part: Part, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    operand = eqn.invars[0]
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    sizes = window_sizes(eqn)
    looked = _split_columns(part, operand, numbers.scatter_dims_to_operand_dims, sizes)
    if not looked and part.sizes:  # the padding of a smaller part writes nothing, but to a place that others write to
        return part.bind(eqn, values, indices_are_sorted=False, unique_indices=False)
    if not looked:
        return part.bind(eqn, values)
    most = [shape(operand)[d] - sizes[d] for d in numbers.scatter_dims_to_operand_dims]
    columns, inside = _inside(values[1], most)
    columns, mine = _own_rows(part, operand, columns, looked)
    if mode != GatherScatterMode.CLIP:
        mine = mine & inside
    outside = [jnp.where(mine, c, jnp.asarray(-1, c.dtype)) for c in columns]
    return part.bind(
        eqn, [values[0], jnp.stack(outside, -1), values[2]], mode=GatherScatterMode.FILL_OR_DROP, indices_are_sorted=False,
        unique_indices=False,
    )  # fmt: skip


def window_sizes(eqn: core.JaxprEqn) -> tuple[int, ...]:
    """Per operand dim of a scatter, the size of the window that is written."""
    numbers, updates = eqn.params["dimension_numbers"], shape(eqn.invars[2])
    without = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = iter(numbers.update_window_dims)
    return tuple(1 if d in without else updates[next(windows)] for d in range(len(shape(eqn.invars[0]))))


def _split_columns(part: Part, operand: Any, dims: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Index column -> operand dim, for the dims that are looked up and split."""
    local, whole = part.shape(operand), shape(operand)
    return {k: d for k, d in enumerate(dims) if local[d] != whole[d] and sizes[d] != whole[d]}


def _leaves(part: Part, operand: Any, looked: dict[int, int]) -> list[int]:
    leaves = part.leaves_of(operand)
    return [leaf for d in looked.values() for leaf in leaves[d] if leaf in part.index]


def _inside(indices: Any, most: Sequence[int]) -> tuple[list[Any], Any]:
    """The columns of an index array clamped to the whole, as int32 or wider; and which rows were inside."""
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    columns, inside = [], jnp.ones(indices.shape[:-1], bool)
    for k, limit in enumerate(most):
        column = indices[..., k]
        top = jnp.asarray(min(limit, jnp.iinfo(column.dtype).max), column.dtype)
        clamped = jnp.clip(column, jnp.zeros_like(top), top)
        inside = inside & (clamped == column)
        columns.append(clamped.astype(wide))
    return columns, inside


def _own_rows(part: Part, operand: Any, columns: list[Any], looked: dict[int, int]) -> tuple[list[Any], Any]:
    """The columns as positions in this part, and which rows lie in it."""
    mine = jnp.ones(columns[0].shape, bool)
    columns = list(columns)
    for k, dim in looked.items():
        columns[k], here = part.locate(operand, dim, columns[k])
        mine = mine & here
    return columns, mine


def dynamic_slice(part: Part, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """A part gives the elements of the window that are its own, zero for the others."""
    operand: Any = eqn.invars[0]
    out = eqn.outvars[0]
    sizes = part.shape(out)
    if _windows_whole(part, operand, shape(out)):
        return [eqn.primitive.bind(*values, **dict(eqn.params, slice_sizes=sizes))]
    result = values[0]
    for dim, (whole, size) in enumerate(zip(shape(operand), shape(out), strict=True)):
        if whole == size:
            continue
        start = _clamped(values[1 + dim], whole - size)
        if part.shape(operand)[dim] == whole:
            result = lax.dynamic_slice_in_dim(result, start, size, dim, allow_negative_indices=False)
            continue
        place, mine = part.locate(operand, dim, start + lax.iota(start.dtype, size))
        result = jnp.take(result, place, axis=dim, mode="clip")
        mine = lax.broadcast_in_dim(mine, result.shape, (dim,))
        result = jnp.where(mine, result, jnp.zeros_like(result))
    return [result]


def dynamic_update_slice(part: Part, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """A part writes the elements of the window that are its own."""
    operand: Any = eqn.invars[0]
    if _windows_whole(part, operand, shape(eqn.invars[1])):
        return [eqn.primitive.bind(*values, **eqn.params)]
    local, update, written = part.shape(operand), values[1], jnp.ones((), bool)
    for dim, (whole, size) in enumerate(zip(shape(operand), shape(eqn.invars[1]), strict=True)):
        if whole == size:
            continue
        start = _clamped(values[2 + dim], whole - size)
        place = part.positions(operand, dim, start.dtype) - start
        update = jnp.take(update, place, axis=dim, mode="clip")
        written = written & lax.broadcast_in_dim((place >= 0) & (place < size), local, (dim,))
    return [jnp.where(written, update, values[0])]


def _windows_whole(part: Part, operand: Any, window: Sequence[int]) -> bool:
    """Whether no dim is split of which a window is taken."""
    return all(
        whole in (local, size) for whole, local, size in zip(shape(operand), part.shape(operand), window, strict=True)
    )


def _clamped(start: Any, most: int) -> Any:
    start = jnp.asarray(start)
    wide = jnp.int64 if start.dtype.itemsize == 8 else jnp.int32
    top = jnp.asarray(min(most, jnp.iinfo(start.dtype).max), start.dtype)
    return jnp.clip(start, jnp.zeros_like(top), top).astype(wide)
