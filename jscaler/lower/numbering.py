"""Value numbering: flatten a program's computes into runs of equations in which equal arithmetic is done once.

A backward body recomputes what it needs from its forward's inputs; where the forward ran in the same segment on the
same values, the recomputation *is* the forward, and vanishes here. (XLA would merge most of it on GPUs; on CPU it does
not.) What must be computed again is fenced by ``optimization_barrier``, whose results are new values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import Atom, fresh, literal_key, live_equations, make_jaxpr, params_key, trace_flat
from jscaler.lower.casts import Exchange, across_casts
from jscaler.lower.program import Adapt, Compute, Extend, Program, Slot

# Equations whose equal copies are kept apart.
NEVER_MERGED = frozenset({"optimization_barrier", "remat2", "checkpoint"})


@dataclass(frozen=True)
class Run:
    """Equations between two exchanges, as one jaxpr; its variables are the flat program's."""

    jaxpr: core.Jaxpr


@dataclass(frozen=True)
class FlatProgram:
    """A program without slots: runs of equations and exchanges, over variables that are assigned once.

    ``part_indices`` are the variables that hold this device's index along some mesh axes.
    """

    inputs: tuple[core.Var, ...]
    part_indices: tuple[tuple[tuple[str, ...], core.Var], ...]
    steps: tuple[Run | Exchange, ...]
    outputs: tuple[Atom, ...]

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(s for s in self.steps if isinstance(s, Exchange))


def flatten(program: Program, avals: Sequence[Any], like: core.Jaxpr) -> FlatProgram:
    """Number the values of ``program``.

    Args:
        avals: abstract values of the program's inputs, at *whole* shapes.
        like: any jaxpr, whose debug info is carried on.
    """
    numbering = _Numbering()
    inputs = []
    for (slot, layout), aval in zip(program.inputs, avals, strict=True):
        var = core.Var(aval.update(shape=layout.local_shape))
        numbering.slots[slot] = var
        inputs.append(var)
    for task in program.tasks:
        if isinstance(task, Compute):
            numbering.compute(task)
        elif isinstance(task, Extend):
            numbering.extend(task)
        else:
            numbering.adapt(task)
    outputs = tuple(numbering.slots[slot] for slot, _ in program.outputs)
    items = across_casts(numbering.items, outputs)
    return FlatProgram(tuple(inputs), tuple(numbering.indices.items()), _steps(items, outputs, like), outputs)


@dataclass
class _Numbering:
    slots: dict[Slot, Atom] = field(default_factory=dict)
    indices: dict[tuple[str, ...], core.Var] = field(default_factory=dict)
    items: list[core.JaxprEqn | Exchange] = field(default_factory=list)
    known: dict[Any, list[core.Var]] = field(default_factory=dict)
    keys: dict[int, Any] = field(default_factory=dict)

    def compute(self, task: Compute) -> None:
        atoms = [self.slots[s] for s in task.inputs]
        if task.after:
            atoms = self._wait(atoms, [self.slots[s] for s in task.after])
        atoms += [self._index(axes) for axes in task.parts]
        env: dict[core.Var, Atom] = dict(zip(task.jaxpr.invars, atoms, strict=True))
        for eqn in task.jaxpr.eqns:
            reads = [v if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, self._number(eqn, reads, task.op.source_info), strict=True))
        for slot, var in zip(task.outputs, task.jaxpr.outvars, strict=True):
            self.slots[slot] = var if isinstance(var, core.Literal) else env[var]

    def adapt(self, task: Adapt) -> None:
        source = self.slots[task.input]
        # what a backward op sums again is the sum that its forward has made
        key = ("adapter", _atom_key(source), task.adapter, task.reduce_dtype)
        if key not in self.known:
            out = core.Var(source.aval.update(shape=task.adapter.target.local_shape))
            self.items.append(Exchange(task, source, out))
            self.known[key] = [out]
        self.slots[task.output] = self.known[key][0]

    def extend(self, task: Extend) -> None:
        """Equal halos of one value are exchanged once, whatever tensors it stands for."""
        source = self.slots[task.input]
        key = ("halo", task.edges, _atom_key(source))
        if key not in self.known:
            self.known[key] = [core.Var(source.aval.update(shape=task.local_shape))]
            self.items.append(Exchange(task, source, self.known[key][0]))
        self.slots[task.output] = self.known[key][0]

    def _number(self, eqn: core.JaxprEqn, reads: list[Atom], info: Any) -> list[core.Var]:
        mergeable = not eqn.effects and eqn.primitive.name not in NEVER_MERGED
        key = (eqn.primitive, self._params(eqn), tuple(map(_atom_key, reads))) if mergeable else None
        if key is not None and key in self.known:
            return self.known[key]
        outvars = [fresh(v) for v in eqn.outvars]
        self.items.append(eqn.replace(invars=reads, outvars=outvars, source_info=info or eqn.source_info))
        if key is not None:
            self.known[key] = outvars
        return outvars

    def _params(self, eqn: core.JaxprEqn) -> Any:
        # equal layers hold the same equation objects, so their parameters are read once
        if id(eqn) not in self.keys:
            self.keys[id(eqn)] = params_key(eqn.params)
        return self.keys[id(eqn)]

    def _index(self, axes: tuple[str, ...]) -> core.Var:
        if axes not in self.indices:
            self.indices[axes] = core.Var(jax.typeof(jnp.zeros((), jnp.int32)))
        return self.indices[axes]

    def _wait(self, atoms: list[Atom], before: list[Atom]) -> list[Atom]:
        """Fence ``atoms`` behind ``before``: neither XLA nor we may run the reader first."""
        both = [a for a in (*atoms, *before) if isinstance(a, core.Var)]
        eqn = trace_flat(lambda *xs: lax.optimization_barrier(xs), [a.aval for a in both]).eqns[0]
        fenced = dict(zip(both, self._number(eqn, list(both), None), strict=True))
        return [fenced.get(a, a) if isinstance(a, core.Var) else a for a in atoms]


def _atom_key(atom: Atom) -> Any:
    return literal_key(atom) if isinstance(atom, core.Literal) else atom


def _steps(
    items: Sequence[core.JaxprEqn | Exchange], outputs: Sequence[Atom], like: core.Jaxpr
) -> tuple[Run | Exchange, ...]:
    """Cut ``items`` at the exchanges; each run hands on only what is read after it."""
    groups: list[list[core.JaxprEqn] | Exchange] = [[]]
    for item in items:
        if isinstance(item, Exchange):
            groups += [item, []]
        else:
            last = groups[-1]
            assert isinstance(last, list)
            last.append(item)
    needed = {v for v in outputs if isinstance(v, core.Var)}
    steps: list[Run | Exchange] = []
    for group in reversed(groups):
        if isinstance(group, Exchange):
            if group.output in needed:
                needed |= {v for v in (group.input,) if isinstance(v, core.Var)}
                steps.append(group)
            continue
        made = [v for e in group for v in e.outvars if v in needed]
        eqns = live_equations(group, made)
        if not eqns:
            continue
        defined = {v for e in eqns for v in e.outvars}
        reads = list(dict.fromkeys(v for e in eqns for v in e.invars if isinstance(v, core.Var) and v not in defined))
        needed |= set(reads)
        steps.append(Run(make_jaxpr(eqns, reads, made, like)))
    return tuple(steps[::-1])
