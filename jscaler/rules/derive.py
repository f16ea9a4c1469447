"""Derive the rule of a fragment: union-find names its factors, an abstract interpretation says what each may do."""

from collections.abc import Iterable, Mapping, Sequence

from jax.extend import core

from jscaler.capture.jaxprs import shape
from jscaler.ir import Factor, Halo, Rule
from jscaler.ir.mask import Combiner
from jscaler.rules.analysed import Analysis
from jscaler.rules.even import even_only
from jscaler.rules.factor_states import INDEPENDENT, SPLIT, Blocked, Leaves, State, interpret, stages
from jscaler.rules.halo_reach import operand_halos


def derive_rule(
    analysis: Analysis, names: Mapping[int, str] | None = None, reserved: Iterable[str] = ()
) -> tuple[Rule, dict[str, Leaves]]:
    """The rule of an analysed fragment, and the leaf atoms of each factor.

    Args:
        names: names of leaf atoms (those that a backward op shares with its forward). Several leaves of one name are
            one factor, split together, if that is possible; else the name stays with the first of them.
        reserved: names that other factors must not get.
    """
    jaxpr = analysis.jaxpr
    tensors = [*jaxpr.invars, *(v for v in jaxpr.outvars if isinstance(v, core.Var))]
    order = list(dict.fromkeys(leaf for v in tensors for dim in analysis.leaves(v) for leaf in dim))
    groups: dict[str, Leaves] = {}
    factors: dict[str, Factor] = {}
    shares: dict[tuple[str, int], Combiner] = {}
    halos: dict[tuple[str, int, int], Halo] = {}
    taken = {*(names or {}).values(), *reserved}
    free = (n for n in _letters() if n not in taken)
    for group in _groups(analysis, order, names or {}):
        name = (names or {}).get(group[0]) or next(free)
        name = name if name not in groups else next(free)
        groups[name] = group
        found, reason = _use(analysis, group)
        kind = "blocked" if reason else "reduction" if found else "parallel"
        reopens = bool(reason) and isinstance(stages(analysis, [group]), list)
        factors[name] = Factor(name, analysis.atoms.size[group[0]], kind, reason, reopens, even_only(analysis, group))
        shares.update({(name, i): combiner for i, combiner in found.items()})
        around = {} if reason else operand_halos(analysis, group)
        assert not isinstance(around, str)
        halos.update({(name, i, dim): halo for (i, dim), halo in around.items()})
    label = {leaf: name for name, group in groups.items() for leaf in group}

    def tensor(atom: core.Var | core.Literal) -> tuple[tuple[str, ...], ...]:
        if isinstance(atom, core.Literal):
            return ((),) * len(shape(atom))
        return tuple(tuple(label[leaf] for leaf in dim) for dim in analysis.leaves(atom))

    return Rule(factors, tuple(map(tensor, jaxpr.invars)), tuple(map(tensor, jaxpr.outvars)), shares, halos), groups


def _groups(analysis: Analysis, order: Sequence[int], names: Mapping[int, str]) -> list[Leaves]:
    """Leaves that are one factor: those of one name, unless only each by itself can be split."""
    found: list[Leaves] = []
    for leaf in order:
        if any(leaf in group for group in found):
            continue
        same = tuple(other for other in order if leaf in names and names.get(other) == names[leaf])
        found.append(same if len(same) > 1 and _fits_together(analysis, same) else (leaf,))
    return found


def _fits_together(analysis: Analysis, same: Leaves) -> bool:
    if not _use(analysis, same)[1]:
        return True
    alone = all(not _use(analysis, (leaf,))[1] for leaf in same)
    return not alone and isinstance(stages(analysis, [same]), list)


def _use(analysis: Analysis, group: Leaves) -> tuple[dict[int, Combiner], str]:
    """Which results become value shares when ``group`` is split, and why it cannot be (empty if it can)."""
    for leaf in group:
        if leaf in analysis.atoms.reason:
            return {}, analysis.atoms.reason[leaf]
    around = operand_halos(analysis, group)
    if isinstance(around, str):
        return {}, around
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
