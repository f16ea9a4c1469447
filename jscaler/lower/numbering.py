"""Value numbering: flatten a program's computes into runs of equations in which equal arithmetic is done once.

A backward body recomputes what it needs from its forward's inputs; where the forward ran in the same segment on the
same values, the recomputation *is* the forward, and vanishes here. (XLA would merge most of it on GPUs; on CPU it does
not.) What must be computed again is fenced by ``optimization_barrier``, whose results are new values.
"""

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from jscaler.capture.jaxprs import Atom, fresh, literal_key, params_key, shape, swapped, trace_flat
from jscaler.ir import PTensor
from jscaler.lax_primitives import known, may_merge
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item, Origins
from jscaler.lower.in_order import in_order_p
from jscaler.lower.members import Members
from jscaler.lower.program import Adapt, Compute, Extend, Program, Repeat, Slot, Task
from jscaler.lower.scopes import op_scope


class Keys:
    """Numbers for what equations do: equal where primitive and parameters, or literals, are. Equal ops hold the same
    objects, which are looked at once, for all programs of a step."""

    def __init__(self) -> None:
        self._number: dict[Any, int] = {}
        self._known: dict[int, tuple[Any, int | None]] = {}  # by identity of what is kept here, too

    def equation(self, eqn: core.JaxprEqn) -> int | None:
        """That of an equation; None where it is not merged with its equals."""
        if id(eqn) not in self._known:
            number = self._of((eqn.primitive, params_key(eqn.params))) if may_merge(eqn) else None
            self._known[id(eqn)] = eqn, number
        return self._known[id(eqn)][1]

    def atom(self, atom: Atom) -> Any:
        """A variable, or the number of a literal."""
        if not isinstance(atom, core.Literal):
            return atom
        if id(atom) not in self._known:
            self._known[id(atom)] = atom, self._of(literal_key(atom))
        return self._known[id(atom)][1]

    def _of(self, key: Any) -> int:
        return self._number.setdefault(key, len(self._number))


def flatten(program: Program, like: core.Jaxpr, keys: Keys | None = None) -> FlatProgram:
    """Number the values of ``program``; the debug info of ``like``, any jaxpr, is carried on.

    Args:
        keys: those of other programs of the step.
    """
    numbering = _Numbering(keys or Keys())
    inputs = []
    for (slot, layout), tensor in zip(program.inputs, program.tensors, strict=True):
        var = core.Var(tensor.aval.update(shape=layout.local_shape))
        numbering.slots[slot] = var
        inputs.append(var)
    numbering.run(program.tasks)
    outputs = tuple(numbering.slots[slot] for slot, _ in program.outputs)
    origins = Origins(numbering.makers, numbering.tensors, numbering.done)
    indices = tuple(numbering.indices.items())
    return FlatProgram(tuple(inputs), indices, tuple(numbering.items), outputs, like, origins)


