"""The abstract interpretation per factor: what becomes of every tensor of a fragment when one factor is split.

For one factor, every tensor is in one state: *independent* of it, *split* along it, or *partial* (a value share, with
a combiner); besides, it may be *known to be zero*. Partial passes only what is linear. A partial that meets anything
else, or a factor on two dims of one tensor, blocks the factor; `stages` says where a cut frees it again.
"""

from collections.abc import Mapping, Sequence

from jax.extend import core

from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import Spec, known
from jscaler.lax_primitives.programs import called
from jscaler.rules.analysed import Analysis, is_zero
from jscaler.rules.halo_reach import INSIDE, overlapped, read_around, slid_along
from jscaler.rules.nested import LoopFlow, flow

SPLIT, INDEPENDENT = "split", "independent"
Leaves = tuple[int, ...]
State = str  # SPLIT, INDEPENDENT, or the combiner of a partial: "add", "max", "min"


class Blocked(Exception):
    """Raised inside the interpretation: the factor cannot be split, and why."""


def interpret(analysis: Analysis, split: Leaves, partial: Mapping[core.Var, Combiner]) -> dict[core.Var, State]:
    """The state of every variable when the leaves in ``split`` are split together and the inputs in ``partial`` are shares.

    Raises:
        Blocked: a partial meets something that is not linear.
    """
    given = [partial.get(v) or own_state(analysis, split, v) for v in analysis.jaxpr.invars]
    return _walk(analysis, split, given)


def _walk(analysis: Analysis, split: Leaves, given: Sequence[State]) -> dict[core.Var, State]:
    """The states of a program's variables from those of its inputs."""
    states = dict(zip(analysis.jaxpr.invars, given, strict=True))
    for i, eqn in enumerate(analysis.jaxpr.eqns):
        before = [states[v] if isinstance(v, core.Var) else INDEPENDENT for v in eqn.invars]
        states.update(zip(eqn.outvars, advance(analysis, i, split, before), strict=True))
    return states


def own_state(analysis: Analysis, split: Leaves, var: core.Var) -> State:
    """Whether ``var`` is cut when the leaves in ``split`` are split together."""
    count = sum(leaf in split for dim in analysis.leaves(var) for leaf in dim)
    if count > 1:
        raise Blocked("it is on two dims of one tensor")
    return SPLIT if count else INDEPENDENT


def own_states(analysis: Analysis, split: Leaves, index: int) -> list[State]:
    """For each result of the equation at ``index`` whether it is cut when the leaves in ``split`` are split together."""
    eqn, reduced = analysis.jaxpr.eqns[index], analysis.reduced[index]
    own = [own_state(analysis, split, v) for v in eqn.outvars]
    if reduced and SPLIT in own and any(leaf in split for leaf in analysis.atoms.leaves(list(reduced))):
        raise Blocked(f"'{eqn.primitive.name}' reduces it and keeps it")  # t[t]: rows looked up by rows
    return own


def advance(analysis: Analysis, index: int, split: Leaves, before: Sequence[State]) -> list[State]:
    """The states of the results of the equation at ``index``; ``before`` are those of its operands.

    Raises:
        Blocked: a partial meets something that is not linear.
    """
    eqn, spec, own = analysis.jaxpr.eqns[index], analysis.specs[index], own_states(analysis, split, index)
    if eqn.effects and any(s != INDEPENDENT for s in before):
        raise Blocked(f"{called(eqn)} has a side effect, which would happen once per part")
    if spec.pairwise:  # each result is its operand
        return list(before)
    zero = [is_zero(v, analysis.zeros) for v in eqn.invars]
    if id(eqn) in analysis.inner:
        return _advance_nested(analysis, eqn, split, before, zero, own)
    states: list[State] = []
    for after in own:
        if all(s == INDEPENDENT for s in before):
            states.append(after)
        elif any(s not in (SPLIT, INDEPENDENT) for s in before):
            states.append(_pass_partial(eqn.primitive.name, spec.linear, before, zero, after))
        elif after == SPLIT:
            states.append(SPLIT)
        else:
            _check_base(eqn.primitive.name, spec, before, zero)
            states.append(spec.combiner)
    return states


def _advance_nested(
    analysis: Analysis,
    eqn: core.JaxprEqn,
    split: Leaves,
    before: Sequence[State],
    zero: Sequence[bool],
    own: Sequence[State],
) -> list[State]:
    def run(inner: Analysis, given: Sequence[State], zero: Sequence[bool]) -> list[State]:
        states = _walk(inner.with_zeros(zero) if any(zero) else inner, split, given)
        return [states[v] if isinstance(v, core.Var) else INDEPENDENT for v in inner.jaxpr.outvars]

    def touched(inner: Analysis) -> bool:
        return any(own_state(inner, split, v) == SPLIT for v in inner.dims)

    def leads(atoms: Sequence[core.Var | core.Literal]) -> bool:
        return any(leaf in split for v in atoms if isinstance(v, core.Var) for leaf in analysis.leaves(v)[0])

    if all(s == INDEPENDENT for s in before):
        return list(own)
    return flow(eqn, analysis.inner[id(eqn)], LoopFlow(before, zero, own, run, touched, leads, Blocked))


