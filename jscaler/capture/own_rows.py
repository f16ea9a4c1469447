"""Look-ups of each row in itself: ``logits[jnp.arange(n), labels]`` becomes a look-up that is batched over the rows.

jnp writes a row's number as an index like any other, so that a device with some of the rows would want them all:

    gather of (n, c) at (row, label), where row is an iota, or a constant that counts  ─►  per row: gather of (c,) at label

The same for what is written so, ``x.at[jnp.arange(n), labels].add(…)``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import Atom, Program, map_programs, open_jaxpr, shape

# of a look-up's dimension numbers: the operand's dims that are looked up, those of one row, and the batched pairs
GATHER = ("start_index_map", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims")
SCATTER = (
    "scatter_dims_to_operand_dims",
    "inserted_window_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)
INDICES = frozenset(map(np.dtype, ("int32", "int64", "uint32", "bool")))  # of constants that are looked at


def own_rows(eqns: Sequence[core.JaxprEqn], constants: Iterable[tuple[core.Var, Any]] = ()) -> list[list[core.JaxprEqn]]:
    """For each of ``eqns`` the equations that stand for it, mostly itself; also in the programs that equations hold."""
    known = [(var, np.asarray(value)) for var, value in constants if getattr(value, "dtype", object) in INDICES]
    seen = _Counts({var: 0 for var, value in known if value.ndim == 1 and (value == np.arange(len(value))).all()})
    seen.false.update(var for var, value in known if value.dtype == bool and not value.any())
    return [seen.add(eqn) for eqn in eqns]


class _Counts:
    """What is known of the values of one program: which count along a dim, and which are false everywhere."""

    def __init__(self, along: dict[core.Var, int]):
        self.along = along
        self.false: set[core.Var] = set()
        self.columns: dict[core.Var, core.JaxprEqn] = {}  # index vectors, put together

    def add(self, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
        """Learn from ``eqn``, which may be written anew."""
        look = _LEARN.get(eqn.primitive.name)
        if look is not None:
            look(self, eqn)
        names = GATHER if eqn.primitive.name == "gather" else SCATTER if eqn.primitive.name.startswith("scatter") else None
        if names is not None and eqn.invars[1] in self.columns:
            return self.by_row(eqn, names)
        params = {name: map_programs(_in_program, value) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return [eqn.replace(params=params) if changed else eqn]

    def dim(self, atom: Atom) -> int | None:
        """The dim along which ``atom`` counts."""
        return self.along.get(atom) if isinstance(atom, core.Var) else None

    def note_counter(self, counted: Any, dim: int) -> None:
        """``counted`` has each row's number, if its type has that many numbers: others begin again at their least."""
        dtype, last = np.dtype(getattr(counted.aval, "dtype")), shape(counted)[dim] - 1  # noqa: B009
        if jnp.issubdtype(dtype, np.integer) and last <= jnp.iinfo(dtype).max:
            self.along[counted] = dim

    def iota(self, eqn: core.JaxprEqn) -> None:
        self.note_counter(eqn.outvars[0], eqn.params["dimension"])

    def compare(self, eqn: core.JaxprEqn) -> None:
        """``i < 0``, by which jnp asks whether an index counts from the end."""
        counted, bound = eqn.invars
        if self.dim(counted) is not None and isinstance(bound, core.Literal) and np.all(np.asarray(bound.val) <= 0):
            self.false.add(eqn.outvars[0])

    def choose(self, eqn: core.JaxprEqn) -> None:
        which, first, *_ = eqn.invars
        if isinstance(which, core.Var) and which in self.false:
            self.same(eqn, first)

    def same(self, eqn: core.JaxprEqn, operand: Atom | None = None) -> None:
        dim = self.dim(eqn.invars[0] if operand is None else operand)
        if dim is not None:
            self.note_counter(eqn.outvars[0], dim)

    def broadcast(self, eqn: core.JaxprEqn) -> None:
        dim = self.dim(eqn.invars[0])
        if dim is not None:
            to = eqn.params["broadcast_dimensions"][dim]
            if shape(eqn.outvars[0])[to] == shape(eqn.invars[0])[dim]:
                self.along[eqn.outvars[0]] = to

    def join(self, eqn: core.JaxprEqn) -> None:
        if eqn.params["dimension"] == len(shape(eqn.outvars[0])) - 1 and all(shape(v)[-1] == 1 for v in eqn.invars):
            self.columns[eqn.outvars[0]] = eqn

    def by_row(self, eqn: core.JaxprEqn, names: Sequence[str]) -> list[core.JaxprEqn]:
        """A look-up without the indices that are rows' own numbers; as it is, if there are none."""
        numbers, joined = eqn.params["dimension_numbers"], self.columns[eqn.invars[1]]  # type: ignore[index]
        mapped, single, batched, of_index = (tuple(getattr(numbers, name)) for name in names)
        pairs, kept = list(zip(batched, of_index, strict=True)), []
        for dim, column in zip(mapped, joined.invars, strict=True):
            row = self.dim(column)
            taken = row == len(shape(column)) - 1 or row in {r for _, r in pairs}
            if row is None or taken or dim not in single or shape(column)[row] != shape(eqn.invars[0])[dim]:
                kept.append((dim, column))
            else:
                pairs.append((dim, row))
        if len(kept) == len(mapped) or not kept:
            return [eqn]
        gone = {dim for dim, _ in pairs}
        pairs.sort()
        of = (
            tuple(dim for dim, _ in kept),
            tuple(dim for dim in single if dim not in gone),
            tuple(dim for dim, _ in pairs),
            tuple(row for _, row in pairs),
        )
        new = numbers._replace(**dict(zip(names, of, strict=True)))
        params = {**eqn.params, "dimension_numbers": new, "indices_are_sorted": False}
        made, column = [], kept[0][1]
        if len(kept) > 1:
            out = joined.outvars[0].aval
            column = core.Var(out.update(shape=(*shape(joined.outvars[0])[:-1], len(kept))))
            made = [joined.replace(invars=[column for _, column in kept], outvars=[column])]
        return [*made, eqn.replace(invars=[eqn.invars[0], column, *eqn.invars[2:]], params=params)]


_LEARN: Mapping[str, Any] = {
    "iota": _Counts.iota,
    "lt": _Counts.compare,
    "select_n": _Counts.choose,
    "convert_element_type": _Counts.same,
    "copy": _Counts.same,
    "broadcast_in_dim": _Counts.broadcast,
    "concatenate": _Counts.join,
}


def _in_program(program: Program) -> Program:
    """A program that an equation holds, written anew where it holds such look-ups."""
    inner, consts = open_jaxpr(program)
    eqns = own_rows(inner.eqns, zip(inner.constvars, consts, strict=False))
    if all(own[0] is eqn for own, eqn in zip(eqns, inner.eqns, strict=True)):
        return program
    made = inner.replace(eqns=[eqn for own in eqns for eqn in own])
    return made if inner is program else program.replace(jaxpr=made)  # type: ignore[call-arg]
