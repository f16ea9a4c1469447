"""Specs of look-ups by index: gather, the scatters, dynamic slices.

Dims taken whole and batch dims pass. A dim of which one row at a time is looked up is a reduction: each part looks up
the rows that are its own and gives zero for the others (see ``lookups``); where a scatter writes to it, each part drops
the rows of others. An embedding's vocabulary is such a dim.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.lax import GatherScatterMode

from jscaler.ir.equations import dtype, shape
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import lookups
from jscaler.lax_primitives.lookups import window_sizes
from jscaler.lax_primitives.primitive import Primitive
from jscaler.lax_primitives.spec import Dims, Label, Spec, SpecFunction, dims


def gather(eqn: core.JaxprEqn) -> Spec:
    """Index dims and whole windows pass; dims looked up row by row are reduced."""
    numbers = eqn.params["dimension_numbers"]
    labels = _Labels(
        [shape(v) for v in (*eqn.invars, *eqn.outvars)], eqn.params["slice_sizes"], numbers.start_index_map,
        numbers.offset_dims, numbers.collapsed_slice_dims, numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )  # fmt: skip
    blocked = labels.blocked | _without_zero(eqn.invars[0], labels.looked)
    linear = "first" if _fills_linearly(eqn) else ""
    return Spec((labels.operand, labels.indices), (labels.windows,), joined(eqn.invars[0]), blocked, linear)


def joined(value: Any) -> Combiner:
    """How to join looked-up values, where all but one part give zero: flags by *or*."""
    return "max" if dtype(value) == np.dtype(bool) else "add"


def _without_zero(value: Any, labels: Sequence[Label]) -> dict[Label, str]:
    keys = jnp.issubdtype(dtype(value), jax.dtypes.extended)
    return dict.fromkeys(labels, "random keys are looked up, and no key is zero") if keys else {}


def _fills_linearly(eqn: core.JaxprEqn) -> bool:
    """Whether what lies outside is read as zero or as NaN, so that shares still add up."""
    if eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    return (jnp.issubdtype(dtype(eqn.invars[0]), jnp.inexact) and bool(np.isnan(fill))) or fill == 0


def scatter(combiner: Combiner | None, linear: str = "", based: bool = False) -> SpecFunction:
    """The transpose of gather. Dims written row by row stay split: each part drops the rows of others.

    Args:
        combiner: how what is written to one row is joined; index dims that the result lacks are reduced by it. None
            where it cannot be joined.
        based: whether what is written is added to the operand, which then must be zero for index dims to be split.
    """

    def spec(eqn: core.JaxprEqn) -> Spec:
        numbers = eqn.params["dimension_numbers"]
        labels = _Labels(
            [shape(v) for v in eqn.invars], window_sizes(eqn), numbers.scatter_dims_to_operand_dims,
            numbers.update_window_dims, numbers.inserted_window_dims, numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
        )  # fmt: skip
        kept = {label for dim in labels.operand for label in dim}
        reduced = [label for dim in labels.indices for label in dim if label not in kept]
        once = {} if combiner else dict.fromkeys(reduced, "two parts may write one element")
        sums = linear if linear != "unique" else "outer" if eqn.params["unique_indices"] else ""
        return Spec(
            (labels.operand, labels.indices, labels.windows), (labels.operand,), combiner or "add",
            once | labels.blocked, sums, 0 if based else None,
        )  # fmt: skip

    return spec


class _Labels:
    """Labels of (operand, indices, windows) of a look-up; the last index dim is the coordinate vector.

    ``looked`` are the operand's labels that are looked up row by row.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        sizes: Sequence[int],
        mapped: Sequence[int],
        offset: Sequence[int],
        collapsed: Sequence[int],
        operand_batch: Sequence[int],
        index_batch: Sequence[int],
    ):
        operand_shape, index_shape, window_shape = shapes
        self.blocked: dict[Label, str] = {}
        self.looked: list[Label] = []
        indices = list(dims(index_shape, [("i", i) for i in range(len(index_shape))]))
        if indices[-1]:
            self.blocked[indices[-1][0]] = "it holds the coordinates of a look-up"
        operand: list[tuple[Label, ...]] = []
        windows: list[tuple[Label, ...]] = []
        for i, size in enumerate(operand_shape):
            if i in operand_batch:
                operand.append(indices[index_batch[list(operand_batch).index(i)]])
                continue
            own = dims((size,), (("w", i),))[0]
            operand.append(own)
            if i in collapsed:
                self._look_up(own, i in mapped)
            elif sizes[i] == size:
                windows.append(own)
            else:
                window = dims((sizes[i],), (("part", i),))[0]
                self._look_up(own, sizes[i] == 1 and i in mapped)
                self.blocked.update(dict.fromkeys(window, "it is a window of a look-up"))
                windows.append(window)
        batch, rest = iter(indices[:-1]), iter(windows)
        self.operand: Dims = tuple(operand)
        self.indices: Dims = tuple(indices)
        self.windows: Dims = tuple(next(rest) if i in offset else next(batch) for i in range(len(window_shape)))

    def _look_up(self, own: tuple[Label, ...], by_row: bool) -> None:
        if by_row:
            self.looked += own
        else:
            self.blocked.update(dict.fromkeys(own, "windows of it, longer than a row, are looked up"))