def _pass_partial(name: str, linear: str, before: Sequence[State], zero: list[bool], after: State) -> State:
    """What comes of partial operands; raises Blocked where the equation is not linear in them."""
    kinds = {s for s in before if s not in (SPLIT, INDEPENDENT)}
    partial = [s in kinds for s in before]
    clean = after != SPLIT and SPLIT not in before and len(kinds) == 1
    combiner = next(iter(kinds))
    additive = combiner == "add"
    passes = {
        "add": additive and all(p or z for p, z in zip(partial, zero, strict=True)),
        "pair": additive and sum(partial) == 1 and any(partial[:2]),
        "each": additive and sum(partial) == 1,
        "first": additive and partial[0] and not any(partial[1:]),
        "select": additive and not partial[0] and all(p or z for p, z in zip(partial[1:], zero[1:], strict=True)),
        "update": additive and not any(partial[2:]) and all(p or z for p, z in zip(partial[:2], zero[:2], strict=True)),
        "outer": additive and not any(partial[1:2]) and all(p or z for p, z in zip(partial[::2], zero[::2], strict=True)),
        "move": partial[0] and not any(partial[1:]),
    }
    monotone = name == combiner and all(partial)
    if clean and (passes.get(linear, False) or monotone):
        return combiner
    raise Blocked(f"a partial {combiner} of it meets '{name}'")


def _check_base(name: str, spec: Spec, before: Sequence[State], zero: list[bool]) -> None:
    if spec.base is not None and before[spec.base] == INDEPENDENT and not zero[spec.base]:
        raise Blocked(f"'{name}' adds it to a tensor that is not zero")


def stages(analysis: Analysis, groups: Sequence[Leaves]) -> list[int] | str:
    """For each equation the stage at which it runs when an op is cut so that every group of leaves can be split.

    Within a stage, partial sums pass what is linear; what is not linear waits for the next stage, before which they are
    joined. So the vocabulary of a cross entropy is cut after its maximum and after its sum. Windows that read beyond
    their part wait for the next stage, too, where what they read cannot be had there.

    Returns:
        The stages, or why no cut frees a group.
    """
    for group in groups:
        for leaf in group:
            if leaf in analysis.atoms.reason:
                return analysis.atoms.reason[leaf]
            if overlapped(analysis, leaf):
                return INSIDE
    stage: dict[core.Var, int] = dict.fromkeys(analysis.jaxpr.invars, 0)
    found: list[int] = []
    generated: set[core.Var] = set()  # what depends on no input is made anew in every piece
    extended = set(analysis.jaxpr.invars)  # what windows can read beyond a part, at the stage that makes it
    try:
        states = [{v: own_state(analysis, g, v) for v in analysis.jaxpr.invars} for g in groups]
        for i, (eqn, spec) in enumerate(zip(analysis.jaxpr.eqns, analysis.specs, strict=True)):
            here = max((stage[v] for v in eqn.invars if isinstance(v, core.Var)), default=0)
            lacking = [v for g in groups for v in read_around(analysis, eqn, spec, g) if v not in extended]
            if generated.intersection(lacking):
                raise Blocked(f"at {eqn.primitive.name} windows read what every part draws for itself")
            here += any(stage[v] == here for v in lacking)
            if not eqn.effects and all(not isinstance(v, core.Var) or v in generated for v in eqn.invars):
                generated.update(eqn.outvars)
            try:
                after = _advance_all(analysis, i, groups, states, stage, here)
            except Blocked:
                here += 1  # by then all that it reads is joined: what still blocks it, no cut frees
                after = _advance_all(analysis, i, groups, states, stage, here)
            for before, new in zip(states, after, strict=True):
                before.update(new)
            stage.update(dict.fromkeys(eqn.outvars, here))
            found.append(here)
            if known(eqn.primitive).by_row and all(
                stage[v] < here or v in extended for v in eqn.invars if isinstance(v, core.Var)
            ):
                extended.update(eqn.outvars)
    except Blocked as blocked:
        return str(blocked)
    whole = {v for v in extended if all(known.get(v, SPLIT) in (SPLIT, INDEPENDENT) for known in states)}
    return _sunk(analysis, found, whole) if any(slid_along(analysis) & {*group} for group in groups) else found


def _sunk(analysis: Analysis, found: Sequence[int], movable: set[core.Var]) -> list[int]:
    """What only later stages read is made there, so that windows read the op's own operands, under their own factors."""
    first: dict[core.Var, int] = {v: -1 for v in analysis.jaxpr.outvars if isinstance(v, core.Var)}
    when = list(found)
    for i, eqn in reversed(list(enumerate(analysis.jaxpr.eqns))):
        if movable.issuperset(eqn.outvars) and known(eqn.primitive).by_row and not eqn.effects:
            when[i] = max(when[i], min((first[v] for v in eqn.outvars if v in first), default=0))
        for v in eqn.invars:
            if isinstance(v, core.Var):
                first[v] = min(first.get(v, when[i]), when[i])
    return when


def _advance_all(
    analysis: Analysis,
    index: int,
    groups: Sequence[Leaves],
    states: Sequence[Mapping[core.Var, State]],
    stage: Mapping[core.Var, int],
    here: int,
) -> list[dict[core.Var, State]]:
    """Per group the states of the results of the equation at ``index`` if it runs at stage ``here``."""
    eqn = analysis.jaxpr.eqns[index]

    def seen(atom: core.Var | core.Literal, mine: Mapping[core.Var, State]) -> State:
        if not isinstance(atom, core.Var):
            return INDEPENDENT
        joined = mine[atom] not in (SPLIT, INDEPENDENT) and stage[atom] < here
        return INDEPENDENT if joined else mine[atom]

    results = []
    for group, mine in zip(groups, states, strict=True):
        before = [seen(v, mine) for v in eqn.invars]
        results.append(dict(zip(eqn.outvars, advance(analysis, index, group, before), strict=True)))
    return results