@dataclass
class _Numbering:
    keys: Keys
    slots: dict[Slot, Atom] = field(default_factory=dict)
    indices: dict[Members, core.Var] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    known: ChainMap[Any, list[core.Var]] = field(default_factory=lambda: ChainMap())
    makers: dict[core.Var, str] = field(default_factory=dict)
    tensors: dict[core.Var, PTensor] = field(default_factory=dict)
    done: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    fenced: dict[str, tuple[str | None, dict[core.Var, core.Var]]] = field(default_factory=dict)  # what an op reads late

    def run(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if isinstance(task, Compute):
                self.compute(task)
            elif isinstance(task, Adapt):
                self.adapt(task)
            elif isinstance(task, Extend):
                self.extend(task)
            else:
                self.repeat(task)

    def repeat(self, task: Repeat) -> None:
        """A loop. Its body knows the values of the program around it (but what is made of nothing); that not the body's."""
        inits = [self.slots[init] for init, *_ in task.carries]
        stacks = [self.slots[stack] for stack, _ in task.xs]
        if task.after:
            fenced = self._wait([*inits, *stacks], [self.slots[s] for s in task.after])
            inits, stacks = ([swapped(fenced, a) for a in group] for group in (inits, stacks))
        inside = [core.Var(a.aval.update(weak_type=False)) for a in inits]
        pieces = [core.Var(a.aval.update(shape=shape(a)[1:], weak_type=False)) for a in stacks]
        self.slots.update(zip((slot for _, slot, _, _ in task.carries), inside, strict=True))
        self.slots.update(zip((slot for _, slot in task.xs), pieces, strict=True))
        outside, self.items, self.known = self.items, [], self.known.new_child()
        self.run(task.tasks)
        outs = [self.slots[out] for _, _, out, _ in task.carries]
        written = [self.slots[piece] for piece, _ in task.ys]
        items, self.items, self.known = tuple(self.items), outside, self.known.parents
        finals = [core.Var(v.aval) for v in inside]
        length = task.loop.length
        made = [core.Var(a.aval.update(shape=(length, *shape(a)), weak_type=False)) for a in written]
        self.slots.update(zip(task.outputs, (*finals, *made), strict=True))
        self._hold(task.loop.results, task.outputs)
        self.items.append(
            FlatLoop(
                task.loop,
                items,
                tuple(zip(inits, inside, outs, finals, strict=True)),
                tuple(zip(stacks, pieces, strict=True)),
                tuple(zip(written, made, strict=True)),
            )
        )

    def compute(self, task: Compute) -> None:
        atoms = self._late(task, [self.slots[s] for s in task.inputs])
        atoms += [self._index(who) for who in task.parts]
        env: dict[core.Var, Atom] = dict(zip(task.jaxpr.invars, atoms, strict=True))
        scope, info = source_info_util.new_name_stack(op_scope(task.op)), task.op.source_info
        info = info and info.replace(name_stack=scope)
        done = []
        for eqn in task.jaxpr.eqns:
            reads = [v if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            before = len(self.items)
            made = self._number(eqn, reads, info, scope)
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
        # what a backward op sums again is the sum that its forward has made
        self._exchange(task, task.adapter.target.local_shape, "adapter", task.adapter, task.reduce_dtype)
        self._hold([task.tensor], [task.output])

    def extend(self, task: Extend) -> None:
        """Equal halos of one value are exchanged once, whatever tensors it stands for."""
        self._exchange(task, task.local_shape, "halo", task.edges)

    def _exchange(self, task: Adapt | Extend, local_shape: tuple[int, ...], *what: Any) -> None:
        """An exchange; exchanges of one value are equal if ``what`` they do is."""
        source = self.slots[task.input]
        key = (*what, self.keys.atom(source))
        if key not in self.known:
            out = core.Var(source.aval.update(shape=local_shape))
            self.items.append(Exchange(task, source, out))
            self.known[key] = [out]
        self.slots[task.output] = self.known[key][0]

    def _number(self, eqn: core.JaxprEqn, reads: list[Atom], info: Any = None, scope: Any = None) -> list[core.Var]:
        """The results of ``eqn`` that reads ``reads``: those of an equal one, or else as ``info``, or its own, has it."""
        number = self.keys.equation(eqn)
        key = None if number is None else (number, *map(self.keys.atom, reads))
        found = None if key is None else (self.known.maps[0] if known(eqn.primitive).refilled else self.known).get(key)
        if found is not None:
            return found
        outvars = [fresh(v) for v in eqn.outvars]
        info = info or (eqn.source_info if scope is None else eqn.source_info.replace(name_stack=scope))
        self.items.append(eqn.replace(invars=reads, outvars=outvars, source_info=info))
        if key is not None:
            self.known[key] = outvars
        return outvars

    def _index(self, who: Members) -> core.Var:
        if who not in self.indices:
            self.indices[who] = core.Var(jax.typeof(jnp.zeros((), jnp.int32)))
        return self.indices[who]

    def _late(self, task: Compute, atoms: list[Atom]) -> list[Atom]:
        """What the op of ``task`` reads: behind a fence where an order was asked for; its backward reads the same there.

        So that what the backward computes again is still what the forward has computed.
        """
        if task.after:
            fenced = self._wait(atoms, [self.slots[s] for s in task.after])
            self.fenced[task.op.path] = task.op.loop, fenced
            return [swapped(fenced, a) for a in atoms]
        if task.op.forward is not None:
            place, fenced = self.fenced.get(task.op.forward.path, (None, {}))
            if place == task.op.loop:
                return [swapped(fenced, a) for a in atoms]
        return atoms

    def _wait(self, atoms: Sequence[Atom], before: Sequence[Atom]) -> dict[core.Var, core.Var]:
        """Fence ``atoms`` behind ``before``: neither XLA nor we may run the reader first."""
        reads, made = (list(dict.fromkeys(a for a in group if isinstance(a, core.Var))) for group in (atoms, before))
        if not reads or not made:
            return {}
        eqn = trace_flat(lambda *xs: in_order_p.bind(*xs, late=len(reads)), [a.aval for a in (*reads, *made)]).eqns[0]
        return dict(zip(reads, self._number(eqn, [*reads, *made]), strict=False))
