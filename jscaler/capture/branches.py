"""Cut a ``cond`` into one for each group of results that share work.

``optax.MultiSteps`` and ``apply_if_finite`` put the whole state behind one condition. Results that share nothing inside
the branches become equations of their own, so that each leaf is an op that is split by its own factors.
"""

from collections.abc import Sequence

from jax.extend import core

from jscaler.capture.jaxprs import CALLS, inline, live_equations, make_jaxpr, open_jaxpr, shape


def split_cond(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """``eqn``, or the several conditions that compute the same."""
    if eqn.primitive.name != "cond" or eqn.effects or len(eqn.outvars) < 2:
        return [eqn]
    branches = [open_jaxpr(closed) for closed in eqn.params["branches"]]
    if any(consts for _, consts in branches):
        return [eqn]
    programs = [inline(jaxpr, CALLS) for jaxpr, _ in branches]
    groups = _groups(programs, len(eqn.outvars))
    return [eqn] if len(groups) == 1 else [_of_group(eqn, programs, group) for group in groups]


def _groups(programs: Sequence[core.Jaxpr], count: int) -> list[list[int]]:
    """Results that share work in some branch; numbers made of numbers alone are cheap, and computed again instead."""
    group_of = list(range(count))
    for program in programs:
        maker = {v: i for i, e in enumerate(program.eqns) for v in e.outvars}
        reached: dict[int, int] = {}
        for result, atom in enumerate(program.outvars):
            for i in _needed(program, maker, atom):
                if _is_cheap(program.eqns[i]):
                    continue
                old, new = group_of[result], group_of[reached.setdefault(i, result)]
                group_of = [new if g == old else g for g in group_of]
    return [[i for i in range(count) if group_of[i] == g] for g in dict.fromkeys(group_of)]


def _needed(program: core.Jaxpr, maker: dict[core.Var, int], atom: core.Var | core.Literal) -> set[int]:
    """The equations, by number, that a result is made of."""
    found: set[int] = set()
    waiting = [atom]
    while waiting:
        here = waiting.pop()
        if isinstance(here, core.Var) and here in maker and maker[here] not in found:
            found.add(maker[here])
            waiting += program.eqns[maker[here]].invars
    return found


def _is_cheap(eqn: core.JaxprEqn) -> bool:
    inner = any(True for _ in core.jaxprs_in_params(eqn.params))
    return not inner and not any(shape(v) for v in (*eqn.invars, *eqn.outvars))


def _of_group(eqn: core.JaxprEqn, programs: Sequence[core.Jaxpr], group: Sequence[int]) -> core.JaxprEqn:
    made = []
    for program in programs:
        outvars = [program.outvars[i] for i in group]
        made.append((program, live_equations(program.eqns, outvars), outvars))
    reads = {
        v for _, eqns, outvars in made for v in (*outvars, *(v for e in eqns for v in e.invars)) if isinstance(v, core.Var)
    }
    used = [k for k in range(len(eqn.invars) - 1) if any(program.invars[k] in reads for program in programs)]
    branches = tuple(
        core.ClosedJaxpr(make_jaxpr(eqns, [program.invars[k] for k in used], outvars, program), [])
        for program, eqns, outvars in made
    )
    invars = [eqn.invars[0], *(eqn.invars[1 + k] for k in used)]
    outvars = [eqn.outvars[i] for i in group]
    return eqn.replace(params={**eqn.params, "branches": branches}, invars=invars, outvars=outvars)
