"""Value numbering: flatten a program's computes into runs of equations in which equal arithmetic is done once.

A backward body recomputes what it needs from its forward's inputs; where the forward ran in the same segment on the
same values, the recomputation *is* the forward, and vanishes here. (XLA would merge most of it on GPUs; on CPU it does
not.) What must be computed again is fenced by ``optimization_barrier``, whose results are new values.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from jscaler.capture.jaxprs import Atom, fresh, literal_key, live_equations, make_jaxpr, params_key, trace_flat
from jscaler.ir import Loop, PTensor
from jscaler.lower.before_loops import made_before_loops
from jscaler.lower.cast_at_use import cast_at_use
from jscaler.lower.casts import Exchange, across_casts
from jscaler.lower.conditions import NEVER_MERGED, merge_conditions
from jscaler.lower.in_order import in_order_p
from jscaler.lower.pairs import made_together
from jscaler.lower.program import Adapt, Compute, Extend, Program, Repeat, Slot, Task
from jscaler.lower.scopes import op_scope
from jscaler.lower.swaps import swap_dots


@dataclass(frozen=True)
class Run:
    """Equations between two exchanges, as one jaxpr; its variables are the flat program's."""

    jaxpr: core.Jaxpr


@dataclass(frozen=True)
class FlatLoop:
    """Steps of a loop's body; they may read variables of the program around it.

    Attributes:
        carries: per carry its value before the first iteration, in an iteration, at its end, and after the last.
        xs: per stack that is read the stack, and a slice.
        ys: per stack that is written a slice, and the stack.
    """

    loop: Loop
    steps: tuple["Step", ...]
    carries: tuple[tuple[Atom, core.Var, Atom, core.Var], ...]
    xs: tuple[tuple[Atom, core.Var], ...]
    ys: tuple[tuple[Atom, core.Var], ...]

    @property
    def inner(self) -> set[core.Var]:
        """What the loop defines for its body."""
        return {inside for _, inside, _, _ in self.carries} | {piece for _, piece in self.xs}

    @property
    def outvars(self) -> list[core.Var]:
        return [*(final for *_, final in self.carries), *(stack for _, stack in self.ys)]

    @property
    def returned(self) -> list[Atom]:
        """What an iteration leaves."""
        return [*(out for _, _, out, _ in self.carries), *(piece for piece, _ in self.ys)]

    @property
    def reads(self) -> list[core.Var]:
        """The variables of the program around it."""
        inner = self.inner
        found: list[Atom] = [*(init for init, *_ in self.carries), *(stack for stack, _ in self.xs), *self.returned]
        for step in self.steps:
            found += step_reads(step)
            inner |= set(step_results(step))
        return list(dict.fromkeys(v for v in found if isinstance(v, core.Var) and v not in inner))


Step = Run | Exchange | FlatLoop


def step_reads(step: Step) -> list[Atom]:
    """What a step reads."""
    if isinstance(step, Run):
        return list(step.jaxpr.invars)
    return [step.input] if isinstance(step, Exchange) else list(step.reads)


def step_results(step: Step) -> list[core.Var]:
    """What a step defines."""
    if isinstance(step, Run):
        return [v for v in step.jaxpr.outvars if isinstance(v, core.Var)]
    return [step.output] if isinstance(step, Exchange) else step.outvars


