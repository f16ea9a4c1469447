"""A time axis as loops: of each region what comes in is cut, its ops run at part shapes, what leaves is joined.

whole ──► cut by the part's number ──┐
what the parts share ────────────────┴──► ops ──┬──► summand ──► + ──► carry ──► the sum
                                                └──► part ──► stack ──► merged ──► the whole
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError, listing
from jscaler.ir import Body, Carry, Graph, Loop, Nest, Op, PTensor, Stacked
from jscaler.ir.kinds import learned
from jscaler.ir.loop import Item, chain_of
from jscaler.ir.mask import Combiner
from jscaler.ir.walk import closure
from jscaler.primitives import Trans
from jscaler.rules.neutral import neutral
from jscaler.rules.part_forms import Form, OpPart, Own, Piece, Sliced, Summed
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.loop_tails import with_tails
from jscaler.schedule.op_parts import like_its_forward, op_part
from jscaler.schedule.per_microbatch_state import handed_on
from jscaler.schedule.time_axes import TimeAxes, TimeCut
from jscaler.schedule.time_regions import BehindSumsError, TimeRegion, shifted
from jscaler.schedule.wide_sums import wide_sum
from jscaler.schedule.writer import AxisWriter, RegionWriter


def in_loops(graph: Graph, axes: TimeAxes, axis: str, book: RuleBook, bodies: BodyTable, closed: Set[str]) -> Graph:
    """``graph`` with the loops of one time axis.

    Args:
        closed: loops in whose bodies the axis runs, iteration by iteration.
    """
    try:
        return _Writer(graph, axes, axis, book, bodies, closed).run()
    except TornApartError as torn:
        return in_loops(graph, axes, axis, book, bodies, closed | {torn.loop})
    except BehindSumsError as behind:
        return in_loops(with_tails(graph, behind.late), axes, axis, book, bodies, closed)


class TornApartError(Exception):
    """A loop runs part by part as a whole, and another that reads what is inside it does not."""

    def __init__(self, loop: str):
        self.loop = loop


class _Writer(AxisWriter):
    """Writes the parts of one time axis as loops.

    Attributes:
        alone: ops that run on each part alone.
        handed_on: a result that a part hands to the next -> the state that it takes the place of.
        found: such a state -> what an iteration finds in its place, which backward ops of another loop read, too.
    """

    def __init__(self, graph: Graph, axes: TimeAxes, axis: str, book: RuleBook, bodies: BodyTable, closed: Set[str]):
        self.alone = axes.plan.alone
        self.grids = {d.op: (*d.axes, *d.chunks) for d in axes.plan.decisions if isinstance(d, Trans)}
        self.bodies_of_parts: dict[int, Body] = {}
        super().__init__(graph, axes, axis, book, bodies, closed)
        self.handed_on = handed_on(graph, self.regions.parts)
        self.found: dict[PTensor, PTensor] = {}

    def planned(self) -> dict[str, OpPart]:
        found: dict[str, OpPart] = {}
        made: dict[PTensor, Form] = {}
        for path, cut in self.cuts.items():
            op = self.graph[path]
            alone = made if (op.forward or op.again or op).path in self.alone else None
            part = op_part(op, cut, self.book, self.bodies, self.bodies_of_parts, alone)
            assert part is not None or alone is None or op.forward is not None, (
                f"{op} has the body of a part, and runs whole"
            )
            if part is not None:
                if alone is not None and op.forward is not None and op.forward.path in found:
                    part = like_its_forward(op, part, found[op.forward.path], self.bodies)
                found[path] = part
                made.update(zip(op.outputs, part.outputs, strict=True))
        for path in (path for path in found if path in self.alone):
            self._check_reads_no_sum(self.graph[path], found)
        return self._without_counts(found)

    def _check_reads_no_sum(self, op: Op, parts: Mapping[str, OpPart]) -> None:
        """What an op that runs alone reads is no sum over all rows: traced on a part, it would be the part's."""

        def form(tensor: PTensor) -> Form:
            maker = self.graph.producer.get(tensor)
            part = parts.get(maker.path) if maker is not None else None
            return part.outputs[maker.outputs.index(tensor)] if maker is not None and part is not None else None

        def behind(tensor: PTensor) -> Iterable[PTensor]:
            maker = self.graph.producer.get(tensor)
            return maker.inputs if maker is not None and form(tensor) is None else ()

        for tensor in closure(op.inputs, behind):
            if isinstance(form(tensor), Summed):
                maker = self.graph.producer[tensor].path
                error = PlanError(
                    f"'{op.path}' runs on each micro-batch alone, and reads '{tensor.name}', which '{maker}' adds up over "
                    "the rows of all (a mask's count); a policy of one's own makes it part of the op (graph.fuse)"
                )
                error.alone = (maker,)
                raise error

    def _without_counts(self, parts: dict[str, OpPart]) -> dict[str, OpPart]:
        """``parts`` without what only counts inputs (a mask's sum, by which a loss is divided): it runs before, on all.

        What reads a sum over all parts could not stand in their loop otherwise.
        """
        graph, maker = self.graph, self.graph.producer
        handed = {graph.inputs[i] for o, i in graph.next_version.items() if self._runs_alone(maker.get(graph.outputs[o]))}
        trained = learned(graph)  # a cast of a scalar parameter, too
        known = set(graph.inputs) - trained - handed | {c for c, _ in graph.constants}
        alone: set[str] = set()
        for op in self.graph.ops:
            is_alone = op.path in self.alone  # its body is that of a part
            if op.loop is None and op.kind != "backward" and not is_alone and all(t in known for t in op.inputs):
                known.update(t for t in op.outputs if t not in trained)
                alone.add(op.path)
        counts = [
            op
            for op in self.graph.ops
            if op.path in alone and op.path in parts
            for t, form in zip(op.outputs, parts[op.path].outputs, strict=True)
            if isinstance(form, Summed) and self._reaches(t, parts)
        ]
        made = self.graph.producer
        whole = {op.path for op in closure(counts, lambda op: [made[t] for t in op.inputs if t in made])}
        return {path: part for path, part in parts.items() if path not in whole}

    def _runs_alone(self, op: Op | None) -> bool:
        return op is not None and op.path in self.alone

    def _reaches(self, tensor: PTensor, parts: Mapping[str, OpPart]) -> bool:
        """Whether an op in time reads ``tensor``, or what others make of it (the division of a loss, and its backward)."""
        readers = self.graph.consumers

        def onward(made: PTensor) -> Iterable[PTensor]:
            read = (t for op in readers.get(made, ()) if op.kind != "update" for t in op.outputs)
            return itertools.chain(read, self.graph.flow.targets(made))

        return any(op.path in parts for t in closure([tensor], onward) for op in readers.get(t, ()))

    def like(self, op: Op, factor: str, form: Piece) -> Iterator[OpPart]:
        assert isinstance(form, Sliced)
        rule = self.book.rule(op)
        found = (rule.dim_of(dims, factor) for dims in rule.operands)
        outer = next(place[1] for place in found if place is not None)
        for blocks in dict.fromkeys((max(1, form.blocks // outer), 1)):
            cut = TimeCut(self.axis, factor, form.parts, blocks)
            made = op_part(op, cut, self.book, self.bodies, self.bodies_of_parts)
            if made is not None and self._leaves_room(op, factor, made):
                yield made

    def _leaves_room(self, op: Op, factor: str, part: OpPart) -> bool:
        """Whether what the plan splits ``op`` into between devices divides its parts in time."""
        axes = [a for a in self.grids.get(op.path, ()) if a.factor == factor]
        if any(a.sizes or a.algorithm for a in axes):
            return False
        left = dict(pair for dims in part.named.tensors for dim in dims for pair in dim) if part.named else {}
        return left.get(factor, 1) % math.prod(a.parts for a in axes) == 0

    def region(self, region: TimeRegion, place: str | None) -> list[Item]:
        return _Region(self, region, place).run()

    def counterpart(self, op: Op, source: Op) -> Op | None:
        return self.new_ops.get(source.path, source)

    def in_step(self, tensor: PTensor, reader: Op) -> bool:
        """Whether the loops around ``reader`` go with those around the maker of ``tensor``, iteration for iteration."""
        mine, other = (chain_of(place, self.graph.loops) for place in (self.graph.homes.get(tensor), reader.loop))
        return len(mine) == len(other) and all(map(self._alike, mine, other))

    def _alike(self, loop: str, other: str) -> bool:
        loops, lifts = self.graph.loops, self.regions.lifts
        return loops[loop].length == loops[other].length and len({lifts[n] for n in (loop, other) if n in lifts}) < 2


class _Region(RegionWriter):
    """Writes one region as a loop."""

    writer: _Writer

    def __init__(self, writer: _Writer, region: TimeRegion, place: str | None):
        super().__init__(writer, region, place)
        self.before: list[Item] = []
        self.after: list[Item] = []
        self.inside = {t: item.loop.name for item in region.items if isinstance(item, Nest) for t in item.tensors()}
        self.taken = {  # state that a part takes over: the input -> what an iteration finds
            state: PTensor(tensor.name + "@before", state.aval, state.role)
            for tensor, state in writer.handed_on.items()
            if tensor in self.made and tensor not in self.inside
        }
        writer.found.update(self.taken)
        self.number_of: PTensor | None = None  # of the part that an iteration runs
        self.xs: list[Stacked] = []

    def run(self) -> list[Item]:
        writer = self.writer
        body: list[Item] = []
        self.begin(0, body, self.name)
        for item in self.region.items:
            self._item(item)
        carries, ys = [], []
        for tensor in self.wanted:
            if tensor in self.inside:
                raise TornApartError(self.inside[tensor])
            form = self.forms.get(tensor)
            if isinstance(form, Sliced):
                ys.append(self._merged(tensor, form))
            else:
                carries.append(self._carried(tensor, form))
        loop = Loop(self.name, writer.count, False, tuple(carries), tuple(self.xs), tuple(ys), self.place, time=writer.axis)
        writer.loops[self.name] = loop
        return [*self.before, Nest(loop, tuple(body)), *self.after]

    def stand_in(self, tensor: PTensor, aval: Any) -> PTensor:
        name = tensor.name + "@" + self.writer.axis + ":part"  # whatever the user calls the axis
        return PTensor(name, aval, tensor.role)

    def _item(self, item: Item) -> None:
        if isinstance(item, Op):
            self.op(item)
        else:
            self._nest(item)

    def _nest(self, nest: Nest) -> None:
        loop = nest.loop
        carries = tuple(
            dataclasses.replace(
                c,
                init=self.read(c.init, self.writer.regions.begun(c), self.like),
                inside=self.part(c.inside),
                out=self.part(c.out),
                final=self.part(c.final),
            )
            for c in loop.carries
        )
        xs = tuple(
            dataclasses.replace(
                x, stack=self.read(x.stack, shifted(self.forms.get(x.slice), 1), self.like), slice=self.part(x.slice)
            )
            for x in loop.xs
        )
        around, name = self.levels[-1]
        inner: list[Item] = []
        self.levels.append((inner, loop.name))
        for item in nest.items:
            self._item(item)
        self.levels.pop()
        ys = tuple(dataclasses.replace(y, stack=self.part(y.stack), slice=self.part(y.slice)) for y in loop.ys)
        new = dataclasses.replace(loop, carries=carries, xs=xs, ys=ys, parent=name)
        self.writer.loops[loop.name] = new
        around.append(Nest(new, tuple(inner)))

    # -- into the loop

    def read(self, tensor: PTensor, form: Form, reader: Op) -> PTensor:
        if tensor in self.taken and form is None:
            return self.taken[tensor]
        source = reader.forward or reader.again
        if tensor in self.writer.found and source is not None and source.path in self.writer.alone:
            return self.writer.found[tensor]
        is_state = tensor in self.writer.handed_on.values() and tensor in self.writer.graph.inputs
        assert form is not None or reader.path not in self.writer.alone or not is_state, tensor
        return super().read(tensor, form, reader)

    def index(self) -> tuple[PTensor, ...]:
        if self.number_of is None:
            self.number_of = PTensor(self.name + ":index", _index_aval())
            stack = PTensor(self.name + ":indices", _index_aval(self.writer.count))
            count = self.writer.count
            body = self.writer.bodies.traced(lambda: [lax.iota(jnp.int32, count)], [], key=("count", count))
            self.before.append(self.beside(self.name + ":count", (), stack, body))
            self.xs.append(Stacked(stack, self.number_of))
        return (self.number_of,)

    # -- out of it

    def _merged(self, tensor: PTensor, form: Sliced) -> Stacked:
        part = self.part(tensor)
        stack = PTensor(
            tensor.name + "@stack", part.aval.update(shape=(self.writer.count, *part.shape), weak_type=False), tensor.role
        )
        body = self.writer.bodies.traced(lambda x: [form.merge(x)], [stack.aval], key=("merge", form))
        self.after.append(self.beside(tensor.name + "@merge", (stack,), tensor, body))
        return Stacked(stack, part)

    def _carried(self, tensor: PTensor, form: Form) -> Carry:
        """What all parts add up to, or join to; of what is the same for all, the last."""
        bodies, part = self.writer.bodies, self.part(tensor)
        if isinstance(form, Own):
            state = self.writer.handed_on.get(tensor)
            if state is None:
                readers = [op.path for op in self.writer.graph.consumers.get(tensor, ())]
                error = PlanError(
                    f"'{tensor.name}' is what each micro-batch has for itself, and is read behind the loop over them, by "
                    f"{listing(readers)}; a policy of one's own makes these part of the op that makes it (graph.fuse)"
                )
                error.alone = tuple(readers)
                raise error
            return Carry(state, self.taken[state], part, tensor)
        combiner = form.combiner if isinstance(form, Summed) else "add"
        added = form is not None and combiner == "add"
        wide = wide_sum(tensor, self.writer.in_space.accumulation.dtype, tensor.name + "@sum") if added else None
        final = tensor if wide is None else wide
        self.after += [] if wide is None else [self.cast(tensor, wide)]
        init, inside = (PTensor(tensor.name + "@" + word, final.aval, tensor.role) for word in ("start", "sofar"))
        start = self.beside(tensor.name + "@start", (), init, _start(bodies, final.aval, combiner))
        self.before.append(dataclasses.replace(start, anywhere="zeros") if combiner == "add" else start)
        if form is None:
            return Carry(init, inside, part, tensor)
        out = PTensor(tensor.name + "@more", final.aval, tensor.role)
        op = self.beside(tensor.name + "@more", (inside, part), out, self.joining(inside, part, combiner))
        self.levels[0][0].append(dataclasses.replace(op, loop=self.name, anywhere="sum" if added else ""))
        return Carry(init, inside, out, final, is_sum=added)


def _start(bodies: BodyTable, aval: Any, combiner: Combiner) -> Body:
    """What nothing has been added to yet."""
    if combiner == "add":
        return bodies.fill(aval, 0)
    return bodies.traced(lambda: [jnp.broadcast_to(neutral(combiner, aval.dtype), aval.shape)], [], key=(combiner, aval))


def _index_aval(*shape: int) -> Any:
    return jax.typeof(np.zeros(shape, np.int32))
