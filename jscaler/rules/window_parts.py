"""A windowed equation on one part: its operand with the rows around it, and the padding that is left."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import shape
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import Window, known
from jscaler.lax_primitives.primitive import Part
from jscaler.lax_primitives.windows import Sweep, scattered
from jscaler.rules.analysed import Analysis
from jscaler.rules.halo_reach import NONE, Wants
from jscaler.rules.neutral import neutral

Slid = Sequence[tuple[Window, int]]  # the windows of an equation whose index is split, and its leaf


class WindowedPart(Part, Protocol):
    """A part whose operands may be extended; ``wants`` says by leaf atom by how many rows, for windows that read them."""

    analysis: Analysis

    @property
    def wants(self) -> Mapping[int, Wants]: ...


def run_windowed(part: WindowedPart, eqn: core.JaxprEqn, values: Sequence[Any], params: dict[str, Any], slid: Slid) -> Any:
    """The result of a windowed equation on one part.

    Args:
        values: the operands' parts, extended by exactly the halo of each window.
        params: of the equation, as they are for a part but for its windows.
    """
    windows = known(eqn.primitive).windows
    assert windows is not None, eqn
    fills, sweeps = windows.fills(eqn), windows.sweeps(eqn)
    if windows.scatters:
        return _scattered(part, eqn, values, params, slid, sweeps, fills)
    padding = list(params["padding"])
    fitted = list(values)
    for window, leaf in slid:
        sweep = sweeps[window.number]
        padding[window.number] = sweep.padding
        for i, (dim, fill) in enumerate(zip(window.dims, fills, strict=True)):
            if dim is not None:
                fitted[i] = fit(part, eqn.invars[i], fitted[i], dim, leaf, (sweep.before, sweep.after), fill)
    return eqn.primitive.bind(*fitted, **params | {"padding": tuple(padding)})


def _scattered(
    part: WindowedPart,
    eqn: core.JaxprEqn,
    values: Sequence[Any],
    params: dict[str, Any],
    slid: Slid,
    sweeps: Sequence[Sweep],
    fills: Sequence[Combiner | None],
) -> Any:
    """All windows that read a row of the part, and of what they give back the part's own rows."""
    source, operand = values
    padding, crop = list(params["padding"]), [(0, 0, 0)] * len(sweeps)
    for window, leaf in slid:
        dim = window.number
        made, rows = scattered(sweeps[dim])
        source = fit(part, eqn.invars[0], source, dim, leaf, made, fills[0])
        operand = fit(part, eqn.invars[1], operand, dim, leaf, rows, fills[1])
        padding[dim] = (0, 0)
        crop[dim] = (-rows[0], -rows[1], 0)
    given = eqn.primitive.bind(source, operand, **params | {"padding": tuple(padding)})
    return lax.pad(given, jnp.zeros((), given.dtype), crop)


def fit(
    part: WindowedPart, atom: Any, value: Any, dim: int, leaf: int, reach: tuple[int, int], fill: Combiner | None
) -> Any:
    """Set what lies beyond the border of the whole to the padding value, and leave out rows that are not read."""
    if fill is None:  # the equation does not look beyond a part of it
        return value
    before, after = (max(0, r) for r in reach)
    if (before or after) and (fill != "add" or not zero_beyond(part, atom)):
        local = value.shape[dim] - before - after
        rows = part.index[leaf] * local - before + lax.iota(jnp.int32, value.shape[dim])
        inside = lax.broadcast_in_dim((rows >= 0) & (rows < shape(atom)[dim]), value.shape, (dim,))
        value = jnp.where(inside, value, neutral(fill, value.dtype))
    trimmed = tuple(min(0, r) for r in reach)
    if any(trimmed):
        value = lax.slice_in_dim(value, -trimmed[0], value.shape[dim] + trimmed[1], axis=dim)
    return value


def zero_beyond(part: WindowedPart, atom: Any) -> bool:
    """Whether an extended tensor is zero beyond the border: an operand of the op, or a cast of one."""
    makers = {v: eqn for eqn in part.analysis.jaxpr.eqns for v in eqn.outvars}
    while atom in makers and _is_zero_with_its_operand(makers[atom]):
        atom = makers[atom].invars[0]
    return atom not in makers


def _is_zero_with_its_operand(eqn: core.JaxprEqn) -> bool:
    """Whether each element is made of one element of one operand, and is zero where that is."""
    one = known(eqn.primitive)
    alike = len(eqn.invars) == 1 and math.prod(shape(eqn.invars[0])) == math.prod(shape(eqn.outvars[0]))
    return alike and one.by_row and bool(one.zero)


def crop(part: WindowedPart, atom: Any, value: Any, wanted: dict[int, Any]) -> Any:
    """An extended operand cut down to the rows that one reader wants; ``wanted`` is by leaf."""
    if not isinstance(atom, core.Var):
        return value
    for leaf, wants in part.wants.items():
        has, want = wants.get(atom, NONE), wanted.get(leaf, NONE)
        if has == want:
            continue
        dims = [d for d, leaves in enumerate(part.analysis.leaves(atom)) if leaf in leaves]
        for dim in dims:
            stop = value.shape[dim] - (has.after - want.after)
            value = lax.slice_in_dim(value, has.before - want.before, stop, axis=dim)
    return value
