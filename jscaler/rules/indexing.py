"""Specs of gather and scatter-add: batch dims, window dims taken whole, and looked-up dims (blocked)."""

from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.lax import GatherScatterMode

from jscaler.capture.jaxprs import dtype, shape
from jscaler.rules.table import Dims, Label, Spec, dims


def gather(eqn: core.JaxprEqn) -> Spec:
    """Index dims and whole windows pass; the dims that are looked up are blocked."""
    numbers = eqn.params["dimension_numbers"]
    operand_shape, index_shape, out_shape = (shape(v) for v in (*eqn.invars, *eqn.outvars))
    sizes = eqn.params["slice_sizes"]
    operand, indices, result, blocked = _window_labels(
        operand_shape, index_shape, out_shape, sizes, numbers.offset_dims, numbers.collapsed_slice_dims,
        numbers.operand_batching_dims, numbers.start_indices_batching_dims,
    )  # fmt: skip
    return Spec((operand, indices), (result,), blocked=blocked, linear="first" if _fills_linearly(eqn) else "")


def _fills_linearly(eqn: core.JaxprEqn) -> bool:
    """Whether what lies outside is read as zero (or as NaN), so that shares still add up."""
    if eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    return fill == 0 if fill is not None else jnp.issubdtype(dtype(eqn.invars[0]), jnp.inexact)


def scatter_add(eqn: core.JaxprEqn) -> Spec:
    """The transpose of gather: index dims that the result lacks are summed, if what is added to is zero."""
    numbers = eqn.params["dimension_numbers"]
    operand_shape, index_shape, update_shape = (shape(v) for v in eqn.invars)
    window = [
        i for i in range(len(operand_shape))
        if i not in numbers.inserted_window_dims and i not in numbers.operand_batching_dims
    ]  # fmt: skip
    sizes = [1] * len(operand_shape)
    for dim, place in zip(window, numbers.update_window_dims, strict=True):
        sizes[dim] = update_shape[place]
    operand, indices, updates, blocked = _window_labels(
        operand_shape, index_shape, update_shape, sizes, numbers.update_window_dims, numbers.inserted_window_dims,
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims,
    )  # fmt: skip
    return Spec((operand, indices, updates), (operand,), blocked=blocked, linear="add", base=0)


def _window_labels(
    operand_shape: tuple[int, ...],
    index_shape: tuple[int, ...],
    window_shape: tuple[int, ...],
    sizes: Any,
    offset: Any,
    collapsed: Any,
    operand_batch: Any,
    index_batch: Any,
) -> tuple[Dims, Dims, Dims, dict[Label, str]]:
    """Labels of (operand, indices, gathered windows); the last index dim is the coordinate vector."""
    blocked: dict[Label, str] = {}
    index_names: list[Any] = [("i", i) for i in range(len(index_shape))]
    indices = list(dims(index_shape, index_names))
    indices[-1] = ()
    if index_shape[-1] > 1:
        label = ("coordinate", index_shape[-1])
        indices[-1] = (label,)
        blocked[label] = "it holds the coordinates of a look-up"
    operand: list[tuple[Label, ...]] = []
    windows: list[tuple[Label, ...]] = []
    for i, size in enumerate(operand_shape):
        if i in operand_batch:
            operand.append(indices[index_batch[list(operand_batch).index(i)]])
            continue
        whole = i not in collapsed and sizes[i] == size
        own = dims((size,), (("w", i),))[0]
        if not whole:
            blocked.update(dict.fromkeys(own, "it is looked up by index"))
        operand.append(own)
        if i not in collapsed:
            part = own if whole else dims((sizes[i],), (("part", i),))[0]
            blocked.update({label: "it is a window of a look-up" for label in part if not whole})
            windows.append(part)
    batch = iter(indices[:-1])
    rest = iter(windows)
    result = tuple(next(rest) if i in offset else next(batch) for i in range(len(window_shape)))
    return tuple(operand), tuple(indices), result, blocked
