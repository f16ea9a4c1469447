"""A loop over layers as several, each over a range of them, one behind the other. So stages may take ranges of a stack.

::

    stack [12, …] ─────────────► loop "layers"          x ──► 12 iterations ──► y

    stack ──► split ─┬─► [0:4] ──► loop "layers[0:4]"   x ──► 4 ──┐
                     ├─► [4:8] ──► loop "layers[4:8]"             └──► 4 ──┐
                     └─► [8:12] ─► loop "layers[8:12]"                     └──► 4 ──► y

An op of a range is called as in the whole loop, with the range behind it: ``layers/mlp/up/dot[4:8]``. A pattern without a
range means the ops of all.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence, Set

import jax

from jscaler.capture.bodies import BodyTable
from jscaler.capture.differentiated import differentiated
from jscaler.errors import PlanError, UnknownNameError
from jscaler.ir import Carry, Graph, Loop, Nest, Op, PTensor, Stacked
from jscaler.ir.loop import chain_of
from jscaler.ir.name import range_mark
from jscaler.ir.op import JOINED, RANGES, RecomputeRegion

Range = tuple[int, int]


def with_ranges(graph: Graph, name: str, sizes: Sequence[int], bodies: BodyTable) -> Graph:
    """``graph`` with the loop ``name`` as loops over ranges of ``sizes``, and its gradient call differentiated again.

    Raises:
        UnknownNameError: no such loop.
        PlanError: it is a backward loop, or stands in another; or the sizes are not those of ranges that make up the whole.
    """
    loop = _checked(graph, name, sizes)
    if len(sizes) == 1:
        return graph
    nest = next(item for item in graph.tree if isinstance(item, Nest) and item.loop.name == name)
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    ranges = [_Range(graph, nest, own) for own in (reversed(bounds) if loop.reverse else bounds)]
    inits = {c: c.init for c in loop.carries}
    for one, following in zip(ranges, [*ranges[1:], None], strict=True):
        inits = one.run(inits, is_last=following is None)
    loops = {n: known for n, known in graph.loops.items() if name not in chain_of(n, graph.loops)}
    loops |= {n: made for one in ranges for n, made in one.loops.items()}
    own_ops = list(nest.ops())
    like = own_ops[0]
    first, stop = graph.position[like.path], graph.position[own_ops[-1].path] + 1
    by_stack = sorted(ranges, key=lambda one: one.bounds)
    stacks = dict.fromkeys(x.stack for x in loop.xs)
    apart = [_apart(x, by_stack, like, bodies) for x in stacks if not _is_of_parts(graph, x, by_stack)]
    read = _read_whole(graph)
    joined = [_joined(graph, y, by_stack, like, bodies, y.stack in read) for y in loop.ys]
    inside = [op for one in ranges for op in one.ops]
    handed = {op.path for y in loop.ys for op in _taken_apart(graph, y.stack, by_stack)}  # the parts are there
    behind = (op for op in graph.ops[stop:] if op.path not in handed)
    ops = (*graph.ops[:first], *apart, *inside, *(op for op in joined if op is not None), *behind)
    made, gone = _without_unread(dataclasses.replace(graph, ops=ops, loops=loops), {x.stack for x in loop.xs})
    for call in dict.fromkeys([like.call, *(op.call for op in gone)]):
        made = differentiated(made, call, bodies)
    return made


def _checked(graph: Graph, name: str, sizes: Sequence[int]) -> Loop:
    loops = {n: loop for n, loop in graph.loops.items() if loop.forward is None}
    if name not in loops:
        raise UnknownNameError("loop over layers", name, loops)
    loop = loops[name]
    if loop.parent is not None:
        raise PlanError(f"the loop '{name}' stands in the loop '{loop.parent}': one that stands in none is cut into ranges")
    if any(not isinstance(size, int) or size < 1 for size in sizes) or sum(sizes) != loop.length:
        raise PlanError(
            f"the loop '{name}' has {loop.length} iterations, and ranges of {list(sizes)} are asked for, {sum(sizes)} in "
            "all; give sizes of one or more that add up to it"
        )
    return loop


class _Range:
    """The loop over iterations ``bounds`` of a nest, and the loops and ops in it."""

    def __init__(self, graph: Graph, nest: Nest, bounds: Range):
        self.graph, self.nest, self.bounds = graph, nest, bounds
        self.mark = range_mark(bounds)
        self.table: dict[PTensor, PTensor] = {t: self._named(t) for t in nest.tensors()}
        self.ops: list[Op] = []
        self.loops: dict[str, Loop] = {}

    def run(self, inits: Mapping[Carry, PTensor], is_last: bool) -> dict[Carry, PTensor]:
        """Make its ops and loops; returns what follows takes of each carry. The last leaves what the whole loop left."""
        loop = self.nest.loop
        finals = {c: c.final if is_last else self._named(c.final) for c in loop.carries}
        carries = tuple(Carry(inits[c], self._own(c.inside), self._own(c.out), finals[c], c.is_sum) for c in loop.carries)
        xs = tuple(Stacked(self.read(x.stack), self._own(x.slice)) for x in loop.xs)
        ys = tuple(Stacked(self.written(y.stack), self._own(y.slice), y.saved) for y in loop.ys)
        start, stop = self.bounds
        changed = dataclasses.replace(loop, name=loop.name + self.mark, length=stop - start, carries=carries, xs=xs, ys=ys)
        self.loops[changed.name] = changed
        for name in (n for n in self.graph.loops if loop.name in chain_of(n, self.graph.loops)[:-1]):
            inner = self.graph.loops[name].mapped(self._own)
            self.loops[name + self.mark] = dataclasses.replace(
                inner, name=name + self.mark, parent=(inner.parent or "") + self.mark
            )
        self.ops = [self._op(op) for op in self.nest.ops()]
        return finals

    def part(self, stack: PTensor) -> PTensor:
        """The part of a stack that is of these iterations."""
        start, stop = self.bounds
        aval = stack.aval.update(shape=(stop - start, *stack.shape[1:]))
        return PTensor(stack.name + self.mark, aval, stack.role if stack.role != "input" else "activation")

    def read(self, stack: PTensor) -> PTensor:
        """The part of a stack that it takes: one that the stack is made of, or what the loop takes it apart into."""
        part = self.part(stack)
        maker = self.graph.producer.get(stack)
        if maker is not None and maker.ranges == "joined" and part in maker.inputs:
            return part
        return dataclasses.replace(part, name=stack.name + RANGES + "@" + self.nest.loop.name + self.mark)

    def written(self, stack: PTensor) -> PTensor:
        """The part of a stack that it leaves: one that the stack is taken apart into, or what that is joined of."""
        part = self.part(stack)
        if any(part in op.outputs for op in _splits(self.graph, stack)):
            return part
        return dataclasses.replace(part, name=stack.name + JOINED + self.mark)

    def _named(self, tensor: PTensor) -> PTensor:
        return dataclasses.replace(tensor, name=tensor.name + self.mark)

    def _own(self, tensor: PTensor) -> PTensor:
        return self.table.get(tensor, tensor)

    def _op(self, op: Op) -> Op:
        remat = tuple(self._region(region) for region in op.remat)
        own = op.mapped(self._own)
        return dataclasses.replace(own, path=op.path + self.mark, remat=remat, loop=(op.loop or "") + self.mark)

    def _region(self, region: RecomputeRegion) -> RecomputeRegion:
        """A region inside the loop is one of this range; one around the loop stays what it is."""
        if region.loop is None:
            return region
        return RecomputeRegion(region.name + self.mark, region.loop + self.mark)


def _is_of_parts(graph: Graph, stack: PTensor, ranges: Sequence[_Range]) -> bool:
    """Whether a stack is joined of the parts that the ranges take."""
    maker = graph.producer.get(stack)
    return maker is not None and maker.ranges == "joined" and maker.inputs == tuple(r.read(stack) for r in ranges)


def _splits(graph: Graph, stack: PTensor) -> list[Op]:
    """The ops that take a stack apart into ranges."""
    return [op for op in graph.consumers.get(stack, ()) if op.ranges == "apart"]


def _taken_apart(graph: Graph, stack: PTensor, ranges: Sequence[_Range]) -> list[Op]:
    """The ops that take a stack apart into the parts that the ranges leave."""
    parts = tuple(r.written(stack) for r in ranges)
    return [op for op in _splits(graph, stack) if op.outputs == parts]


def _read_whole(graph: Graph) -> set[PTensor]:
    """What anything but a backward pass, which is made anew, reads, and is not only taken apart."""
    loops = (loop for loop in graph.loops.values() if loop.forward is None)
    ends = (t for loop in loops for t in (*loop.operands, *loop.returned))
    read = (t for op in graph.ops if op.kind != "backward" and op.ranges != "apart" for t in op.inputs)
    return {*read, *ends, *graph.outputs, *(call.loss for call in graph.calls)}


def _without_unread(graph: Graph, stacks: Set[PTensor]) -> tuple[Graph, list[Op]]:
    """``graph`` without the ops that join ``stacks`` of parts which nobody reads whole any more; and those ops."""
    read = {*_read_whole(graph), *(t for op in graph.ops if op.ranges == "apart" for t in op.inputs)}
    joins = (op for op in graph.ops if op.ranges == "joined")
    gone = [op for op in joins if op.outputs[0] in stacks and op.outputs[0] not in read]
    paths = {op.path for op in gone}
    return dataclasses.replace(graph, ops=tuple(op for op in graph.ops if op.path not in paths)) if gone else graph, gone


def _apart(stack: PTensor, ranges: Sequence[_Range], like: Op, bodies: BodyTable) -> Op:
    """What takes a stack apart into those of the ranges."""
    sizes = [stop - start for start, stop in (one.bounds for one in ranges)]
    body = bodies.traced(lambda x: list(jax.lax.split(x, sizes, axis=0)), [stack.aval])
    made = tuple(one.read(stack) for one in ranges)
    path = stack.name + RANGES + "@" + ranges[0].nest.loop.name
    return Op(path, like.kind, (stack,), made, body, like.source_info, like.call, ranges="apart")


def _joined(graph: Graph, y: Stacked, ranges: Sequence[_Range], like: Op, bodies: BodyTable, is_read: bool) -> Op | None:
    """What makes one stack of those that the ranges leave; nothing, where nobody reads it."""
    if not is_read and len(_taken_apart(graph, y.stack, ranges)) == len(_splits(graph, y.stack)):
        return None
    parts = tuple(one.written(y.stack) for one in ranges)
    body = bodies.concatenated([t.aval for t in parts])
    return Op(y.stack.name + JOINED, like.kind, parts, (y.stack,), body, like.source_info, like.call, ranges="joined")
