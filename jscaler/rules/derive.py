"""Derive the rule of a fragment: union-find names its factors, an abstract interpretation says what each may do.

For one factor, every tensor of the fragment is in one state: *independent* of it, *split* along it, or *partial*
(a value share, with a combiner); besides, it may be *known to be zero*. Partial passes only what is linear. A partial
that meets anything else, or a factor on two dims of one tensor, blocks the factor.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import shape
from jscaler.errors import UnknownPrimitiveWarning
from jscaler.ir import Factor, Rule
from jscaler.ir.mask import Combiner
from jscaler.rules.atoms import Atoms
from jscaler.rules.registry import TABLE
from jscaler.rules.table import Dims, Spec

SPLIT, INDEPENDENT = "split", "independent"
Leaves = tuple[int, ...]
State = str  # SPLIT, INDEPENDENT, or the combiner of a partial: "add", "max", "min"


class Blocked(Exception):
    """Raised inside the interpretation: the factor cannot be split, and why."""


@dataclass(frozen=True)
class Analysis:
    """A fragment (calls inlined) with, for each variable, the atoms of its dims."""

    jaxpr: core.Jaxpr
    specs: tuple[Spec, ...]
    atoms: Atoms
    dims: Mapping[core.Var, tuple[list[int], ...]]
    zeros: frozenset[core.Var]

    def leaves(self, var: core.Var) -> tuple[tuple[int, ...], ...]:
        """Per dim of ``var`` its factors as leaf atoms, major first."""
        return tuple(tuple(self.atoms.leaves(dim)) for dim in self.dims[var])


def analyse(jaxpr: core.Jaxpr, warned: set[str] | None = None) -> Analysis:
    """Unify the dims of an inlined fragment; ``warned`` holds the primitives that a warning has named already."""
    atoms = Atoms()
    dims: dict[core.Var, tuple[list[int], ...]] = {}

    def define(var: core.Var) -> None:
        dims[var] = tuple([] if size == 1 else [atoms.new(size)] for size in shape(var))

    for var in jaxpr.invars:
        define(var)
    specs = []
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
                atoms.block([labels[label]], f"at {eqn.primitive.name} {reason}")
    return Analysis(jaxpr, tuple(specs), atoms, dims, _known_zeros(jaxpr))


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
        flags = [_is_zero(v, zeros) for v in eqn.invars]
        name = eqn.primitive.name
        if (name in ZERO_KEEPS and any(flags)) or (
            name in ("add", "add_any", "sub", "select_n") and _all_zero(name, flags)
        ):
            zeros.update(eqn.outvars)
    return frozenset(zeros)


def _all_zero(name: str, flags: Sequence[bool]) -> bool:
    return all(flags[1:] if name == "select_n" else flags)


def _is_zero(atom: core.Var | core.Literal, zeros: Iterable[core.Var]) -> bool:
    if isinstance(atom, core.Literal):
        return np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype != np.bool_ and bool(atom.val == 0)
    return atom in zeros


def interpret(analysis: Analysis, split: Leaves, partial: Mapping[core.Var, Combiner]) -> dict[core.Var, State]:
    """The state of every variable when the leaves in ``split`` are split together and the inputs in ``partial`` are shares.

    Raises:
        Blocked: a partial meets something that is not linear.
    """
    states: dict[core.Var, State] = {}

    def state(atom: core.Var | core.Literal) -> State:
        return states[atom] if isinstance(atom, core.Var) else INDEPENDENT

    def own(var: core.Var) -> State:
        count = sum(leaf in split for dim in analysis.leaves(var) for leaf in dim)
        if count > 1:
            raise Blocked("it is on two dims of one tensor")
        return SPLIT if count else INDEPENDENT

    for var in analysis.jaxpr.invars:
        states[var] = partial.get(var) or own(var)
    for eqn, spec in zip(analysis.jaxpr.eqns, analysis.specs, strict=True):
        before = [state(v) for v in eqn.invars]
        if eqn.effects and any(s != INDEPENDENT for s in before):
            raise Blocked(f"'{eqn.primitive.name}' has a side effect")
        zero = [_is_zero(v, analysis.zeros) for v in eqn.invars]
        if spec.pairwise:  # each result is its operand
            states.update(zip(eqn.outvars, before, strict=True))
            continue
        for var in eqn.outvars:
            after = own(var)
            if all(s == INDEPENDENT for s in before):
                states[var] = after
            elif any(s not in (SPLIT, INDEPENDENT) for s in before):
                states[var] = _pass_partial(eqn.primitive.name, spec.linear, before, zero, after)
            elif after == SPLIT:
                states[var] = SPLIT
            else:
                _check_base(eqn.primitive.name, spec, before, zero)
                states[var] = spec.combiner
    return states


def _pass_partial(name: str, linear: str, before: list[State], zero: list[bool], after: State) -> State:
    """What comes of partial operands; raises Blocked where the equation is not linear in them."""
    kinds = {s for s in before if s not in (SPLIT, INDEPENDENT)}
    partial = [s in kinds for s in before]
    clean = after != SPLIT and SPLIT not in before and len(kinds) == 1
    combiner = next(iter(kinds))
    additive = combiner == "add"
    passes = {
        "add": additive and all(p or z for p, z in zip(partial, zero, strict=True)),
        "each": additive and sum(partial) == 1,
        "first": additive and partial[0] and not any(partial[1:]),
        "select": additive and not partial[0] and all(p or z for p, z in zip(partial[1:], zero[1:], strict=True)),
        "update": additive and not any(partial[2:]) and all(p or z for p, z in zip(partial[:2], zero[:2], strict=True)),
        "move": partial[0] and not any(partial[1:]),
    }
    monotone = name == combiner and all(partial)
    if clean and (passes.get(linear, False) or monotone):
        return combiner
    raise Blocked(f"a partial {combiner} of it meets '{name}'")


def _check_base(name: str, spec: Spec, before: list[State], zero: list[bool]) -> None:
    if spec.base is not None and before[spec.base] == INDEPENDENT and not zero[spec.base]:
        raise Blocked(f"'{name}' adds it to a tensor that is not zero")


def derive_rule(analysis: Analysis, names: Mapping[int, str] | None = None) -> tuple[Rule, dict[str, Leaves]]:
    """The rule of an analysed fragment, and the leaf atoms of each factor.

    Args:
        names: names of leaf atoms (those that a backward op shares with its forward). Several leaves of one name are
            one factor, split together, if that is possible; else the name stays with the first of them.
    """
    jaxpr = analysis.jaxpr
    tensors = [*jaxpr.invars, *(v for v in jaxpr.outvars if isinstance(v, core.Var))]
    order = list(dict.fromkeys(leaf for v in tensors for dim in analysis.leaves(v) for leaf in dim))
    groups: dict[str, Leaves] = {}
    factors: dict[str, Factor] = {}
    shares: dict[tuple[str, int], Combiner] = {}
    free = (n for n in _letters() if n not in (names or {}).values())
    for group in _groups(analysis, order, names or {}):
        name = (names or {}).get(group[0]) or next(free)
        name = name if name not in groups else next(free)
        groups[name] = group
        found, reason = _use(analysis, group)
        kind = "blocked" if reason else "reduction" if found else "parallel"
        factors[name] = Factor(name, analysis.atoms.size[group[0]], kind, reason)
        shares.update({(name, i): combiner for i, combiner in found.items()})
    label = {leaf: name for name, group in groups.items() for leaf in group}

    def tensor(atom: core.Var | core.Literal) -> tuple[tuple[str, ...], ...]:
        if isinstance(atom, core.Literal):
            return ((),) * len(shape(atom))
        return tuple(tuple(label[leaf] for leaf in dim) for dim in analysis.leaves(atom))

    return Rule(factors, tuple(map(tensor, jaxpr.invars)), tuple(map(tensor, jaxpr.outvars)), shares), groups


def _groups(analysis: Analysis, order: Sequence[int], names: Mapping[int, str]) -> list[Leaves]:
    """Leaves that are one factor: those of one name, unless only each by itself can be split."""
    found: list[Leaves] = []
    for leaf in order:
        if any(leaf in group for group in found):
            continue
        same = tuple(other for other in order if leaf in names and names.get(other) == names[leaf])
        together = len(same) > 1 and not _use(analysis, same)[1]
        found.append(same if together else (leaf,))
    return found


def _use(analysis: Analysis, group: Leaves) -> tuple[dict[int, Combiner], str]:
    """Which results become value shares when ``group`` is split, and why it cannot be (empty if it can)."""
    for leaf in group:
        if leaf in analysis.atoms.reason:
            return {}, analysis.atoms.reason[leaf]
    try:
        return _partial_results(analysis.jaxpr, interpret(analysis, group, {})), ""
    except Blocked as blocked:
        return {}, str(blocked)


def _partial_results(jaxpr: core.Jaxpr, states: Mapping[core.Var, State]) -> dict[int, Combiner]:
    found: dict[int, Combiner] = {}
    for i, atom in enumerate(jaxpr.outvars):
        if isinstance(atom, core.Var) and states[atom] not in (SPLIT, INDEPENDENT):
            found[i] = states[atom]  # type: ignore[assignment]
    return found


def _letters() -> Iterable[str]:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    yield from alphabet
    number = 1
    while True:
        yield from (f"{letter}{number}" for letter in alphabet)
        number += 1
