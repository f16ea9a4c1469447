"""Autodiff on the graph: backward handles, gradient joins, backward loops, and (after the policy) the handles' bodies.

    forward   x ──► f ──► y ──► g ──► loss
                    │           │
    backward  dx ◄─ f' ◄─ dy ◄─ g' ◄─ 1            f' reads x and dy: no hidden residuals

Gradients that one tensor gets from several readers stay separate PTensors, joined by an explicit n-ary add. The backward
of a loop is a loop that runs the other way; its backward handles read the forward body's tensors, and what crosses so
from loop to loop is threaded through both when all is known (``capture/saved.py``).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import dtype
from jscaler.ir import Carry, FactorNames, Loop, Nest, Op, PTensor, Stacked, nested
from jscaler.ir.loop import Item
from jscaler.ir.op import names_of, sub_dims
from jscaler.ir.rule import NamedDims

SUFFIX = "@backward"
Arrived = dict[PTensor, list[PTensor]]


class Differentiator:
    """Adds backward handles for one gradient call, last op first.

    Attributes:
        ops, made: the new ops and loops.
        handles: forward path -> backward handle.
    """

    def __init__(self, bodies: BodyTable, call: int, loops: Mapping[str, Loop] | None = None):
        self.bodies = bodies
        self.call = call
        self.loops = loops or {}
        self.mark = f"#{call}" if call else ""  # a second call may differentiate the same tensors
        self.ops: list[Op] = []
        self.made: dict[str, Loop] = {}
        self.handles: dict[str, Op] = {}
        self.active: set[PTensor] = set()
        self.sub_dims: dict[PTensor, NamedDims] = {}  # of forward tensors, where ops tell them apart
        self._arrived: Arrived = {}
        self._loop: str | None = None  # the backward loop that new ops stand in

    def run(self, forward: Sequence[Op], loss: PTensor, wrt: tuple[PTensor, ...]) -> list[PTensor]:
        """Returns the gradient PTensor of each tensor of ``wrt``; ``ops`` and ``handles`` hold the new ops."""
        tree = nested(forward, self.loops)
        self.sub_dims = sub_dims(forward)
        self.active = set(wrt)
        _activate(tree, self.active)
        seed = self._filled("d(" + loss.name + ")" + self.mark, loss.name + "@seed" + self.mark, loss, 1.0)
        self._arrived[loss] = [seed]
        self._visit_all(tree)
        return [self._gradient(t) for t in wrt]

    def _visit_all(self, items: Sequence[Item]) -> None:
        for item in reversed(items):
            if isinstance(item, Op):
                self._visit(item)
            else:
                self._visit_loop(item)

    def _visit(self, op: Op) -> None:
        outputs = [(i, t) for i, t in enumerate(op.outputs) if t in self._arrived and t in self.active]
        reached = {i for place, _ in outputs for i in smooth_in(op)[place]}
        gradients = tuple(i for i, t in enumerate(op.inputs) if t in self.active and i in reached)
        if not outputs or not gradients:
            return
        cotangents = tuple((i, self._gradient(t)) for i, t in outputs)
        path = op.path + SUFFIX
        made = tuple(PTensor("d(" + op.inputs[i].name + ")@" + op.path, op.inputs[i].aval, "gradient") for i in gradients)
        handle = Op(
            path, "backward", op.inputs + tuple(t for _, t in cotangents), made, None, op.source_info,
            forward=op, cotangents=cotangents, gradients=gradients,
        )  # fmt: skip
        self.handles[op.path] = self._add(handle)
        for i, tensor in zip(gradients, made, strict=True):
            self._arrived.setdefault(op.inputs[i], []).append(tensor)

    # -- loops

    def _visit_loop(self, nest: Nest) -> None:
        """The backward of a loop: cotangents of the carries, and sums for what every iteration reads from outside."""
        loop = nest.loop
        carried, written = self._reached_carries(nest), [y for y in loop.ys if self._reached(y.stack, y.slice)]
        if not carried and not written:
            return
        name = loop.name + SUFFIX + self.mark
        carries = [(c, self._made_carry(c.out, c.final, name)) for c in carried]
        xs = [
            Stacked(self._gradient(y.stack), self._new("d(" + y.stack.name + ")@" + name + ":slice", y.slice))
            for y in written
        ]
        outer, self._arrived, parent, self._loop = self._arrived, {}, self._loop, name
        for carry, (_, inside) in carries:
            self._arrived.setdefault(carry.out, []).append(inside)
        for y, x in zip(written, xs, strict=True):
            self._arrived.setdefault(y.slice, []).append(x.slice)
        before = len(self.ops)
        self._visit_all(nest.items)
        outs = [self._gradient(c.inside) for c, _ in carries]
        slices = [(x, self._gradient(x.slice)) for x in loop.xs if x.slice in self._arrived and x.slice in self.active]
        own = set(nest.tensors())
        shared = [t for t in self._arrived if t not in own and t in self.active]
        sums = [self._summed(t, name) for t in shared]
        if len(self.ops) == before:  # a loop has at least one op to stand in the graph by
            outs, slices = self._copied(outs, slices, name)
        self._arrived, self._loop = outer, parent
        ends = [self._new("d(" + c.inside.name + ")@" + name + ":last", c.inside) for c, _ in carries]
        made = [Carry(init, inside, out, end) for (_, (init, inside)), out, end in zip(carries, outs, ends, strict=True)]
        ys = [Stacked(self._new("d(" + x.slice.name + ")@" + name + ":stack", x.stack), gradient) for x, gradient in slices]
        after = len(self.ops)
        sums = [dataclasses.replace(s, init=self._zeros(t, name)) for s, t in zip(sums, shared, strict=True)]
        self.ops[before:before], self.ops[after + len(sums) :] = self.ops[after:], []
        self.made[name] = Loop(
            name, loop.length, not loop.reverse, (*made, *sums), tuple(xs), tuple(ys), parent, loop.unroll, loop.name
        )
        self._hand_on([c.init for c, _ in carries], ends)
        self._hand_on([x.stack for x, _ in slices], [y.stack for y in ys])
        self._hand_on(shared, [s.final for s in sums])

    def _hand_on(self, tensors: Sequence[PTensor], gradients: Sequence[PTensor]) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if tensor in self.active:
                self._arrived.setdefault(tensor, []).append(gradient)

    def _reached(self, outside: PTensor, inside: PTensor) -> bool:
        return outside in self._arrived and inside in self.active

    def _reached_carries(self, nest: Nest) -> list[Carry]:
        """The carries that get a cotangent: from outside, or in the body from one that has it."""
        loop = nest.loop
        wanted = [c for c in loop.carries if self._reached(c.final, c.inside)]
        written = {y.slice for y in loop.ys if self._reached(y.stack, y.slice)}
        while True:
            reached = written | {c.out for c in wanted}
            _reach(nest.items, reached, self.active)
            more = [c for c in loop.carries if c.inside in self.active and (c in wanted or c.inside in reached)]
            if len(more) == len(wanted):
                return more
            wanted = more

    def _made_carry(self, out: PTensor, final: PTensor, name: str) -> tuple[PTensor, PTensor]:
        """The cotangent of a carry before the backward loop and inside it."""
        return self._gradient(final), self._new("d(" + final.name + ")@" + name, out)

    def _summed(self, tensor: PTensor, name: str) -> Carry:
        """Adds what one iteration contributes to the gradient of ``tensor``, which lies outside the loop."""
        part = self._gradient(tensor)
        inside, out, final = (
            self._new("d(" + tensor.name + ")@" + name + ":" + word, tensor) for word in ("sum", "more", "total")
        )
        body = self.bodies.join(tensor.aval, 2)
        path = tensor.name + "@sum@" + name
        self._add(Op(path, "backward", (inside, part), (out,), body, anywhere="sum", named=self._like(tensor, 3)))
        return Carry(part, inside, out, final, is_sum=True)  # its init is made outside the loop

    def _zeros(self, tensor: PTensor, name: str) -> PTensor:
        return self._filled("d(" + tensor.name + ")@" + name + ":zeros", tensor.name + "@zeros@" + name, tensor, 0.0)

    def _copied(
        self, outs: list[PTensor], slices: list[tuple[Stacked, PTensor]], name: str
    ) -> tuple[list[PTensor], list[tuple[Stacked, PTensor]]]:
        source = outs[0] if outs else slices[0][1]
        copy = self._new(source.name + "@copy", source)
        body = self.bodies.traced(lambda x: [jnp.copy(x)], [source.aval], key="copy")
        self._add(Op(source.name + "@copy@" + name, "backward", (source,), (copy,), body))
        if outs:
            return [copy, *outs[1:]], slices
        return outs, [(slices[0][0], copy), *slices[1:]]

    # -- gradients

    def _gradient(self, tensor: PTensor) -> PTensor:
        """What has arrived for ``tensor``, joined; zeros where nothing has."""
        parts = self._arrived.get(tensor, [])
        if len(parts) == 1:
            return parts[0]
        where = "@" + self._loop if self._loop else self.mark
        name, path = "d(" + tensor.name + ")" + where, tensor.name + ("@join" if parts else "@unused") + where
        if parts:
            total = self._new(name, tensor)
            join = self.bodies.join(tensor.aval, len(parts))
            self._add(Op(path, "backward", tuple(parts), (total,), join, named=self._like(tensor, len(parts) + 1)))
        else:
            total = self._filled(name, path, tensor, 0.0)
        self._arrived[tensor] = [total]
        return total

    def _filled(self, name: str, path: str, like: PTensor, value: float) -> PTensor:
        made = self._new(name, like)
        self._add(Op(path, "backward", (), (made,), self.bodies.fill(like.aval, value), named=self._like(like, 1)))
        return made

    def _like(self, tensor: PTensor, count: int) -> FactorNames | None:
        """The sub-dims of an op on ``count`` tensors like a forward one."""
        return names_of([tensor] * count, self.sub_dims)

    def _new(self, name: str, like: PTensor) -> PTensor:
        return PTensor(name, like.aval, "gradient")

    def _add(self, op: Op) -> Op:
        self.ops.append(dataclasses.replace(op, call=self.call, loop=self._loop))
        return self.ops[-1]


def _activate(items: Iterable[Item], active: set[PTensor]) -> None:
    """Add the floating-point tensors that depend on those that are ``active``."""
    for item in items:
        if isinstance(item, Op):
            own = {i for i, t in enumerate(item.inputs) if t in active}
            if own:
                active.update(t for t, depends in zip(item.outputs, smooth_in(item), strict=True) if own & depends)
            continue
        loop, known = item.loop, -1
        active.update(x.slice for x in loop.xs if x.stack in active)
        while known < len(active):
            known = len(active)
            active.update(c.inside for c in loop.carries if c.init in active or c.out in active)
            _activate(item.items, active)
        active.update(c.final for c in loop.carries if c.inside in active)
        active.update(y.stack for y in loop.ys if y.slice in active)


def _reach(items: Sequence[Item], reached: set[PTensor], active: set[PTensor]) -> None:
    """Add the tensors that get a cotangent if those in ``reached`` do."""
    for item in reversed(items):
        if isinstance(item, Op):
            for t, depends in zip(item.outputs, smooth_in(item), strict=True):
                if t in reached and t in active:
                    reached.update(own for i, own in enumerate(item.inputs) if i in depends and own in active)
            continue
        loop, known = item.loop, -1
        reached.update(y.slice for y in loop.ys if y.stack in reached and y.slice in active)
        reached.update(c.out for c in loop.carries if c.final in reached and c.inside in active)
        while known < len(reached):
            known = len(reached)
            _reach(item.items, reached, active)
            reached.update(c.out for c in loop.carries if c.inside in reached and c.inside in active)
        reached.update(x.stack for x in loop.xs if x.slice in reached and x.stack in active)
        reached.update(c.init for c in loop.carries if c.inside in reached and c.init in active)


def smooth_in(op: Op) -> list[set[int]]:
    """For each result of a forward op the inputs of which it has a derivative: not of what only counts, or stands behind a
    ``stop_gradient``."""
    floating = [i for i, t in enumerate(op.inputs) if jnp.issubdtype(t.dtype, jnp.inexact)]
    if op.body is None or not any(eqn.primitive.name == "stop_gradient" for eqn in op.body.jaxpr.eqns):
        return [{*floating} if jnp.issubdtype(t.dtype, jnp.inexact) else set() for t in op.outputs]
    jaxpr = op.body.jaxpr
    found: dict[core.Var, set[int]] = {jaxpr.invars[i]: {i} for i in floating}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "stop_gradient":
            own = {i for a in eqn.invars if isinstance(a, core.Var) for i in found.get(a, ())}
            found.update({v: own for v in eqn.outvars if jnp.issubdtype(dtype(v), jnp.inexact)})
    return [found.get(a, set()) if isinstance(a, core.Var) else set() for a in jaxpr.outvars]
