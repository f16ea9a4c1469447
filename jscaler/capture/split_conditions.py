"""Cut a ``cond`` into one for each group of results that share work.

``optax.MultiSteps`` and ``apply_if_finite`` put the whole state behind one condition. Results that share nothing inside
the branches become equations of their own, so that each leaf is an op that is split by its own factors.

A number that all leaves share (the global norm of a clip) would hold them together. As elsewhere, a reduction to a scalar
ends an op: in an update it is handed out of its branch by a condition of its own, whose other branches give zero, and the
conditions behind it read it::

    cond(p, {n = √(Σa² + Σb²); a/n, b/n})    becomes    cond(p, Σa²)  cond(p, Σb²)      shares, joined between devices
                                                        cond(p, √(… + …))               numbers
                                                        cond(p, a/n)  cond(p, b/n)      leaf by leaf

What a handed number and a result both need (a cast) is computed for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import (
    CALLS,
    Atom,
    dtype,
    fresh,
    inline,
    make_jaxpr,
    open_jaxpr,
    shape,
    trace_flat,
)  # fmt: skip
from jscaler.ir.walk import Sets, closure
from jscaler.lax_primitives import contracts


def split_cond(eqn: core.JaxprEqn, staged: bool = False) -> list[core.JaxprEqn]:
    """``eqn``, or the several conditions that compute the same.

    Args:
        staged: whether numbers are handed out of the branches: where no gradient flows.
    """
    if eqn.primitive.name != "cond" or eqn.effects or (len(eqn.outvars) < 2 and not staged):
        return [eqn]
    branches = [open_jaxpr(closed) for closed in eqn.params["branches"]]
    if any(consts for _, consts in branches):
        return [eqn]
    programs = [_Branch(_opened(jaxpr, staged), staged) for jaxpr, _ in branches]
    groups = _result_groups(programs, len(eqn.outvars))
    handed = [(k, group) for k, branch in enumerate(programs) for group in branch.groups()]
    if len(groups) + len(handed) == 1:
        return [eqn]
    writer = _Writer(eqn, programs)
    made = [writer.handing(k, group) for k, group in handed]
    return made + [writer.of_results(group) for group in groups]


def _opened(jaxpr: core.Jaxpr, staged: bool) -> core.Jaxpr:
    """A branch without calls, its own conditions cut too."""
    program = inline(jaxpr, CALLS)
    if not staged or not any(e.primitive.name == "cond" for e in program.eqns):
        return program
    eqns = [piece for e in program.eqns for piece in split_cond(e, staged)]
    return make_jaxpr(eqns, program.invars, program.outvars, program)


class _Branch:
    """A branch's program, and the values that it hands out to be read by later conditions."""

    def __init__(self, program: core.Jaxpr, staged: bool):
        self.program = program
        self.maker = {v: e for e in program.eqns for v in e.outvars}
        self.deep: set[core.Var] = set()  # what depends on more than numbers
        self.readers: dict[core.Var, list[core.JaxprEqn]] = {}
        for eqn in program.eqns:
            for v in (v for v in eqn.invars if isinstance(v, core.Var)):
                self.readers.setdefault(v, []).append(eqn)
            if not _is_cheap(eqn) or any(v in self.deep for v in eqn.invars if isinstance(v, core.Var)):
                self.deep.update(eqn.outvars)
        self.handed = {v for v in self.maker if staged and self._is_handed(v)}
        self.level: dict[core.Var, int] = {}
        for eqn in program.eqns:
            level = max((self._level_at(eqn, v) for v in eqn.invars if isinstance(v, core.Var)), default=0)
            self.level.update(dict.fromkeys(eqn.outvars, level))

    def _is_handed(self, var: core.Var) -> bool:
        """Numbers where tensors become them and where tensors read them, and what is dear to compute."""
        eqn, readers = self.maker[var], self.readers.get(var, ())
        if not readers or var not in self.deep or not _has_zero(var):
            return False
        if _is_cheap(eqn):
            return any(not _is_cheap(reader) for reader in readers)
        return not shape(var) or _is_dear(eqn)

    def _stops(self, eqn: core.JaxprEqn, var: core.Var) -> bool:
        """Whether ``eqn`` reads ``var`` as it was handed out; numbers made of handed ones are computed again."""
        return var in self.handed and not (_is_cheap(eqn) and _is_cheap(self.maker[var]))

    def _level_at(self, eqn: core.JaxprEqn, var: core.Var) -> int:
        return self.level.get(var, 0) + self._stops(eqn, var)

    def needed(self, atom: Atom, handing: bool = False) -> list[core.JaxprEqn]:
        """The equations that a result, or a value to be handed out, is made of."""
        if not isinstance(atom, core.Var) or atom not in self.maker or (atom in self.handed and not handing):
            return []

        def operands(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
            read = (v for v in eqn.invars if isinstance(v, core.Var) and v in self.maker and not self._stops(eqn, v))
            return [self.maker[v] for v in read]

        return list(closure([self.maker[atom]], operands))

    def holds_together(self, eqn: core.JaxprEqn) -> bool:
        """Whether results that need ``eqn`` stay together: numbers made of numbers alone are cheap to compute again."""
        reads = [v for v in eqn.invars if isinstance(v, core.Var)]
        return (bool(reads) or _is_dear(eqn)) and eqn.outvars[0] in self.deep

    def groups(self) -> list[list[core.Var]]:
        """What is handed out together, in an order in which nothing is read before it is made."""
        handed = [v for v in self.maker if v in self.handed]
        found = Sets[int]()
        reached: dict[tuple[int, int], int] = {}
        for i, var in enumerate(handed):
            for eqn in filter(self.holds_together, self.needed(var, handing=True)):
                found.join(i, reached.setdefault((self.level[var], id(eqn)), i))
        groups = [[handed[i] for i in group] for group in found.among(range(len(handed)))]
        return sorted(groups, key=lambda group: self.level[group[0]])


def _result_groups(programs: Sequence[_Branch], count: int) -> list[list[int]]:
    """Results that share work in some branch."""
    found = Sets[int]()
    for branch in programs:
        reached: dict[int, int] = {}
        for result, atom in enumerate(branch.program.outvars):
            for eqn in filter(branch.holds_together, branch.needed(atom)):
                found.join(result, reached.setdefault(id(eqn), result))
    return found.among(range(count))


def _has_inner(eqn: core.JaxprEqn) -> bool:
    return any(True for _ in core.jaxprs_in_params(eqn.params))


def _is_cheap(eqn: core.JaxprEqn) -> bool:
    return not _has_inner(eqn) and not any(shape(v) for v in (*eqn.invars, *eqn.outvars))


def _is_dear(eqn: core.JaxprEqn) -> bool:
    return contracts([eqn]) or (_has_inner(eqn) and eqn.primitive.name != "cond")


def _has_zero(var: core.Var) -> bool:
    return jnp.issubdtype(dtype(var), jnp.number) or dtype(var) == jnp.bool_  # keys have none


@dataclass
class _Writer:
    """Writes the conditions that stand for ``eqn``; ``outer`` are the variables of what was handed out."""

    eqn: core.JaxprEqn
    programs: Sequence[_Branch]
    outer: dict[core.Var, core.Var] = field(default_factory=dict)

    def handing(self, branch: int, group: Sequence[core.Var]) -> core.JaxprEqn:
        """The condition that hands ``group`` out of ``branch``; the other branches give zeros."""
        made = []
        for k, one in enumerate(self.programs):
            if k == branch:
                made.append(([e for v in group for e in one.needed(v, handing=True)], list[Atom](group)))
            else:
                made.append(_zeros(group))
        outvars = [fresh(v) for v in group]
        done = self._condition(made, outvars)
        self.outer.update(zip(group, outvars, strict=True))
        return done

    def of_results(self, group: Sequence[int]) -> core.JaxprEqn:
        """The condition for the results ``group``."""
        outs = [[one.program.outvars[i] for i in group] for one in self.programs]
        made = [([e for a in atoms for e in one.needed(a)], atoms) for one, atoms in zip(self.programs, outs, strict=True)]
        return self._condition(made, [self.eqn.outvars[i] for i in group])

    def _condition(
        self, made: Sequence[tuple[list[core.JaxprEqn], list[Atom]]], outvars: Sequence[core.Var]
    ) -> core.JaxprEqn:
        """A condition with these equations and results per branch."""
        bodies = [_in_order(one.program, eqns) for one, (eqns, _) in zip(self.programs, made, strict=True)]
        reads: set[core.Var] = set()
        for eqns, (_, atoms) in zip(bodies, made, strict=True):
            defined = {v for e in eqns for v in e.outvars}
            every = (*atoms, *(v for e in eqns for v in e.invars))
            reads |= {v for v in every if isinstance(v, core.Var) and v not in defined}
        given = range(len(self.eqn.invars) - 1)
        used = [k for k in given if any(one.program.invars[k] in reads for one in self.programs)]
        handed = [v for v in self.outer if v in reads]
        branches = []
        for one, eqns, (_, atoms) in zip(self.programs, bodies, made, strict=True):
            own = [v if v in one.handed else fresh(v) for v in handed]
            invars = [*(one.program.invars[k] for k in used), *own]
            branches.append(core.ClosedJaxpr(make_jaxpr(eqns, invars, atoms, one.program), []))
        invars = [self.eqn.invars[0], *(self.eqn.invars[1 + k] for k in used), *(self.outer[v] for v in handed)]
        params = {**self.eqn.params, "branches": tuple(branches)}
        return self.eqn.replace(params=params, invars=invars, outvars=list(outvars))


def _in_order(program: core.Jaxpr, eqns: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """``eqns`` as they stand in ``program``, each once; others stay as they are."""
    chosen = {id(e): e for e in eqns}
    own = [e for e in program.eqns if chosen.pop(id(e), None) is not None]
    return [*chosen.values(), *own]


def _zeros(like: Sequence[core.Var]) -> tuple[list[core.JaxprEqn], list[Atom]]:
    eqns: list[core.JaxprEqn] = []
    atoms: list[Atom] = []
    for var in like:
        if shape(var):
            made = trace_flat(lambda var=var: [jnp.zeros(shape(var), dtype(var))], [])
            eqns += made.eqns
            atoms += made.outvars
        else:
            atoms.append(core.Literal(np.zeros((), dtype(var)), var.aval))
    return eqns, atoms