def dynamic_slice(eqn: core.JaxprEqn) -> Spec:
    """Dims taken whole pass. Of others a part gives the elements of the window that it has, zero for the rest."""
    source, target = shape(eqn.invars[0]), shape(eqn.outvars[0])
    operand = dims(source, range(len(source)))
    result = dims(target, [i if n == m else ("window", i) for i, (n, m) in enumerate(zip(source, target, strict=True))])
    cut = [label for whole, own in zip(operand, result, strict=True) if whole != own for label in own]
    looked = [label for whole, own in zip(operand, result, strict=True) if whole != own for label in whole]
    blocked = dict.fromkeys(cut, "it is a window at a place that the program computes")
    blocked |= _without_zero(eqn.invars[0], looked)
    others = ((),) * (len(eqn.invars) - 1)
    return Spec((operand, *others), (result,), joined(eqn.invars[0]), blocked, linear="first")


def dynamic_update_slice(eqn: core.JaxprEqn) -> Spec:
    """Dims that are replaced whole pass; where a window is written, each part writes what is its own of it."""
    operand, update = shape(eqn.invars[0]), shape(eqn.invars[1])
    whole = dims(operand, range(len(operand)))
    window = dims(update, [i if n == m else ("window", i) for i, (n, m) in enumerate(zip(operand, update, strict=True))])
    cut = [label for mine, own in zip(whole, window, strict=True) if mine != own for label in own]
    positions = ((),) * (len(eqn.invars) - 2)
    blocked = dict.fromkeys(cut, "it is written to a place that the program computes")
    return Spec((whole, window, *positions), (whole,), blocked=blocked, linear="update")


def _scatter(name: str, spec: SpecFunction, **facts: Any) -> Primitive:
    return Primitive(name, spec, bound=lookups.scatter, data=lambda count: (0, 2), role="mixes", changes=True, **facts)


RECORDS = (
    Primitive(
        "dynamic_slice", dynamic_slice, bound=lookups.dynamic_slice, data=lambda count: (0,), role="mixes", cost="fused",
        picks=True, seen="moves",
    ),
    Primitive(
        "dynamic_update_slice", dynamic_update_slice, bound=lookups.dynamic_update_slice, data=lambda count: (0, 1),
        role="mixes", changes=True, seen="moves",
    ),
    Primitive(
        "gather", gather, bound=lookups.gather, data=lambda count: (0,), role="mixes", weight=60, cost="fused", picks=True,
        seen="moves",
    ),
    _scatter("scatter", scatter(None, "unique"), weight=58, seen="moves"),
    _scatter("scatter-add", scatter("add", "outer", based=True), weight=59, word="scatter_add"),
    _scatter("scatter-sub", scatter("add", "outer", based=True)),
    _scatter("scatter-mul", scatter(None)),
    _scatter("scatter-min", scatter("min")),
    _scatter("scatter-max", scatter("max")),
)  # fmt: skip
