"""Conditions of one predicate that stand next to each other become one again.

Capture cuts a ``cond`` leaf by leaf, so that each leaf is placed on its own. What is left of it in the program waits for
the first of its results to be read, and is then one equation with all that is ready: a launch (and on a GPU a wait for
the predicate) per stage of an update, and not per leaf::

    cond(p, a)  f(a)  cond(p, b)  g(b)        becomes        cond(p, a and b)  f(a)  g(b)
"""

import heapq
from collections.abc import Sequence
from typing import Any, TypeGuard

from jax.extend import core

from jscaler.capture.jaxprs import Atom, Inliner, atom_key, equal_results, make_jaxpr, open_jaxpr, swapped
from jscaler.ir.walk import sorter_of
from jscaler.lower.flat_program import FlatProgram, Item, each_level, reads, results


def merged_conditions(program: FlatProgram) -> FlatProgram:
    """Conditions of one predicate as few as their order allows: a launch, and a wait, for each stage of an update."""
    return each_level(program, lambda level: merge_conditions(level.items))


def merge_conditions(items: Sequence[Item]) -> list[Item]:
    """``items`` with conditions of one predicate as few as their order allows; other items keep their order."""
    conditions = {i: item for i, item in enumerate(items) if _is_condition(item)}
    predicates = {i: atom_key(eqn.invars[0]) for i, eqn in conditions.items()}
    if len(set(predicates.values())) == len(predicates):
        return list(items)
    sorter = sorter_of(dict(enumerate(_dependencies(items))))
    ready: list[int] = []
    late: list[int] = []  # conditions that are ready
    found: list[Item] = []
    while sorter.is_active():
        for i in sorter.get_ready():
            if i in conditions:
                late.append(i)
            else:
                heapq.heappush(ready, i)
        if ready:
            group = [heapq.heappop(ready)]
        else:
            first = predicates[min(late)]
            group = sorted(i for i in late if predicates[i] == first)
            late = [i for i in late if i not in group]
        found.append(items[group[0]] if len(group) == 1 else _merged([conditions[i] for i in group]))
        sorter.done(*group)
    return found


def _dependencies(items: Sequence[Item]) -> list[set[int]]:
    """For whom each item waits; what has effects keeps its order."""
    maker: dict[core.Var, int] = {}
    found: list[set[int]] = []
    effect: int | None = None
    for i, item in enumerate(items):
        sources = {maker[v] for v in reads(item) if v in maker}
        if isinstance(item, core.JaxprEqn) and item.effects:
            sources |= {effect} if effect is not None else set()
            effect = i
        found.append(sources)
        maker.update(dict.fromkeys(results(item), i))
    return found


def _is_condition(item: Item) -> TypeGuard[core.JaxprEqn]:
    return (
        isinstance(item, core.JaxprEqn)
        and item.primitive.name == "cond"
        and not item.effects
        and not any(open_jaxpr(branch)[1] for branch in item.params["branches"])
    )


def _merged(eqns: Sequence[core.JaxprEqn]) -> core.JaxprEqn:
    """One condition for several of one predicate; operands that are equal are passed once."""
    operands: dict[Any, Atom] = {atom_key(a): a for eqn in eqns for a in eqn.invars[1:]}
    branches = []
    for number in range(len(eqns[0].params["branches"])):
        bodies = [open_jaxpr(eqn.params["branches"][number])[0] for eqn in eqns]
        given: dict[Any, core.Var] = {}
        for eqn, body in zip(eqns, bodies, strict=True):
            for atom, var in zip(eqn.invars[1:], body.invars, strict=True):
                given.setdefault(atom_key(atom), core.Var(var.aval))
        inliner, outs = Inliner(frozenset()), []
        for eqn, body in zip(eqns, bodies, strict=True):
            outs += inliner.run(body, [], [given[atom_key(a)] for a in eqn.invars[1:]])
        inner, outs = _once(inliner.eqns, outs)
        invars = [given[key] for key in operands]
        merged = [item for item in merge_conditions(inner) if isinstance(item, core.JaxprEqn)]
        branches.append(core.ClosedJaxpr(make_jaxpr(merged, invars, outs, bodies[0]), []))
    return eqns[0].replace(
        params={**eqns[0].params, "branches": tuple(branches)},
        invars=[eqns[0].invars[0], *operands.values()],
        outvars=[v for eqn in eqns for v in eqn.outvars],
    )


def _once(eqns: Sequence[core.JaxprEqn], outs: Sequence[Atom]) -> tuple[list[core.JaxprEqn], list[Atom]]:
    """Equal arithmetic once: conditions inside of a branch have one predicate then."""
    same = equal_results(eqns)
    found = [e.replace(invars=[swapped(same, a) for a in e.invars]) for e in eqns if same.keys().isdisjoint(e.outvars)]
    return found, [swapped(same, a) for a in outs]
