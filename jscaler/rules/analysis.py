"""``Analysis``: a fragment whose dims are unified, equation by equation, into the atoms that its factors are made of."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import shape
from jscaler.errors import UnknownPrimitiveWarning
from jscaler.rules.atoms import Atoms
from jscaler.rules.fold import fold_pads
from jscaler.rules.registry import TABLE
from jscaler.rules.table import Dims, Spec
from jscaler.rules.user_rules import shown_name, user_spec


@dataclass(frozen=True)
class Analysis:
    """A fragment (calls inlined) with, for each variable, the atoms of its dims.

    Attributes:
        reduced: for each equation the atoms of its labels that no result carries.
        zeros: the variables that are known to be zero.
    """

    jaxpr: core.Jaxpr
    specs: tuple[Spec, ...]
    atoms: Atoms
    dims: Mapping[core.Var, tuple[list[int], ...]]
    zeros: frozenset[core.Var]
    reduced: tuple[tuple[int, ...], ...]

    def leaves(self, var: core.Var) -> tuple[tuple[int, ...], ...]:
        """Per dim of ``var`` its factors as leaf atoms, major first."""
        return tuple(tuple(self.atoms.leaves(dim)) for dim in self.dims[var])


def analyse(jaxpr: core.Jaxpr, warned: set[str] | None = None) -> Analysis:
    """Unify the dims of an inlined fragment; ``warned`` holds the primitives that a warning has named already."""
    jaxpr = fold_pads(jaxpr)
    atoms = Atoms()
    dims: dict[core.Var, tuple[list[int], ...]] = {}

    def define(var: core.Var) -> None:
        dims[var] = tuple([] if size == 1 else [atoms.new(size)] for size in shape(var))

    for var in jaxpr.invars:
        define(var)
    specs, reduced = [], []
    for eqn in jaxpr.eqns:
        spec = _spec(eqn, set() if warned is None else warned)
        specs.append(spec)
        for var in eqn.outvars:
            define(var)
        labels: dict[object, int] = {}
        pairs = [*zip(eqn.invars, spec.operands, strict=True), *zip(eqn.outvars, spec.results, strict=True)]
        for atom, tensor in pairs:
            mine = dims[atom] if isinstance(atom, core.Var) else _constant(atoms, shape(atom))
            _unify_tensor(atoms, mine, tensor, labels, eqn.primitive.name)
        for label, reason in spec.blocked.items():
            if label in labels:
                atoms.block([labels[label]], f"at {shown_name(eqn)} {reason}")
        kept = {label for tensor in spec.results for dim in tensor for label in dim}
        reduced.append(tuple(atom for label, atom in labels.items() if label not in kept))
    return Analysis(jaxpr, tuple(specs), atoms, dims, _known_zeros(jaxpr), tuple(reduced))


def _constant(atoms: Atoms, sizes: tuple[int, ...]) -> tuple[list[int], ...]:
    """Fresh atoms for an array written into the program, which has no parts."""
    fresh = tuple([] if size == 1 else [atoms.new(size)] for size in sizes)
    for dim in fresh:
        atoms.block(dim, "it indexes an array constant")
    return fresh


def _unify_tensor(atoms: Atoms, mine: Sequence[list[int]], tensor: Dims, labels: dict[object, int], where: str) -> None:
    for dim, names in zip(mine, tensor, strict=True):
        if not dim or not names:
            continue
        for label in names:
            if label not in labels:
                labels[label] = atoms.new(label[1])
        atoms.unify(dim, [labels[n] for n in names], where)


def _spec(eqn: core.JaxprEqn, warned: set[str]) -> Spec:
    name = eqn.primitive.name
    if (spec := user_spec(eqn)) is not None:
        return spec
    if name in TABLE:
        return TABLE[name](eqn)
    if name not in warned:
        warned.add(name)
        warnings.warn(
            f"jscaler knows no rule for the primitive '{name}': ops that hold it are replicated, never split",
            UnknownPrimitiveWarning,
            stacklevel=2,
        )
    blocked: dict[tuple[object, int], str] = {}

    def one(side: str, index: int, sizes: tuple[int, ...]) -> Dims:
        labels = tuple((((side, index, d), s),) if s > 1 else () for d, s in enumerate(sizes))
        blocked.update({label: "there is no rule" for dim in labels for label in dim})
        return labels

    operands = tuple(one("in", i, shape(v)) for i, v in enumerate(eqn.invars))
    return Spec(operands, tuple(one("out", i, shape(v)) for i, v in enumerate(eqn.outvars)), blocked=blocked)


# Primitives that make zero of any zero operand.
ZERO_KEEPS = frozenset(
    "broadcast_in_dim convert_element_type reshape transpose squeeze copy neg reduce_sum mul".split()  # noqa: SIM905
)


def _known_zeros(jaxpr: core.Jaxpr) -> frozenset[core.Var]:
    zeros: set[core.Var] = set()
    for eqn in jaxpr.eqns:
        flags = [is_zero(v, zeros) for v in eqn.invars]
        name = eqn.primitive.name
        if (name in ZERO_KEEPS and any(flags)) or (
            name in ("add", "add_any", "sub", "select_n") and _all_zero(name, flags)
        ):
            zeros.update(eqn.outvars)
    return frozenset(zeros)


def _all_zero(name: str, flags: Sequence[bool]) -> bool:
    return all(flags[1:] if name == "select_n" else flags)


def is_zero(atom: core.Var | core.Literal, zeros: Iterable[core.Var]) -> bool:
    if isinstance(atom, core.Literal):
        return np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype != np.bool_ and bool(atom.val == 0)
    return atom in zeros
