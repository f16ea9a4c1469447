"""Transitions as ``lax`` collectives, inside ``jax.shard_map``. Members follow the mesh's order, axis tuples theirs."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jscaler.ir.mask import Combiner
from jscaler.lower.program import Adapt
from jscaler.materialize import Layout, Transition

REDUCE: dict[Combiner, Callable[..., Any]] = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}


def exchange(adapt: Adapt, local: Any) -> Any:
    """Run an adapter on one device's part: view it refined, walk the path, view it back."""
    for start, path in adapt.stages:
        local = local.reshape(start.local_sizes)
        layout = start
        for step in path:
            local = RUN[step.kind](local, step, layout)
            layout = step.apply(layout)
    return local.reshape(adapt.target.local_shape)


def axis_names(axes: tuple[str, ...]) -> Any:
    """Axis names as ``lax`` takes them: one by itself, several as a tuple."""
    return axes[0] if len(axes) == 1 else axes


def _dim(dim: int | None) -> int:
    assert dim is not None
    return dim


def _axes(step: Transition) -> Any:
    return axis_names(step.axes)


def _all_reduce(local: Any, step: Transition, layout: Layout) -> Any:
    if local.dtype == jnp.bool_ and step.combiner != "add":  # no maximum of booleans between devices
        return REDUCE[step.combiner](local.astype(jnp.uint8), _axes(step)).astype(jnp.bool_)
    return REDUCE[step.combiner](local, _axes(step))


def _all_gather(local: Any, step: Transition, layout: Layout) -> Any:
    return lax.all_gather(local, _axes(step), axis=_dim(step.source), tiled=True)


def _reduce_scatter(local: Any, step: Transition, layout: Layout) -> Any:
    return lax.psum_scatter(local, _axes(step), scatter_dimension=_dim(step.target), tiled=True)


def _all_to_all(local: Any, step: Transition, layout: Layout) -> Any:
    return lax.all_to_all(local, _axes(step), split_axis=step.target, concat_axis=_dim(step.source), tiled=True)


def _slice(local: Any, step: Transition, layout: Layout) -> Any:
    dim = _dim(step.target)
    size = local.shape[dim] // layout.mesh.size(step.axes)
    return lax.dynamic_slice_in_dim(local, lax.axis_index(_axes(step)) * size, size, axis=dim)


def _value_mask(local: Any, step: Transition, layout: Layout) -> Any:
    """The first member keeps the value; the others hold what leaves it unchanged."""
    return jnp.where(lax.axis_index(_axes(step)) == 0, local, _neutral(step.combiner, local.dtype))


def _neutral(combiner: Combiner, dtype: Any) -> Any:
    if combiner == "add":
        return jnp.zeros((), dtype)
    low = combiner == "max"
    if dtype == jnp.bool_:
        return jnp.asarray(not low)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(-math.inf if low else math.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if low else limits.max, dtype)


RUN: dict[str, Callable[[Any, Transition, Layout], Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "value_mask": _value_mask,
}
