"""From a flat program to a ``Block``: what each equation, exchange and loop means for memory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.jaxprs import Atom, inner_jaxpr, nbytes, shape
from jscaler.clusters.transition_kinds import sends
from jscaler.ir.walk import grouped
from jscaler.lax_primitives import known
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item
from jscaler.lower.program import Extend
from jscaler.materialize import Layout
from jscaler.rules.nested import loop_of, programs
from jscaler.xla_model.block import TURN, Block, BlockStep, Inner, Kind, Value
from jscaler.xla_model.flops import NONE, flops_of


@dataclass
class Blocks:
    """Translates programs to blocks. Every variable stands for one value."""

    ops: Mapping[core.Var, str] = field(default_factory=dict)
    values: dict[core.Var, Value] = field(default_factory=dict)
    steps: list[BlockStep] = field(default_factory=list)
    item: Item | None = None  # that is being translated

    def program(self, flat: FlatProgram) -> Block:
        """The block of a whole program; its inputs are the program's, and the part indices."""
        self._flat(flat.items)
        inputs = (*flat.inputs, *(v for _, v in flat.part_indices))
        return Block(tuple(map(self.value, inputs)), tuple(self.steps), self._read(flat.outputs))

    def jaxpr(self, jaxpr: core.Jaxpr) -> Block:
        """The block of a jaxpr."""
        self._equations(jaxpr.eqns)
        return Block(tuple(map(self.value, jaxpr.invars)), tuple(self.steps), self._read(jaxpr.outvars))

    def value(self, var: core.Var) -> Value:
        """The value that ``var`` is."""
        if var not in self.values:
            aval: Any = var.aval
            self.values[var] = Value(nbytes(var), aval, aval.dtype == jnp.bool_)
        return self.values[var]

    def _read(self, atoms: Iterable[Atom]) -> tuple[Value, ...]:
        return tuple(self.value(a) for a in atoms if isinstance(a, core.Var))

    def _atom(self, atom: Atom) -> Value | None:
        return self.value(atom) if isinstance(atom, core.Var) else None

    def _flat(self, items: Iterable[Item]) -> None:
        for item in items:
            self.item = item
            if isinstance(item, core.JaxprEqn):
                self._equations([item])
            elif isinstance(item, Exchange):
                self._exchange(item)
            else:
                self._loop(item)

    def _equations(self, eqns: Iterable[core.JaxprEqn]) -> None:
        for eqn in eqns:
            one = known(eqn.primitive)
            if one.opened:
                self._call(eqn)
            elif one.nested:
                self._nested(eqn)
            else:
                self._equation(eqn)

    def _equation(self, eqn: core.JaxprEqn) -> None:
        one = known(eqn.primitive)
        name, kind = one.name, one.cost
        if name == "broadcast_in_dim" and eqn.invars and nbytes(eqn.invars[0]) == nbytes(eqn.outvars[0]):
            kind = "alias"
        reads, writes = self._read(eqn.invars), self._read(eqn.outvars)
        if kind == "alias" and len(reads) != len(writes):
            kind = "fused"  # of a literal
        if name == "transpose" and len(shape(eqn.outvars[0])) == 2:
            name = TURN
        row = _row(eqn) if kind == "reduced" else 0
        if row == 1:
            kind = "alias"
        over = ((0, 0),) if one.changes and isinstance(eqn.invars[0], core.Var) else ()
        op = self.ops.get(eqn.outvars[0], "") if eqn.outvars else ""
        flops = NONE if kind == "alias" or one.role == "moves" else flops_of(eqn)
        self._add(kind, name, reads, writes, over=over, op=op, flops=flops, row=row)

    def _add(self, kind: Kind, name: str, reads: Sequence[Value], writes: Sequence[Value], **rest: Any) -> None:
        self.steps.append(BlockStep(kind, name, tuple(reads), tuple(writes), item=self.item, **rest))

    def _call(self, eqn: core.JaxprEqn) -> None:
        """A call as its equations."""
        inner, _ = inner_jaxpr(eqn)
        inside = self._child(inner.invars, eqn.invars)
        inside.steps = self.steps
        inside._equations(inner.eqns)
        for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
            same = inside._atom(atom)
            kind: Kind = "fused" if same is None else "alias"
            self._add(kind, eqn.primitive.name, () if same is None else (same,), (self.value(var),))

    def _child(self, inside: Sequence[core.Var], operands: Sequence[Atom]) -> "Blocks":
        """For a program of its own, whose variables may be those of another use of it; its inputs are ``operands``."""
        values = ((var, self._atom(atom)) for var, atom in zip(inside, operands, strict=True))
        return Blocks(self.ops, {var: value for var, value in values if value is not None}, item=self.item)

    def _exchange(self, exchange: Exchange) -> None:
        """One step per collective; a point-to-point exchange is one."""
        task = exchange.adapt
        here = self._atom(exchange.input)
        reads: tuple[Value, ...] = () if here is None else (here,)
        out = self.value(exchange.output)
        if isinstance(task, Extend):
            self._add("call", "halo", reads, (out,))
            return
        itemsize = out.nbytes // max(1, math.prod(shape(exchange.output))) or 8
        narrow = task.reduce_dtype is not None and task.adapter.adds
        if narrow:
            itemsize = jnp.dtype(task.reduce_dtype).itemsize
            reads = (self._temporary("fused", "convert_element_type", reads, task.adapter.source, itemsize),)
        walk = list(task.adapter.walk)
        for number, (layout, step) in enumerate(walk):
            kind: Kind = "call" if sends(step.kind) else "fused"
            after = step.apply(layout)
            over = ((0, 0),) if step.line.in_place and reads else ()
            if number == len(walk) - 1 and not narrow and _local_bytes(after, itemsize) == out.nbytes:
                self._add(kind, step.kind, reads, (out,), over=over)
                return
            reads = (self._temporary(kind, step.kind, reads, after, itemsize, over),)
        same = not narrow and bool(walk) and [v.nbytes for v in reads] == [out.nbytes]
        self._add("alias" if same else "fused", "view", reads, (out,))

    def _temporary(
        self, kind: Kind, name: str, reads: Sequence[Value], layout: Layout, itemsize: int, over: Any = ()
    ) -> Value:
        made = Value(_local_bytes(layout, itemsize), f"{name} of {layout.local_shape}")
        self._add(kind, name, reads, (made,), over=over)
        return made

    def _loop(self, loop: FlatLoop) -> None:
        outside, self.steps = self.steps, []
        self._flat(loop.items)
        steps, self.steps, self.item = self.steps, outside, loop
        carries = tuple((self._atom(a), self.value(b), self._atom(c), self.value(d)) for a, b, c, d in loop.carries)
        xs = tuple((self.value(stack), self.value(piece)) for stack, piece in loop.xs if isinstance(stack, core.Var))
        ys = tuple((self._atom(piece), self.value(stack)) for piece, stack in loop.ys)
        for before, piece, after in loop.sums:
            total = Value(self.value(after).nbytes, after.aval)
            carries += ((self._atom(before), total, total, self.value(after)),)
            steps += self._adding(total, self._atom(piece), piece)
        self._repeat(steps, carries, xs, ys, loop.loop.length, self._read(loop.reads))

    def _adding(self, total: Value, piece: Value | None, like: Atom) -> list[BlockStep]:
        """An iteration adds to a slice of ``total``, where it lies."""
        before, item = Value(nbytes(like), "slice"), self.item
        taken = BlockStep("fused", "dynamic_slice", (total,), (before,), item=item)
        return [taken, _written((before,) if piece is None else (before, piece), item)]

    def _nested(self, eqn: core.JaxprEqn) -> None:
        """A scan, while or cond that is one equation."""
        inner = programs(eqn)
        if eqn.primitive.name == "cond":
            self._branches(eqn, inner)
            return
        known, body = loop_of(eqn), inner[-1]
        consts, operands = known.consts - known.conditions, eqn.invars[known.conditions :]
        end = consts + known.carry
        inside = self._child(body.invars[:consts], operands[:consts])
        inside._equations(body.eqns)
        carried = zip(operands[consts:end], body.invars[consts:end], body.outvars, eqn.outvars, strict=False)
        carries = tuple((self._atom(a), inside.value(b), inside._atom(c), self.value(d)) for a, b, c, d in carried)
        stacks = zip(operands[end:], body.invars[end:], strict=True)
        xs = tuple((self.value(stack), inside.value(piece)) for stack, piece in stacks if isinstance(stack, core.Var))
        made = zip(body.outvars[known.carry :], eqn.outvars[known.carry :], strict=True)
        ys = tuple((inside._atom(piece), self.value(stack)) for piece, stack in made)
        self._repeat(inside.steps, carries, xs, ys, eqn.params.get("length", 1), self._read(eqn.invars))

    def _branches(self, eqn: core.JaxprEqn, branches: Sequence[core.Jaxpr]) -> None:
        """A cond: one of its branches runs, and leaves its results in the cond's."""
        found = []
        for jaxpr in branches:
            inside = self._child(jaxpr.invars, eqn.invars[1:])
            block = inside.jaxpr(jaxpr)
            finals = zip(jaxpr.outvars, map(self.value, eqn.outvars), strict=True)
            found.append(Inner(block, tuple((None, Value(0), inside._atom(out), final) for out, final in finals)))
        self._add("loop", "cond", self._read(eqn.invars), self._read(eqn.outvars), inner=tuple(found))

    def _repeat(
        self, steps: list[BlockStep], carries: Any, xs: Any, ys: Any, length: int, reads: tuple[Value, ...]
    ) -> None:
        """Slices are taken in front of the body, and written as soon as they are made."""
        item = self.item
        body = [BlockStep("fused", "dynamic_slice", (stack,), (piece,), item=item) for stack, piece in xs]
        writing = grouped((piece, stack) for piece, stack in ys if piece is not None)
        made = {v for step in steps for v in step.writes}
        for piece, stacks in writing.items():  # what the iteration was given
            body += [_written((piece,), item) for _ in stacks if piece not in made]
        for step in steps:
            body.append(step)
            body += [_written((v,), item) for v in step.writes for _ in writing.get(v, ())]
        given = (*(inside for _, inside, _, _ in carries), *(stack for stack, _ in xs))
        block = Block(given, tuple(body), tuple(out for _, _, out, _ in carries if out is not None))
        inner = Inner(block, carries, length)
        writes = (*(final for *_, final in carries), *(stack for _, stack in ys))
        held = [init for init, *_ in carries]
        operands = tuple(dict.fromkeys([*(v for v in held if v is not None), *reads]))
        over = tuple((i, operands.index(init)) for i, init in enumerate(held) if init is not None)
        self._add("loop", "scan", operands, writes, over=over, inner=(inner,))


def _row(eqn: core.JaxprEqn) -> int:
    """Of a reduction along the last dims, or along dims of size 1, how many elements it makes one of; else 0."""
    sizes, axes = shape(eqn.invars[0]), tuple(eqn.params.get("axes", ()))
    if not axes:
        return 0
    last = min(axes) == len(sizes) - len(axes)
    each = math.prod(sizes[axis] for axis in axes)
    return each if last or each == 1 else 0


def _written(made_of: Sequence[Value], item: Item | None) -> BlockStep:
    """A slice on its way into its stack: computed there, if it is no buffer of its own."""
    return BlockStep("reduced", "dynamic_update_slice", tuple(made_of), (Value(0, "stack"),), item=item)


def _local_bytes(layout: Layout, itemsize: int) -> int:
    return math.prod(layout.local_sizes) * itemsize
