"""``Analysis``: a fragment whose dims are known by the atoms that they are made of."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend import core

from jscaler.lax_primitives import Spec, known
from jscaler.rules.dim_atoms import Atoms

VarLeaves = tuple[tuple[int, ...], ...]  # by dim


@dataclass(frozen=True)
class Analysis:
    """A fragment (calls inlined) with, for each variable, the atoms of its dims.

    Attributes:
        reduced: for each equation the atoms of its labels that no result carries.
        zeros: the variables that are known to be zero.
        inner: the analyses of the programs inside an equation (a scan's body, a cond's branches), by the equation's id.
    """

    jaxpr: core.Jaxpr
    specs: tuple[Spec, ...]
    atoms: Atoms
    dims: Mapping[core.Var, tuple[list[int], ...]]
    zeros: frozenset[core.Var]
    reduced: tuple[tuple[int, ...], ...]
    inner: Mapping[int, tuple["Analysis", ...]]
    _leaves: dict[core.Var, tuple[int, tuple[tuple[int, ...], ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def leaves(self, var: core.Var) -> VarLeaves:
        """Per dim of ``var`` its factors as leaf atoms, major first."""
        changes, found = self._leaves.get(var, (-1, ()))
        if changes != self.atoms.changes:
            found = tuple(tuple(self.atoms.leaves(dim)) for dim in self.dims[var])
            self._leaves[var] = (self.atoms.changes, found)
        return found

    def with_zeros(self, flags: Sequence[bool]) -> "Analysis":
        """The same, with these inputs known to be zero."""
        zeros = {*self.zeros, *(v for v, flag in zip(self.jaxpr.invars, flags, strict=True) if flag)}
        for eqn in self.jaxpr.eqns:
            zeros.update(zero_results(eqn, zeros))
        return dataclasses.replace(self, zeros=frozenset(zeros))

    def gives_zero(self, index: int) -> bool:
        """Whether a result is known to be zero."""
        return is_zero(self.jaxpr.outvars[index], self.zeros)


def zero_results(eqn: core.JaxprEqn, zeros: set[core.Var]) -> Sequence[core.Var]:
    one = known(eqn.primitive)
    if not one.zero:
        return ()
    flags = (is_zero(eqn.invars[i], zeros) for i in one.data(len(eqn.invars)))
    return eqn.outvars if (any if one.zero == "any" else all)(flags) else ()


def is_zero(atom: core.Var | core.Literal, zeros: Iterable[core.Var]) -> bool:
    if isinstance(atom, core.Literal):
        return np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype != np.bool_ and bool(atom.val == 0)
    return atom in zeros