@dataclass(frozen=True)
class Origins:
    """Where the values of a flat program come from.

    Attributes:
        op: a variable -> the path of the op that made it; of merged ones the first.
        tensor: a variable -> the (first) tensor of the graph that it is a part of.
        done: the path of an op -> which equations of its local body were not done before.
    """

    op: Mapping[core.Var, str] = field(default_factory=dict)
    tensor: Mapping[core.Var, PTensor] = field(default_factory=dict)
    done: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlatProgram:
    """A program without slots: runs of equations and exchanges, over variables that are assigned once.

    ``part_indices`` are the variables that hold this device's index along some mesh axes.
    """

    inputs: tuple[core.Var, ...]
    part_indices: tuple[tuple[tuple[str, ...], core.Var], ...]
    steps: tuple[Step, ...]
    outputs: tuple[Atom, ...]
    origins: Origins = field(default_factory=Origins, compare=False, repr=False)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges in order, those in loops once."""
        return tuple(exchange for _, exchange in numbered_exchanges(self.steps))


def numbered_exchanges(steps: Sequence[Step], prefix: str = "") -> Iterator[tuple[str, Exchange]]:
    """The exchanges of steps and of the loops among them, and the number of each step: ``3``, or ``3.2`` in a loop."""
    for number, step in enumerate(steps):
        if isinstance(step, Exchange):
            yield f"{prefix}{number}", step
        elif isinstance(step, FlatLoop):
            yield from numbered_exchanges(step.steps, f"{prefix}{number}.")


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
    numbering.run(program.tasks, like)
    outputs = tuple(numbering.slots[slot] for slot, _ in program.outputs)
    items = _tidied(numbering.items, outputs, like)
    steps = _steps(items, outputs, like)
    origins = Origins(numbering.makers, numbering.tensors, numbering.done)
    return FlatProgram(tuple(inputs), tuple(numbering.indices.items()), steps, outputs, origins)


Item = core.JaxprEqn | Exchange | FlatLoop


@dataclass
class _Numbering:
    slots: dict[Slot, Atom] = field(default_factory=dict)
    indices: dict[tuple[str, ...], core.Var] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    known: ChainMap[Any, list[core.Var]] = field(default_factory=lambda: ChainMap())
    keys: dict[int, Any] = field(default_factory=dict)
    makers: dict[core.Var, str] = field(default_factory=dict)
    tensors: dict[core.Var, PTensor] = field(default_factory=dict)
    done: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    fenced: dict[str, tuple[str | None, dict[core.Var, core.Var]]] = field(default_factory=dict)  # what an op reads late

    def run(self, tasks: Sequence[Task], like: core.Jaxpr) -> None:
        for task in tasks:
            if isinstance(task, Compute):
                self.compute(task)
            elif isinstance(task, Adapt):
                self.adapt(task)
            elif isinstance(task, Extend):
                self.extend(task)
            else:
                self.repeat(task, like)

    def repeat(self, task: Repeat, like: core.Jaxpr) -> None:
        """A loop. Its body knows the values of the program around it (but what is made of nothing); that not the body's."""
        inits = [self.slots[init] for init, *_ in task.carries]
        stacks = [self.slots[stack] for stack, _ in task.xs]
        if task.after:
            fenced = self._wait([*inits, *stacks], [self.slots[s] for s in task.after])
            inits, stacks = ([fenced.get(a, a) if isinstance(a, core.Var) else a for a in g] for g in (inits, stacks))
        inside = [core.Var(a.aval.update(weak_type=False)) for a in inits]
        pieces = [core.Var(a.aval.update(shape=_shape(a)[1:], weak_type=False)) for a in stacks]
        self.slots.update(zip((slot for _, slot, _, _ in task.carries), inside, strict=True))
        self.slots.update(zip((slot for _, slot in task.xs), pieces, strict=True))
        outside, self.items, self.known = self.items, [], self.known.new_child()
        self.run(task.tasks, like)
        outs = [self.slots[out] for _, _, out, _ in task.carries]
        written = [self.slots[piece] for piece, _ in task.ys]
        items = _tidied(self.items, [*outs, *written], like, bool(task.loop.time))
        self.items, self.known = outside, self.known.parents
        finals = [core.Var(v.aval) for v in inside]
        length = task.loop.length
        made = [core.Var(a.aval.update(shape=(length, *_shape(a)), weak_type=False)) for a in written]
        self.slots.update(zip(task.outputs, (*finals, *made), strict=True))
        self._hold(task.loop.results, task.outputs)
        self.items.append(
            FlatLoop(
                task.loop,
                _steps(items, [*outs, *written], like),
                tuple(zip(inits, inside, outs, finals, strict=True)),
                tuple(zip(stacks, pieces, strict=True)),
                tuple(zip(written, made, strict=True)),
            )
        )

    def compute(self, task: Compute) -> None:
        atoms = self._late(task, [self.slots[s] for s in task.inputs])
        atoms += [self._index(axes) for axes in task.parts]
        env: dict[core.Var, Atom] = dict(zip(task.jaxpr.invars, atoms, strict=True))
        scope = source_info_util.new_name_stack(op_scope(task.op))
        done = []
        for eqn in task.jaxpr.eqns:
            reads = [v if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            info = task.op.source_info or eqn.source_info
            before = len(self.items)
            made = self._number(eqn, reads, info.replace(name_stack=scope))
            env.update(zip(eqn.outvars, made, strict=True))
            done.append(len(self.items) > before)
            if done[-1]:
                self.makers.update(dict.fromkeys(made, task.op.path))
        self.done[task.op.path] = tuple(done)
        for slot, var in zip(task.outputs, task.jaxpr.outvars, strict=True):
            self.slots[slot] = var if isinstance(var, core.Literal) else env[var]
        self._hold(task.op.outputs, task.outputs)

    def _hold(self, tensors: Sequence[PTensor], slots: Sequence[Slot]) -> None:
        for tensor, slot in zip(tensors, slots, strict=True):
            atom = self.slots[slot]
            if isinstance(atom, core.Var):
                self.tensors.setdefault(atom, tensor)

    def adapt(self, task: Adapt) -> None:
        source = self.slots[task.input]
        # what a backward op sums again is the sum that its forward has made
        key = ("adapter", _atom_key(source), task.adapter, task.reduce_dtype)
        if key not in self.known:
            out = core.Var(source.aval.update(shape=task.adapter.target.local_shape))
            self.items.append(Exchange(task, source, out))
            self.known[key] = [out]
        self.slots[task.output] = self.known[key][0]
        self._hold([task.tensor], [task.output])

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
        known = self.known.maps[0] if eqn.primitive.name in _MADE_OF_NOTHING else self.known
        if key is not None and key in known:
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

    def _late(self, task: Compute, atoms: list[Atom]) -> list[Atom]:
        """What the op of ``task`` reads: behind a fence where an order was asked for; its backward reads the same there.

        So that what the backward computes again is still what the forward has computed.
        """
        if task.after:
            fenced = self._wait(atoms, [self.slots[s] for s in task.after])
            self.fenced[task.op.path] = task.op.loop, fenced
            return [fenced.get(a, a) if isinstance(a, core.Var) else a for a in atoms]
        if task.op.forward is not None:
            place, fenced = self.fenced.get(task.op.forward.path, (None, {}))
            if place == task.op.loop:
                return [fenced.get(a, a) if isinstance(a, core.Var) else a for a in atoms]
        return atoms

    def _wait(self, atoms: Sequence[Atom], before: Sequence[Atom]) -> dict[core.Var, core.Var]:
        """Fence ``atoms`` behind ``before``: neither XLA nor we may run the reader first."""
        reads, made = (list(dict.fromkeys(a for a in group if isinstance(a, core.Var))) for group in (atoms, before))
        if not reads or not made:
            return {}
        eqn = trace_flat(lambda *xs: in_order_p.bind(*xs, late=len(reads)), [a.aval for a in (*reads, *made)]).eqns[0]
        return dict(zip(reads, self._number(eqn, [*reads, *made], None), strict=False))


# A loop makes these again: what it reads of the program around it lies in memory while it runs, and not in a register. A
# device's counts for random bits, for one, are as large as what is drawn.
_MADE_OF_NOTHING = ("iota", "broadcast_in_dim")


def _tidied(items: Sequence[Item], outputs: Sequence[Atom], like: core.Jaxpr, in_time: bool = False) -> list[Item]:
    found = across_casts(swap_dots(items, outputs), outputs)
    fences = {id(e) for e in found if isinstance(e, core.JaxprEqn) and e.primitive.name == "optimization_barrier"}
    found = merge_conditions(made_before_loops(made_together(found, outputs, in_time), outputs, fences))
    return cast_at_use(found, outputs, partial(_cast_run, like))


def _cast_run(like: core.Jaxpr, casts: Sequence[core.JaxprEqn]) -> Run:
    """Casts of one variable each, as a step."""
    reads = [v for eqn in casts for v in eqn.invars if isinstance(v, core.Var)]
    return Run(make_jaxpr(casts, reads, [eqn.outvars[0] for eqn in casts], like))


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape"))  # noqa: B009


def _atom_key(atom: Atom) -> Any:
    return literal_key(atom) if isinstance(atom, core.Literal) else atom


def _steps(items: Sequence[Item], outputs: Sequence[Atom], like: core.Jaxpr) -> tuple[Step, ...]:
    """Cut ``items`` at the exchanges and loops; each run hands on only what is read after it."""
    groups: list[list[core.JaxprEqn] | Exchange | FlatLoop] = [[]]
    for item in items:
        if isinstance(item, (Exchange, FlatLoop)):
            groups += [item, []]
        else:
            last = groups[-1]
            assert isinstance(last, list)
            last.append(item)
    needed = {v for v in outputs if isinstance(v, core.Var)}
    steps: list[Step] = []
    for group in reversed(groups):
        if isinstance(group, (Exchange, FlatLoop)):
            step = _pruned(group, needed, like) if isinstance(group, FlatLoop) else group
            if (step is not None and needed & set(step_results(step))) or _has_effects(step):
                assert step is not None
                needed |= {v for v in step_reads(step) if isinstance(v, core.Var)}
                steps.append(step)
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


def _has_effects(step: Step | None) -> bool:
    if isinstance(step, FlatLoop):
        return any(map(_has_effects, step.steps))
    return isinstance(step, Run) and bool(step.jaxpr.effects)


def _pruned(step: FlatLoop, needed: set[core.Var], like: core.Jaxpr) -> FlatLoop:
    """A loop without the stacks that nobody reads, nor what only they need."""
    ys = tuple((piece, stack) for piece, stack in step.ys if stack in needed)
    if len(ys) == len(step.ys):
        return step
    return dataclasses.replace(
        step, ys=ys, steps=trimmed(step.steps, [*(out for _, _, out, _ in step.carries), *(p for p, _ in ys)], like)
    )


def trimmed(steps: Sequence[Step], outputs: Sequence[Atom], like: core.Jaxpr) -> tuple[Step, ...]:
    """``steps`` without what ``outputs`` do not need."""
    items: list[Item] = []
    for step in steps:
        items += step.jaxpr.eqns if isinstance(step, Run) else [step]
    return _steps(items, outputs, like)
