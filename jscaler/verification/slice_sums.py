"""Carries of a scan to whose slices each iteration adds: found, and proven to be a sum of stacks.

::

    carry ──┬─► its slice i ──► + piece ──► slice i of the carry, in its place          i = 0, 1, … (or from the end)
            └───────────────────────────────────┴──► carry          ═►     carry + stack of the pieces
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.extend import core

from jscaler.capture.inner_jaxprs import ScanParts
from jscaler.capture.jaxprs import Atom, shape


@dataclass(frozen=True)
class SliceSum:
    """A carry that is a sum of stacks.

    Attributes:
        carry: its number.
        counter: the number of the carry that counts iterations.
        piece: what an iteration adds to its slice.
    """

    carry: int
    counter: int
    piece: Atom


def slice_sums(parts: ScanParts, reverse: bool) -> list[SliceSum]:
    """The carries that are sums of stacks if their counter begins with the first iteration's slice."""
    first, body = len(parts.consts), parts.body
    carried = body.invars[first : first + len(parts.inits)]
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    often: dict[core.Var, int] = {}
    for atom in (*(a for eqn in body.eqns for a in eqn.invars), *body.outvars):
        if isinstance(atom, core.Var):
            often[atom] = often.get(atom, 0) + 1
    counters = {
        v: number
        for number, v in enumerate(carried)
        if _named(made, body.outvars[number], "sub" if reverse else "add", v, 1)
    }
    found = (_sum(number, v, body.outvars[number], made, counters) for number, v in enumerate(carried) if often.get(v) == 2)
    return [one for one in found if one is not None]


def _sum(
    number: int, total: core.Var, after: Atom, made: Mapping[core.Var, core.JaxprEqn], counters: Mapping[core.Var, int]
) -> SliceSum | None:
    write = _eqn(made, after, "dynamic_update_slice")
    added = _eqn(made, write.invars[1], "add") if write is not None else None
    read, spread = (
        (_eqn(made, added.invars[0], "dynamic_slice"), _eqn(made, added.invars[1], "broadcast_in_dim"))
        if added is not None
        else (None, None)
    )
    if write is None or read is None or spread is None or not write.invars[0] is read.invars[0] is total:
        return None
    (piece,) = spread.invars
    one, rank = (1, *shape(total)[1:]), len(shape(total))
    at = [(eqn.invars[start], eqn.invars[start + 1 :]) for eqn, start in ((read, 1), (write, 2))]
    in_front = all(_is_zero(a) for _, rest in at for a in rest)
    counter = at[0][0]
    if (
        not isinstance(counter, core.Var) or at[1][0] is not counter or counter not in counters or not in_front
        or read.params["slice_sizes"] != one or shape(piece) != one[1:]
        or tuple(spread.params["broadcast_dimensions"]) != tuple(range(1, rank))
    ):  # fmt: skip
        return None
    return SliceSum(number, counters[counter], piece)


def _eqn(made: Mapping[core.Var, core.JaxprEqn], atom: Atom, name: str) -> core.JaxprEqn | None:
    eqn = made.get(atom) if isinstance(atom, core.Var) else None
    return eqn if eqn is not None and eqn.primitive.name == name else None


def _named(made: Mapping[core.Var, core.JaxprEqn], atom: Atom, name: str, operand: core.Var, literal: int) -> bool:
    """Whether ``atom`` is ``name`` of a variable and a literal."""
    eqn = _eqn(made, atom, name)
    return eqn is not None and eqn.invars[0] is operand and isinstance(eqn.invars[1], core.Literal) and (
        eqn.invars[1].val == literal
    )  # fmt: skip


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, core.Literal) and np.ndim(atom.val) == 0 and atom.val == 0
