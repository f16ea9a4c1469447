"""An op on one part of a factor alone, as if the model had been traced on that part: a micro-batch has a mean of its own.

    whole, 8 rows      m = sum_b x / 8      y = x - m         m is one for all rows
    two parts          m' = sum_b x' / 4    y' = x' - m'      each has its own m'; y' is a part of y, and m' of nothing

A sum over the factor that is divided by how many it adds up is a mean, and is divided by the part's count, be it in
another op. All other numbers of a program stay as they are. What depends on a sum beyond what is linear is each part's
*own*. If it leaves the op for good (an auxiliary loss), what leaves is the mean over the parts.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import CALLS, CUSTOM_CALLS, Atom, Inliner, flatten, make_jaxpr, shape
from jscaler.lax_primitives import known
from jscaler.rules.analysed import Analysis
from jscaler.rules.analysis import analyse
from jscaler.rules.factor_states import INDEPENDENT, SPLIT, Blocked, Leaves, State, advance, own_state

OWN = "own"
Whole = Literal["", "sum", "mean", "mixed"]  # what the parts of a result that is no part of a whole make of one
Place = tuple[int, int, int]  # of a factor: operand, dim, and which of the dim's sub-dims


class HiddenCountError(Exception):
    """A mean is taken inside a function with a derivative of its own, whose program stays as it is."""


@dataclass(frozen=True)
class Undivided:
    """What is made of a sum over the factor, and has not been divided by how many that adds up.

    Attributes:
        counts: the numbers that make a mean of it.
        others: how many other things were added up last: by that it is their mean.
    """

    counts: frozenset[int]
    others: int = 1


@dataclass(frozen=True)
class OwnCounts:
    """A program whose means over a factor divide by a part's count.

    Attributes:
        jaxpr: still at the whole's shapes.
        wholes: by result what the parts' values are to be joined by, should it leave for good; nothing to join is "".
        undivided: the results that whoever reads them may make a mean of.
    """

    jaxpr: core.Jaxpr
    wholes: tuple[Whole, ...]
    undivided: Mapping[int, Undivided]


def with_own_counts(
    jaxpr: core.Jaxpr,
    place: Place | None,
    parts: int,
    owned: Set[int] = frozenset(),
    undivided: Mapping[int, Undivided] | None = None,
) -> OwnCounts:
    """``jaxpr`` on one of ``parts`` alone; ``place`` is the factor's, and None behind the parts, where it has none.

    Args:
        owned: the operands that each part has for itself.
        undivided: those among them that are still to be divided by a count.

    Raises:
        HiddenCountError: one of its means stands where it cannot be changed.
    """
    inliner = _Marked(CALLS | CUSTOM_CALLS)
    analysis = analyse(flatten(jaxpr, (), inliner))
    given = {analysis.jaxpr.invars[i]: one for i, one in (undivided or {}).items()}
    if place is None:
        counts = _Counts(analysis, None, parts, given)
        wholes: tuple[Whole, ...] = ("",) * len(jaxpr.outvars)
    else:
        operand, dim, sub = place
        leaf = analysis.leaves(analysis.jaxpr.invars[operand])[dim][sub]
        counts = _Counts(analysis, leaf, parts, given)
        before = [OWN if i in owned else own_state(analysis, (leaf,), v) for i, v in enumerate(analysis.jaxpr.invars)]
        wholes = _wholes(analysis, _states_alone(analysis, (leaf,), before), counts.changes.keys())
    table: dict[int, core.JaxprEqn] = {}
    for var, (position, literal) in counts.changes.items():
        original = inliner.source[var]
        operands = list(original.invars)
        operands[position] = literal
        table[id(original)] = original.replace(invars=operands)
    if not table.keys() <= set(map(id, jaxpr.eqns)):
        raise HiddenCountError
    made = make_jaxpr([table.get(id(e), e) for e in jaxpr.eqns], jaxpr.invars, jaxpr.outvars, jaxpr)
    return OwnCounts(made, wholes, counts.left())


def _wholes(analysis: Analysis, states: Mapping[core.Var, State], means: Set[core.Var]) -> tuple[Whole, ...]:
    """What each result leaves as: what is linear in sums over the rows adds up, once more divided where it divides."""
    kinds: dict[core.Var, Whole] = {}
    for eqn in analysis.jaxpr.eqns:
        terms: list[Whole] = list({kinds[v] for v in eqn.invars if isinstance(v, core.Var) and v in kinds})
        for var in eqn.outvars:
            if states[var] == OWN or var in means:
                kinds[var] = "mean"
            elif states[var] == "add" and len(terms) < 2:
                kinds[var] = terms[0] if terms else "sum"
            elif states[var] not in (SPLIT, INDEPENDENT):
                kinds[var] = "mixed"
    return tuple(kinds.get(v, "") if isinstance(v, core.Var) else "" for v in analysis.jaxpr.outvars)


class _Marked(Inliner):
    """An inliner that remembers which equation each of the flat list comes from."""

    def __init__(self, calls: frozenset[str]):
        super().__init__(calls)
        self.source: dict[core.Var, core.JaxprEqn] = {}

    def _equation(self, eqn: core.JaxprEqn, env: dict[core.Var, Atom], stack: Any) -> None:
        super()._equation(eqn, env, stack)
        if eqn.primitive.name not in self.calls and self.eqns and self.eqns[-1].outvars:
            self.source[self.eqns[-1].outvars[0]] = eqn


class _Counts:
    """Finds where a sum over ``leaf``, or one that is ``given`` undivided, is divided by its count.

    Attributes:
        changes: by the result of an equation which operand of it becomes which number.
    """

    def __init__(self, analysis: Analysis, leaf: int | None, parts: int, given: Mapping[core.Var, Undivided]):
        self.analysis = analysis
        self.leaf = leaf
        self.parts = parts
        self.added: dict[core.Var, int] = {}  # how many are added up in what is not summed over the leaf yet
        self.undivided = dict(given)
        self.constant: dict[core.Var, core.Literal] = {}
        self.changes: dict[core.Var, tuple[int, core.Literal]] = {}
        for index, eqn in enumerate(analysis.jaxpr.eqns):
            if not eqn.outvars:
                continue
            change = self._mean(eqn)
            if change is not None:
                self.changes[eqn.outvars[0]] = change
            else:
                self._pass(index, eqn)

    def left(self) -> dict[int, Undivided]:
        """The program's results that are undivided."""
        results = enumerate(self.analysis.jaxpr.outvars)
        return {i: self.undivided[v] for i, v in results if isinstance(v, core.Var) and v in self.undivided}

    def _mean(self, eqn: core.JaxprEqn) -> tuple[int, core.Literal] | None:
        if eqn.primitive.name not in ("div", "mul"):
            return None
        divides = eqn.primitive.name == "div"
        for position in (1,) if divides else (1, 0):
            source, literal = eqn.invars[1 - position], self._literal(eqn.invars[position])
            found = self.undivided.get(source) if isinstance(source, core.Var) else None
            if literal is not None and found is not None:
                others = _is_number(literal, found.others, divides)
                now = None if others else self._own(literal, found.counts, divides)
                if now is not None:
                    kind = literal.aval.dtype  # type: ignore[attr-defined]
                    aval = literal.aval.update(shape=())  # type: ignore[attr-defined]
                    return position, core.Literal(np.asarray(now, kind)[()], aval)
        return None

    def _own(self, literal: core.Literal, counts: frozenset[int], divides: bool) -> float | None:
        """The part's number in place of the whole's; one less is the count of an unbiased variance."""
        for less in (0, 1):
            for count in sorted(counts, reverse=True):
                own = count // self.parts - less
                if count - less > 1 and _is_number(literal, count - less, divides):
                    return own if divides else 1 / own if own else math.inf
        return None

    def _literal(self, atom: Atom) -> core.Literal | None:
        found = atom if isinstance(atom, core.Literal) else self.constant.get(atom)
        return found if found is not None and np.ndim(found.val) == 0 else None

    def _pass(self, index: int, eqn: core.JaxprEqn) -> None:
        one, out = known(eqn.primitive), eqn.outvars[0]
        operands = [v for v in eqn.invars if isinstance(v, core.Var)]
        fold = np.asarray if one.role == "moves" else one.numpy
        if fold is not None and (literals := [self._literal(v) for v in eqn.invars]) and None not in literals:
            aval = out.aval.update(shape=())  # type: ignore[attr-defined]
            # a count may be written beside a literal: ``jnp.var`` subtracts its ``ddof`` in the program
            value = fold(*(literal.val for literal in literals if literal is not None))
            self.constant[out] = core.Literal(np.asarray(value, aval.dtype)[()], aval)
        carried = any(self.leaf in leaves for leaves in self.analysis.leaves(out)) if shape(out) else False
        reduced = self.analysis.atoms.leaves(list(self.analysis.reduced[index]))
        sizes = {leaf: self.analysis.atoms.size[leaf] for leaf in reduced}
        whole = math.prod(sizes.values())
        before = math.prod(self.added.get(v, 1) for v in operands)
        if self.leaf in sizes and one.combiner == "add":
            self.undivided[out] = Undivided(frozenset({whole, whole * before, sizes[self.leaf]}))
        elif one.counts:
            sums = [self.undivided[v] for v in operands[: 1 if one.name == "div" else 2] if v in self.undivided]
            counts = frozenset[int]().union(*(s.counts for s in sums))
            if counts and not carried:
                others = whole if whole > 1 else max(s.others for s in sums)
                self.undivided[out] = Undivided(counts | {n * whole for n in counts}, others)
            elif not counts and before * whole > 1:
                self.added[out] = before * whole


