"""How far beyond its own part each tensor of a fragment is needed, when an index is split that windows slide along.

A windowed equation wants rows around its part. What makes them elementwise is computed on these rows too, so the want
passes on to what that reads, down to the op's operands, which come extended. (What lies beyond the border of the whole
is set to the padding value in front of the windows.) A want cannot pass anything else: there the op must be cut.
"""

from collections.abc import Iterator, Sequence

from jax.extend import core

from jscaler.ir import Halo
from jscaler.lax_primitives import Spec, Window, known
from jscaler.rules.analysed import Analysis

NONE = Halo(0, 0)
INSIDE = "its parts do not lie in a row, as overlapping windows want them"
Wants = dict[core.Var, Halo]


def wants(analysis: Analysis, leaf: int) -> Wants | str:
    """The rows that are needed of each tensor beyond its part when ``leaf`` is split; those not named need none.

    Returns:
        The wants, or why they cannot be met.
    """
    found: Wants = {}
    if leaf not in slid_along(analysis):
        return found
    for eqn, spec in reversed(list(zip(analysis.jaxpr.eqns, analysis.specs, strict=True))):
        own = NONE
        for var in eqn.outvars:
            own |= found.get(var, NONE)
        window = window_of(analysis, eqn, spec, leaf)
        if own and (window is not None or not known(eqn.primitive).by_row):
            return f"at {eqn.primitive.name} what is read through a window is made of other rows"
        reads = window.halos if window is not None else (own,) * len(eqn.invars)
        for atom, want in zip(eqn.invars, reads, strict=True):
            if not want or not isinstance(atom, core.Var):
                continue
            dims = [dim for dim in analysis.leaves(atom) if leaf in dim]
            if any(dim[0] != leaf for dim in dims):
                return INSIDE
            if dims:
                found[atom] = found.get(atom, NONE) | want
    return found


def window_of(analysis: Analysis, eqn: core.JaxprEqn, spec: Spec, leaf: int) -> Window | None:
    """The window of an equation that slides along ``leaf``, if one does."""
    return next((window for window, _, leaves, _ in _slides(analysis, eqn, spec) if leaf in leaves), None)


def _slides(analysis: Analysis, eqn: core.JaxprEqn, spec: Spec) -> Iterator[tuple[Window, core.Var, tuple[int, ...], Halo]]:
    """Each window of an equation with each operand that it slides along: on which leaves, and what it reads around them."""
    for window in spec.windows:
        for atom, dim, halo in zip(eqn.invars, window.dims, window.halos, strict=True):
            if dim is not None and isinstance(atom, core.Var):
                yield window, atom, analysis.leaves(atom)[dim], halo


def read_around(analysis: Analysis, eqn: core.JaxprEqn, spec: Spec, group: Sequence[int]) -> list[core.Var]:
    """The operands of which an equation reads rows beyond a part when ``group`` is split."""
    return [v for _, v, leaves, halo in _slides(analysis, eqn, spec) if halo and {*group} & {*leaves}]


def overlapped(analysis: Analysis, leaf: int) -> bool:
    """Whether windows overlap along the dim of which ``leaf`` is an inner part: its parts do not lie in a row."""
    for eqn, spec in zip(analysis.jaxpr.eqns, analysis.specs, strict=True):
        for var in read_around(analysis, eqn, spec, (leaf,)):
            if any(leaf in dim[1:] for dim in analysis.leaves(var)):
                return True
    return False


def slid_along(analysis: Analysis) -> frozenset[int]:
    """The leaves that some equation's windows slide along."""
    each = zip(analysis.jaxpr.eqns, analysis.specs, strict=True)
    return frozenset(leaf for eqn, spec in each for _, _, leaves, _ in _slides(analysis, eqn, spec) for leaf in leaves)


def operand_halos(analysis: Analysis, group: Sequence[int]) -> dict[tuple[int, int], Halo] | str:
    """For each operand and dim of the op the rows it needs beyond a part when ``group`` is split, or why it cannot be."""
    halos: dict[tuple[int, int], Halo] = {}
    for leaf in group:
        found = wants(analysis, leaf)
        if isinstance(found, str):
            return found
        for index, var in enumerate(analysis.jaxpr.invars):
            for dim, leaves in enumerate(analysis.leaves(var)):
                if leaf in leaves and found.get(var):
                    halos[index, dim] = found[var]
    return halos
