"""Time axes become loops: what runs part by part is written as a user would write the ``lax.scan`` by hand.

    for part i of n:   x' = part i of x ──► ops at part shapes ──► y' ──► stack ──► y        cut, and put together
                                                              └──► s' ──► + ───► carry ──► s  added up in place

The loops are the graph's own (`ir.Loop`): how their tensors lie on devices, their collectives, their lowering to
``lax.scan``, estimates and proofs are those of a stack of layers. Ops keep their paths and the names of their factors, so
that the plan's decisions in space hold for the parts.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jscaler.capture.bodies import BodyTable
from jscaler.capture.recompute import with_fence_body
from jscaler.ir import Body, Carry, FactorNames, Graph, Loop, Nest, Op, PTensor, Rule, Stacked, flat
from jscaler.ir.loop import Item, chain_of
from jscaler.ir.mask import Combiner
from jscaler.primitives import Decision, Plan, Trans
from jscaler.rules.book import RuleBook
from jscaler.rules.neutral import neutral
from jscaler.schedule.alone import handed_on
from jscaler.schedule.parts import Form, OpPart, Own, Sliced, Summed, op_part, passed_on
from jscaler.schedule.regions import Region, Regions, shifted
from jscaler.schedule.time_axes import TimeCut, time_axes
from jscaler.schedule.unrolled import unrolled
from jscaler.schedule.wide import add_wide, cast, is_widened, read_wide


def timed(graph: Graph, plan: Plan, book: RuleBook, bodies: BodyTable) -> tuple[Graph, Plan]:
    """``graph``, whose backward ops have bodies, with the loops of the plan's time axes, and the plan in space.

    Raises:
        PlanError: an op that the plan splits in time cannot be.
        OrderError: cells cannot run in the order that the plan says.
    """
    axes = time_axes(graph, plan)
    of_model = set(graph.loops)
    for number, name in enumerate(axes.names):
        if not all(map(axes.in_loops, axes.names[: number + 1])):  # a loop would run over the parts around it
            graph, axes = unrolled(graph, axes, number, book, bodies)
            continue
        cuts = {path: own[name] for path, own in axes.cuts.items() if name in own}
        around = graph.loops.keys() - of_model  # axes further out, in whose iterations this one stands
        graph = _written(graph, name, cuts, book, bodies, around, axes.plan)
    return graph, _of_parts(axes.plan, graph) if axes.names else axes.plan


def _of_parts(plan: Plan, graph: Graph) -> Plan:
    """``plan`` for ops that run part by part: what it leaves whole of a factor may be a single row, which is none."""

    def left(decision: Decision) -> Decision:
        if not isinstance(decision, Trans) or decision.op not in graph.by_path:
            return decision
        known = graph.rule(graph[decision.op]).factors
        axes = tuple(
            dataclasses.replace(a, factor=None) if a.parts == 1 and a.factor not in known else a for a in decision.axes
        )
        return dataclasses.replace(decision, axes=axes) if axes != decision.axes else decision

    return dataclasses.replace(plan, decisions=tuple(map(left, plan.decisions)))


class _TornApartError(Exception):
    """A loop runs part by part as a whole, and another that reads what is inside it does not."""

    def __init__(self, loop: str):
        self.loop = loop


def _written(
    graph: Graph,
    axis: str,
    cuts: Mapping[str, TimeCut],
    book: RuleBook,
    bodies: BodyTable,
    around: Set[str],
    in_space: Plan,
) -> Graph:
    """``graph`` with the loops of one time axis; ``in_space`` says what else happens to the ops."""
    closed = set(around)  # loops in whose bodies the time axis runs, iteration by iteration
    while True:
        try:
            return _Writer(graph, axis, cuts, book, bodies, closed, in_space).run()
        except _TornApartError as torn:
            closed.add(torn.loop)


class _Writer:
    """Writes the loops of one time axis."""

    def __init__(
        self,
        graph: Graph,
        axis: str,
        cuts: Mapping[str, TimeCut],
        book: RuleBook,
        bodies: BodyTable,
        closed: Set[str],
        in_space: Plan,
    ):
        self.graph = graph
        self.alone = in_space.alone
        self.grids = {d.op: (*d.axes, *d.chunks) for d in in_space.decisions if isinstance(d, Trans)}
        self.sum_dtype = in_space.accumulation.dtype
        self.wide: dict[PTensor, PTensor] = {}  # gradient -> the sum in more bits that it is a cast of
        self.axis = axis
        self.book = book
        self.bodies = bodies
        self.bodies_of_parts: dict[int, Body] = {}
        self.cuts = cuts
        self.regions = Regions(graph, self._without_counts(self._parts()), self._follow, closed)
        self.handed_on = handed_on(graph, self.regions.parts)
        self.readers = _readers(graph)
        self.part_of: dict[PTensor, PTensor] = {}  # of what a region makes
        self.loops = dict(graph.loops)
        self.new_ops: dict[str, Op] = {}

    def run(self) -> Graph:
        items = self._level(self.graph.tree, None)
        ops = tuple(self._linked(op) for op in flat(items))
        return read_wide(dataclasses.replace(self.graph, ops=ops, loops=self.loops), self.wide, self.bodies)

    def _parts(self) -> dict[str, OpPart]:
        found = {}
        made: dict[PTensor, Form] = {}
        for path, cut in self.cuts.items():
            op = self.graph[path]
            alone = made if (op.forward or op.again or op).path in self.alone else None
            part = op_part(op, cut, self.book, self.bodies, self.bodies_of_parts, alone)
            if part is not None:
                found[path] = part
                made.update(zip(op.outputs, part.outputs, strict=True))
        return found

    def _follow(self, op: Op, forms: Mapping[PTensor, Form]) -> OpPart | None:
        """How an op goes on with the parts that it reads though no plan says so."""
        if (
            op.anywhere == "fence"
        ):  # what it takes from outside whole, and who stands behind it reads in parts, is cut first
            behind = {t: self._wanted_of(o) for t, o in zip(op.inputs, op.outputs, strict=True)}
            forms = {t: behind[t] if t not in self.regions.forms else forms.get(t) for t in op.inputs}
        part = passed_on(op, forms, self.book)
        if part is not None or op.kind == "update" or op.anywhere or op.body is None or not self._between(op):
            return part
        for tensor, dims in zip(op.inputs, self.graph.rule(op).operands, strict=True):
            form = forms.get(tensor)
            if isinstance(form, Sliced):
                for factor in dims[form.dim]:
                    for blocks in dict.fromkeys((form.blocks, 1)):
                        cut = TimeCut(self.axis, factor, form.parts, blocks)
                        made = op_part(op, cut, self.book, self.bodies, self.bodies_of_parts)
                        if made is not None and _fits(op, forms, made) and self._leaves_room(op, factor, made):
                            return made
                return None
        return None

    def _leaves_room(self, op: Op, factor: str, part: OpPart) -> bool:
        """Whether what the plan splits ``op`` into between devices divides its parts in time."""
        axes = [a for a in self.grids.get(op.path, ()) if a.factor == factor]
        if any(a.sizes or a.algorithm for a in axes):
            return False
        left = dict(pair for dims in part.named.tensors for dim in dims for pair in dim) if part.named else {}
        return left.get(factor, 1) % math.prod(a.parts for a in axes) == 0

    def _wanted_of(self, tensor: PTensor) -> Form:
        """The part of ``tensor`` that all of its readers in time want."""
        pairs = [(op, self.regions.parts.get(op.path)) for op in self.graph.consumers.get(tensor, ())]
        wanted = {part.inputs[op.inputs.index(tensor)] if part is not None else None for op, part in pairs}
        return wanted.pop() if len(wanted) == 1 else None

    def _between(self, op: Op) -> bool:
        """Whether ``op`` stands between ops that the plan splits, or is the backward of one that does."""
        if op.forward is not None or op.again is not None:
            like = op.forward or op.again
            return like is not None and like.path in self.regions.parts
        if op.kind == "backward":  # gradients are joined part by part where all of them come so
            return True
        readers = [r for t in op.outputs for r in self.graph.consumers.get(t, ())]
        return any(r.path in self.regions.planned and r.kind == op.kind for r in readers)

    def _without_counts(self, parts: dict[str, OpPart]) -> dict[str, OpPart]:
        """``parts`` without what only counts inputs (a mask's sum, by which a loss is divided): it runs before, on all.

        What reads a sum over all parts could not stand in their loop otherwise.
        """
        state = {self.graph.inputs[i] for i in self.graph.next_version.values()}
        state |= {t for call in self.graph.calls for t in call.wrt}
        known = set(self.graph.inputs) - state | {c for c, _ in self.graph.constants}
        alone: set[str] = set()
        for op in self.graph.ops:
            if op.loop is None and op.kind != "backward" and all(t in known for t in op.inputs):
                known.update(op.outputs)
                alone.add(op.path)
        whole: set[str] = set()
        todo = [
            op
            for op in self.graph.ops
            if op.path in alone and op.path in parts
            for t, form in zip(op.outputs, parts[op.path].outputs, strict=True)
            if isinstance(form, Summed) and self._reaches(t, parts)
        ]
        while todo:
            op = todo.pop()
            if op.path not in whole:
                whole.add(op.path)
                todo += [self.graph.producer[t] for t in op.inputs if t in self.graph.producer]
        return {path: part for path, part in parts.items() if path not in whole}

    def _reaches(self, tensor: PTensor, parts: Mapping[str, OpPart]) -> bool:
        """Whether an op in time reads ``tensor``, or what others make of it (the division of a loss, and its backward)."""
        todo, seen = [tensor], {tensor}
        while todo:
            readers = self.graph.consumers.get(todo.pop(), ())
            if any(op.path in parts for op in readers):
                return True
            fresh = {t for op in readers if op.kind != "update" for t in op.outputs} - seen
            seen |= fresh
            todo += fresh
        return False

    # -- one level of loops

    def _level(self, items: Sequence[Item], place: str | None) -> list[Item]:
        found: list[Item] = []
        for group in self.regions.arranged(items):
            if isinstance(group, Region):
                found += self._region(group, place)
                continue
            for item in group:
                if isinstance(item, Nest):
                    item = Nest(item.loop, tuple(self._level(item.items, item.loop.name)))
                found.append(item)
        return found

    def _region(self, region: Region, place: str | None) -> list[Item]:
        return _RegionWriter(self, region, place).run()

    def _linked(self, op: Op) -> Op:
        """``op``, whose forward op is the one that stands in the graph now."""
        changes: dict[str, Any] = {}
        for name in ("forward", "again"):
            source = getattr(op, name)
            if source is not None and source.path in self.new_ops:
                changes[name] = self.new_ops[source.path]
        if changes and op.named is None and op.body is not None:  # it runs whole: its forward has other tensors now
            changes["named"] = _names(self.graph.rule(self.graph[op.path]))
        return dataclasses.replace(op, **changes) if changes else op

    def in_step(self, tensor: PTensor, reader: Op) -> bool:
        """Whether the loops around ``reader`` go with those around the maker of ``tensor``, iteration for iteration."""
        around = (chain_of(place, self.graph.loops) for place in (self.regions.homes.get(tensor), reader.loop))
        mine, other = ([self.graph.loops[name].length for name in chain] for chain in around)
        return mine == other

    def outside(self, tensor: PTensor, region: Region) -> bool:
        """Whether someone needs ``tensor``, which ``region`` makes, whole and outside."""
        form = self.regions.forms.get(tensor)
        for op, loop in self.readers.get(tensor, ()):
            if op is None and loop is None:
                return True
            if (op is not None and op.path in region.ops) or (loop is not None and loop in region.loops):
                continue
            if op is not None and op.path in self.regions.parts:
                part = self.regions.parts[op.path]
                if form is not None and part.inputs[op.inputs.index(tensor)] == form and self.in_step(tensor, op):
                    continue  # it reads the parts
            return True
        return False


class _RegionWriter:
    """Writes one region as a loop."""

    def __init__(self, writer: _Writer, region: Region, place: str | None):
        self.writer = writer
        self.region = region
        self.place = place
        self.forms = writer.regions.forms
        self.name = f"{writer.axis}@{min(region.ops, key=writer.graph.position.__getitem__)}"
        self.parts = next(iter(writer.cuts.values())).parts
        self.made = dict.fromkeys(t for item in region.items for t in _all_made(item))
        self.cut: dict[tuple[PTensor, Sliced], PTensor] = {}
        self.levels: list[tuple[list[Item], str]] = [([], self.name)]  # of the loop's body, and of loops in it
        self.before: list[Item] = []
        self.after: list[Item] = []
        self.taken = {  # state that a part takes over: the input -> what an iteration finds
            state: PTensor(f"{tensor.name}@before", state.aval, state.role)
            for tensor, state in writer.handed_on.items()
            if tensor in self.made
        }
        self.index: PTensor | None = None
        self.xs: list[Stacked] = []
        self.like = next(flat(region.items))

    def run(self) -> list[Item]:
        writer = self.writer
        for tensor in self.made:
            writer.part_of[tensor] = self._part(tensor)
        body = self.levels[0][0]
        for item in self.region.items:
            body.append(self._item(item))
        carries, ys = [], []
        inside = {t: item.loop.name for item in self.region.items if isinstance(item, Nest) for t in item.tensors()}
        for tensor in self.made:
            if not writer.outside(tensor, self.region):
                continue
            if tensor in inside:
                raise _TornApartError(inside[tensor])
            form = self.forms.get(tensor)
            if isinstance(form, Sliced):
                ys.append(self._merged(tensor, form))
            else:
                carries.append(self._carried(tensor, form))
        loop = Loop(self.name, self.parts, False, tuple(carries), tuple(self.xs), tuple(ys), self.place, time=writer.axis)
        writer.loops[self.name] = loop
        return [*self.before, Nest(loop, tuple(body)), *self.after]

    def _part(self, tensor: PTensor) -> PTensor:
        form = self.forms.get(tensor)
        aval = tensor.aval.update(shape=form.shape(tensor.shape)) if isinstance(form, Sliced) else tensor.aval
        return PTensor(f"{tensor.name}@{self.writer.axis}", aval, tensor.role)

    def _item(self, item: Item) -> Item:
        return self._op(item) if isinstance(item, Op) else self._nest(item)

    def _op(self, op: Op) -> Op:
        writer = self.writer
        part = writer.regions.parts.get(op.path)
        wanted = part.inputs if part is not None else (None,) * len(op.inputs)
        inputs = tuple(self._read(t, form, op) for t, form in zip(op.inputs, wanted, strict=True))
        table = dict(zip(op.inputs, inputs, strict=True))
        changes: dict[str, object] = {
            "inputs": inputs,
            "outputs": tuple(writer.part_of[t] for t in op.outputs),
            "loop": self.levels[-1][1],
            "cotangents": tuple((i, table.get(t, t)) for i, t in op.cotangents),
            "saved": tuple((table.get(t, t), stands) for t, stands in op.saved),
        }
        if part is not None and part.body is not None:
            index = (self._index(),) if part.indexed else ()
            changes |= {"body": part.body, "named": part.named, "inputs": (*inputs, *index)}
        made = with_fence_body(dataclasses.replace(op, **changes), writer.bodies)  # type: ignore[arg-type]
        writer.new_ops[op.path] = made
        return made

    def _nest(self, nest: Nest) -> Nest:
        loop, part_of = nest.loop, self.writer.part_of
        carries = tuple(
            dataclasses.replace(
                c,
                init=self._read(c.init, self.forms.get(c.inside), self.like),
                inside=part_of[c.inside],
                out=part_of.get(c.out, c.out),
                final=part_of[c.final],
            )
            for c in loop.carries
        )
        xs = tuple(
            dataclasses.replace(
                x, stack=self._read(x.stack, shifted(self.forms.get(x.slice), 1), self.like), slice=part_of[x.slice]
            )
            for x in loop.xs
        )
        around = self.levels[-1][1]
        self.levels.append(([], loop.name))
        for item in nest.items:
            made = self._item(item)
            self.levels[-1][0].append(made)
        items = tuple(self.levels.pop()[0])
        ys = tuple(dataclasses.replace(y, stack=part_of[y.stack], slice=part_of.get(y.slice, y.slice)) for y in loop.ys)
        new = dataclasses.replace(loop, carries=carries, xs=xs, ys=ys, parent=around)
        self.writer.loops[loop.name] = new
        return Nest(new, items)

    # -- into the loop

    def _read(self, tensor: PTensor, form: Form, reader: Op) -> PTensor:
        """What a part reads of ``tensor``: what the region makes, a piece that is cut off here, or the whole."""
        if tensor in self.taken and form is None:
            return self.taken[tensor]
        assert form is not None or reader.path not in self.writer.alone or tensor not in self.writer.handed_on.values(), (
            tensor
        )
        handed = isinstance(form, Sliced) and self.forms.get(tensor) == form and self.writer.in_step(tensor, reader)
        if tensor in self.made or handed:
            found = self.writer.part_of[tensor]
            if self.forms.get(tensor) == form or not isinstance(form, Sliced):
                return found
            return self._cut(tensor, found, form, reader)  # made whole by every part
        return self._cut(tensor, tensor, form, reader) if isinstance(form, Sliced) else tensor

    def _cut(self, tensor: PTensor, whole: PTensor, form: Sliced, reader: Op) -> PTensor:
        if (tensor, form) not in self.cut:
            aval = whole.aval.update(shape=form.shape(whole.shape), weak_type=False)
            names = [t for t, _ in self.cut]
            mark = f"#{names.count(tensor)}" if tensor in names else ""
            made = PTensor(f"{tensor.name}@{self.name}{mark}", aval, tensor.role)
            body = self.writer.bodies.traced(lambda x, i: [form.take(x, i)], [whole.aval, _index_aval()])
            kind = "backward" if reader.kind == "backward" else "forward"
            path = f"{tensor.name}@cut{mark}@{self.name}"
            items, place = self.levels[-1] if tensor in self.made else self.levels[0]
            items.append(Op(path, kind, (whole, self._index()), (made,), body, call=reader.call, loop=place))
            self.cut[tensor, form] = made
        return self.cut[tensor, form]

    def _index(self) -> PTensor:
        """The number of the part that an iteration runs."""
        if self.index is None:
            self.index = PTensor(f"{self.name}:index", _index_aval())
            stack = PTensor(f"{self.name}:indices", _index_aval(self.parts))
            count = self.parts
            body = self.writer.bodies.traced(lambda: [lax.iota(jnp.int32, count)], [])
            self.before.append(self._beside(f"{self.name}:count", (), stack, body))
            self.xs.append(Stacked(stack, self.index))
        return self.index

    # -- out of it

    def _merged(self, tensor: PTensor, form: Sliced) -> Stacked:
        part = self.writer.part_of[tensor]
        stack = PTensor(
            f"{tensor.name}@stack", part.aval.update(shape=(self.parts, *part.shape), weak_type=False), tensor.role
        )
        body = self.writer.bodies.traced(lambda x: [form.merge(x)], [stack.aval])
        self.after.append(self._beside(f"{tensor.name}@merge", (stack,), tensor, body))
        return Stacked(stack, part)

    def _carried(self, tensor: PTensor, form: Form) -> Carry:
        """What all parts add up to, or join to; of what is the same for all, the last."""
        bodies, part = self.writer.bodies, self.writer.part_of[tensor]
        if isinstance(form, Own):
            state = self.writer.handed_on[tensor]
            return Carry(state, self.taken[state], part, tensor)
        combiner = form.combiner if isinstance(form, Summed) else "add"
        added = form is not None and combiner == "add"
        final = self._summed_in(tensor) if added else tensor
        init, inside = (PTensor(f"{tensor.name}@{word}", final.aval, tensor.role) for word in ("start", "sofar"))
        self.before.append(self._beside(f"{tensor.name}@start", (), init, _start(bodies, final.aval, combiner)))
        if form is None:
            return Carry(init, inside, part, tensor)
        out = PTensor(f"{tensor.name}@more", final.aval, tensor.role)
        if final is not tensor:
            body = add_wide(bodies, final.aval, part.aval)
        else:
            body = bodies.join(tensor.aval, 2) if added else bodies.traced(JOIN[combiner], [tensor.aval] * 2)
        op = self._beside(f"{tensor.name}@more", (inside, part), out, body)
        self.levels[0][0].append(dataclasses.replace(op, loop=self.name, anywhere="sum" if added else ""))
        return Carry(init, inside, out, final, is_sum=added)

    def _summed_in(self, tensor: PTensor) -> PTensor:
        """What the parts of ``tensor`` add up to: itself, or its value in the dtype that the plan asks for."""
        asked = self.writer.sum_dtype
        if not is_widened(tensor, asked):
            return tensor
        wide = PTensor(f"{tensor.name}@sum", tensor.aval.update(dtype=jnp.dtype(asked), weak_type=False), tensor.role)
        body = cast(self.writer.bodies, wide.aval, tensor.dtype)
        self.after.append(self._beside(f"{tensor.name}@cast", (wide,), tensor, body))
        self.writer.wide[tensor] = wide
        return wide

    def _beside(self, path: str, inputs: tuple[PTensor, ...], output: PTensor, body: Body) -> Op:
        kind = "backward" if output.role == "gradient" else self.like.kind
        return Op(path, kind, inputs, (output,), body, call=self.like.call, loop=self.place)


def _fits(op: Op, forms: Mapping[PTensor, Form], part: OpPart) -> bool:
    """Whether ``part`` reads what is there; a join takes nothing but parts."""
    pairs = list(zip(map(forms.get, op.inputs), part.inputs, strict=True))
    join = op.kind == "backward" and op.forward is None and op.again is None
    return all(f == own if join else f in (None, own) for f, own in pairs)


def _names(rule: Rule) -> FactorNames:
    """What the dims of an op's tensors are called."""
    tensors = (*rule.operands, *rule.results)
    named = tuple(tuple(tuple((f, rule.factors[f].size) for f in dim) for dim in dims) for dims in tensors)
    return FactorNames(named, tuple(rule.factors))


JOIN = {"max": lambda a, b: [jnp.maximum(a, b)], "min": lambda a, b: [jnp.minimum(a, b)]}


def _start(bodies: BodyTable, aval: Any, combiner: Combiner) -> Body:
    """What nothing has been added to yet."""
    if combiner == "add":
        return bodies.fill(aval, 0)
    return bodies.traced(lambda: [jnp.broadcast_to(neutral(combiner, aval.dtype), aval.shape)], [])


def _index_aval(*shape: int) -> Any:
    return jax.typeof(np.zeros(shape, np.int32))


def _all_made(item: Item) -> Iterator[PTensor]:
    if isinstance(item, Op):
        yield from item.outputs
    else:
        yield from item.tensors()
        yield from item.loop.results


def _readers(graph: Graph) -> dict[PTensor, list[tuple[Op | None, str | None]]]:
    """Tensor -> the ops and loops that read it; (None, None) for the step's caller."""
    found: dict[PTensor, list[tuple[Op | None, str | None]]] = {}
    for op in graph.ops:
        for tensor in dict.fromkeys(op.inputs):
            found.setdefault(tensor, []).append((op, None))
    for loop in graph.loops.values():
        for tensor in dict.fromkeys((*loop.operands, *loop.returned)):
            found.setdefault(tensor, []).append((None, loop.name))
    for tensor in graph.outputs:
        found.setdefault(tensor, []).append((None, None))
    return found