def _is_number(literal: core.Literal, number: int, divides: bool) -> bool:
    """Whether dividing (or multiplying) by ``literal`` divides by ``number``, if that is more than 1."""
    kind = literal.aval.dtype  # type: ignore[attr-defined]
    return number > 1 and bool(np.asarray(literal.val) == np.asarray(number if divides else 1 / number, kind))


def results_alone(analysis: Analysis, split: Leaves, given: Sequence[State]) -> list[State]:
    """The states of a program's results if each part of ``split`` runs alone; ``given`` are those of its inputs.

    Raises:
        Blocked: it cannot run so.
    """
    states = _states_alone(analysis, split, given)
    return [states[v] if isinstance(v, core.Var) else INDEPENDENT for v in analysis.jaxpr.outvars]


def _states_alone(analysis: Analysis, split: Leaves, given: Sequence[State]) -> dict[core.Var, State]:
    states: dict[core.Var, State] = dict(zip(analysis.jaxpr.invars, given, strict=True))
    for index, eqn in enumerate(analysis.jaxpr.eqns):
        before = [states[v] if isinstance(v, core.Var) else INDEPENDENT for v in eqn.invars]
        own = OWN in before
        before = [INDEPENDENT if s == OWN else s for s in before]
        try:
            after = advance(analysis, index, split, before)
        except Blocked:  # a sum meets what is not linear in it: from here on it is the part's own
            own = own or any(s not in (SPLIT, INDEPENDENT) for s in before)
            after = advance(analysis, index, split, [s if s == SPLIT else INDEPENDENT for s in before])
        states.update(zip(eqn.outvars, (OWN if own and s == INDEPENDENT else s for s in after), strict=True))
    return states
