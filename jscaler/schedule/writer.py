"""What stands for ops and tensors in the parts of a time axis, whether these are a loop's iterations or groups of ops.

`part_loop` writes a region as a loop, whose body is every part, and `unrolled` part by part. Which ops go on with parts,
what these read, and what is cut off for them or needed whole, is one and the same.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np

from jscaler.capture.bodies import BodyTable, filled_with
from jscaler.capture.recompute import with_fence_body
from jscaler.ir import Body, Graph, Op, PTensor, flat
from jscaler.ir.loop import Item, made_by
from jscaler.ir.mask import Combiner
from jscaler.rules.part_forms import Form, OpPart, Own, Piece, Summed
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.op_parts import passed_on
from jscaler.schedule.time_axes import TimeAxes
from jscaler.schedule.time_regions import TimeRegion, TimeRegions
from jscaler.schedule.turns import stages_by_op
from jscaler.schedule.wide_sums import add_wide, cast, read_wide


class AxisWriter(ABC):
    """Writes the parts of one time axis.

    Attributes:
        cuts: the ops that the plan splits along the axis.
        part_of: (tensor, number of a part) -> what stands for it there; filled here, like what follows.
        cells: path of an op that was written for a part -> the op that it is a part of, and of which.
        new_ops: these ops by path.
        wide: gradient -> the sum in more bits that it is a cast of.
    """

    def __init__(self, graph: Graph, axes: TimeAxes, axis: str, book: RuleBook, bodies: BodyTable, closed: Set[str]):
        self.graph, self.axis, self.in_space, self.book, self.bodies = graph, axis, axes.plan, book, bodies
        self.cuts = {path: own[axis] for path, own in axes.cuts.items() if axis in own}
        self.count = next(iter(self.cuts.values())).parts
        self.loops = dict(graph.loops)
        self.part_of: dict[tuple[PTensor, int], PTensor] = {}
        self.cells: dict[str, tuple[Op, int]] = {}
        self.new_ops: dict[str, Op] = {}
        self.wide: dict[PTensor, PTensor] = {}
        self.read_by: dict[PTensor, set[str | None]] = {t: {None} for t in graph.outputs}  # loops, and the step's caller
        for loop in graph.loops.values():
            for tensor in (*loop.operands, *loop.returned):
                self.read_by.setdefault(tensor, set()).add(loop.name)
        # micro-batches, outermost, go from group to group; a loop within lies on one
        stages = stages_by_op(graph, axes.plan)
        self._groups = stages if axes.names[0] != axis else {}

        def spans(items: Iterable[Item]) -> bool:
            return len({stages[op.path] for op in flat(items) if op.path in stages}) > 1

        self.regions = TimeRegions(graph, self.planned(), self._follow, closed, far=self._far, spans=spans)

    def run(self) -> Graph:
        items = self.regions.rewritten(self.graph.tree, None, self.region)
        ops = tuple(self._linked(op) for op in flat(items))
        return read_wide(dataclasses.replace(self.graph, ops=ops, loops=self.loops), self.wide, self.bodies)

    @abstractmethod
    def planned(self) -> dict[str, OpPart]:
        """What the ops that the plan splits do for one part."""

    @abstractmethod
    def like(self, op: Op, factor: str, form: Piece) -> Iterable[OpPart]:
        """What ``op`` may do for one part if ``factor`` is cut as ``form`` is."""

    @abstractmethod
    def region(self, region: TimeRegion, place: str | None) -> list[Item]:
        """What is written for one region, in the loop ``place``."""

    @abstractmethod
    def counterpart(self, op: Op, source: Op) -> Op | None:
        """What stands now for ``source``, the forward op or the original of ``op``."""

    def _far(self, item: Item, other: Item) -> bool:
        """Whether the plan places two items on different device groups."""
        if not self._groups:
            return False
        mine, its = ({self._groups[op.path] for op in flat([one]) if op.path in self._groups} for one in (item, other))
        return bool(mine) and bool(its) and mine.isdisjoint(its)

    def handed(self, tensor: PTensor, reader: Op) -> bool:
        """Whether another region hands the part of ``tensor`` that it makes to ``reader``."""
        maker = self.graph.producer.get(tensor)
        return not (maker is not None and self._far(maker, reader)) and self.in_step(tensor, reader)

    def in_step(self, tensor: PTensor, reader: Op) -> bool:
        """Whether ``reader`` finds the part of ``tensor`` that another region makes while it runs."""
        return True

    def _follow(self, op: Op, forms: Mapping[PTensor, Form], inside: bool) -> OpPart | None:
        """How an op goes on with the parts that it reads though no plan says so."""
        if op.anywhere == "fence":  # what it takes whole, and who stands behind it reads in parts, is cut first;
            # what a loop around it carries is in parts already, which ``forms`` alone knows
            behind = {t: self._wanted_of(o) for t, o in zip(op.inputs, op.outputs, strict=True)}
            if op.remat:
                behind = {t: form if form is not None else self._begun_with(t) for t, form in behind.items()}
            whole = {t for t in op.inputs if t not in self.regions.forms and forms.get(t) is None}
            forms = {t: behind[t] if t in whole else forms.get(t) for t in op.inputs}
        part = passed_on(op, forms, self.book, inside)
        if part is not None or op.kind == "update" or op.anywhere or op.body is None or not self._between(op):
            return part
        for tensor, dims in zip(op.inputs, self.book.rule(op).operands, strict=True):
            form = forms.get(tensor)
            if isinstance(form, Piece):
                found = (made for factor in dims[form.dim] for made in self.like(op, factor, form))
                return next((made for made in found if _fits(op, forms, made)), None)
        return None

    def _wanted_of(self, tensor: PTensor) -> Form:
        """The part of ``tensor`` that all of its readers in time want."""
        pairs = [(op, self.regions.parts.get(op.path)) for op in self.graph.consumers.get(tensor, ())]
        wanted = {part.inputs[op.inputs.index(tensor)] if part is not None else None for op, part in pairs}
        return wanted.pop() if len(wanted) == 1 else None

    def _begun_with(self, tensor: PTensor) -> Form:
        """The part of ``tensor`` that a loop in time begins with: so does the loop that computes it again."""
        forms = map(self.regions.forms.get, self.graph.flow.targets(tensor, "entry"))
        return next((form for form in forms if form is not None), None)

    def _between(self, op: Op) -> bool:
        """Whether ``op`` stands between ops that the plan splits, or is the backward of one that does."""
        like = op.forward or op.again
        if like is not None:
            return like.path in self.regions.parts
        readers = [r for t in op.outputs for r in self.graph.consumers.get(t, ())]
        # gradients are joined part by part where all of them come so
        return op.kind == "backward" or any(r.path in self.regions.planned and r.kind == op.kind for r in readers)

    def _linked(self, op: Op) -> Op:
        """``op``, whose forward op is the one that stands in the graph now."""
        changes: dict[str, Any] = {}
        for name in ("forward", "again"):
            source = getattr(op, name)
            if source is not None and (new := self.counterpart(op, source)) is not source:
                changes[name] = new
        if changes and op.named is None and op.body is not None:  # it runs whole: its forward has other tensors now
            changes["named"] = self.book.rule(self.cells.get(op.path, (op,))[0]).names()
        return dataclasses.replace(op, **changes) if changes else op

    def outside(self, tensor: PTensor, region: TimeRegion) -> bool:
        """Whether someone needs ``tensor``, which ``region`` makes, whole and outside."""
        if self.read_by.get(tensor, set()) - region.loops:
            return True
        readers = [op for op in self.graph.consumers.get(tensor, ()) if op.path not in region.ops]
        return not all(self._reads_part(tensor, op) for op in readers)

    def _reads_part(self, tensor: PTensor, reader: Op) -> bool:
        part, form = self.regions.parts.get(reader.path), self.regions.forms.get(tensor)
        if part is None or form is None or part.inputs[reader.inputs.index(tensor)] != form:
            return False
        return self.handed(tensor, reader)


def _fits(op: Op, forms: Mapping[PTensor, Form], part: OpPart) -> bool:
    """Whether ``part`` reads what is there; a join takes nothing but parts."""
    pairs = list(zip(map(forms.get, op.inputs), part.inputs, strict=True))
    join = op.kind == "backward" and op.forward is None and op.again is None
    return all(f == own if join else f in (None, own) for f, own in pairs)


class RegionWriter(ABC):
    """Writes the ops of one region for one part after another.

    Attributes:
        wanted: what is needed whole, outside.
        number: of the part that is written; 0 in a loop, whose body is written once.
        levels: what is written, and the loop that it stands in; inner loops last.
    """

    mark = ""  # what follows the names of ops, and of cuts, of this part

    def __init__(self, writer: AxisWriter, region: TimeRegion, place: str | None):
        self.writer, self.region, self.place = writer, region, place
        self.forms = writer.regions.forms
        self.name = writer.axis + "@" + min(region.ops, key=writer.graph.position.__getitem__)
        self.made = dict.fromkeys(t for item in region.items for t in made_by(item))
        self.wanted = [t for t in self.made if writer.outside(t, region)]
        self.like = next(flat(region.items))

    @abstractmethod
    def stand_in(self, tensor: PTensor, aval: Any) -> PTensor:
        """The tensor that an op makes in the place of ``tensor``."""

    def index(self) -> tuple[PTensor, ...]:
        """The number of the part as an operand, where only the running program knows it."""
        return ()

    def begin(self, number: int, items: list[Item], loop: str | None) -> None:
        """From here on, part ``number`` is written, into ``items`` of ``loop``."""
        self.number, self.levels = number, [(items, loop)]
        self.cut: dict[tuple[PTensor, Piece], PTensor] = {}
        for tensor in self.made:
            form = self.forms.get(tensor)
            aval = tensor.aval.update(shape=form.shape(tensor.shape, number)) if isinstance(form, Piece) else tensor.aval
            self.writer.part_of[tensor, number] = self.stand_in(tensor, aval)

    def part(self, tensor: PTensor) -> PTensor:
        """What stands for ``tensor`` in this part."""
        return self.writer.part_of.get((tensor, self.number), tensor)

    def op(self, op: Op) -> None:
        """Write what ``op`` does for this part."""
        writer = self.writer
        part = writer.regions.parts.get(op.path) or OpPart((None,) * len(op.inputs), (None,) * len(op.outputs))
        inputs = tuple(self.read(t, form, op) for t, form in zip(op.inputs, part.inputs, strict=True))
        table = dict(zip(op.inputs, inputs, strict=True))
        body, named = part.of(self.number)
        made = dataclasses.replace(
            op,
            path=op.path + self.mark,
            inputs=(*inputs, *(self.index() if part.indexed else ())),
            outputs=tuple(map(self.part, op.outputs)),
            body=body or op.body,
            named=named or op.named,
            loop=self.levels[-1][1],
            cotangents=tuple((i, table.get(t, t)) for i, t in op.cotangents),
            saved=tuple((table.get(t, t), stands) for t, stands in op.saved),
            backward=None,
        )
        made = with_fence_body(made, writer.bodies)
        writer.cells[made.path], writer.new_ops[made.path] = (op, self.number), made
        self.levels[-1][0].append(made)

    def read(self, tensor: PTensor, form: Form, reader: Op) -> PTensor:
        """What a part reads of ``tensor``: what the region makes, a piece that is cut off here, or the whole."""
        assert not isinstance(form, Summed) or tensor in self.made, f"'{reader.path}' reads '{tensor}' as a summand"
        as_made = isinstance(form, (Piece, Own)) and self.forms.get(tensor) == form
        handed = tensor in self.made or (as_made and self.writer.handed(tensor, reader))
        found = self.writer.part_of[tensor, self.number] if handed else tensor
        if not isinstance(form, Piece) or (handed and as_made):
            return found
        if (tensor, form) not in self.cut:
            self.cut[tensor, form] = self._cut(tensor, found, form, reader)
        return self.cut[tensor, form]

    def _cut(self, tensor: PTensor, whole: PTensor, form: Piece, reader: Op) -> PTensor:
        """A piece of ``whole``: of ``tensor`` itself, or of what every part makes whole in its place.

        Of a tensor of one value (zeros, to which the gradients of a loop over layers are added) it is as many of that.
        """
        number, before = self.number, [t for t, _ in self.cut].count(tensor)
        mark = f"#{before}" if before else ""
        aval = whole.aval.update(shape=form.shape(whole.shape, number), weak_type=False)
        made = PTensor(tensor.name + "@" + self.name + mark + self.mark, aval, tensor.role)
        maker, bodies = self.writer.graph.producer.get(tensor), self.writer.bodies
        value = filled_with(maker.body.jaxpr) if maker is not None and maker.body is not None else None
        if value is not None:
            inputs, body = (), bodies.fill(aval, np.asarray(value).item())
        else:
            inputs = (whole, *self.index())
            key = ("take", form, None if len(inputs) > 1 else number)
            body = bodies.traced(lambda x, i=number: [form.take(x, i)], [t.aval for t in inputs], key)
        kind = "backward" if reader.kind == "backward" else "forward"
        path = tensor.name + "@cut" + mark + "@" + self.name + self.mark
        items, loop = self.levels[-1] if tensor in self.made else self.levels[0]
        items.append(Op(path, kind, inputs, (made,), body, call=reader.call, loop=loop))
        return made

    def beside(self, path: str, inputs: tuple[PTensor, ...], output: PTensor, body: Body) -> Op:
        """An op at the region's place."""
        kind = "backward" if output.role == "gradient" else self.like.kind
        return Op(path, kind, inputs, (output,), body, call=self.like.call, loop=self.place)

    def joining(self, sofar: PTensor, part: PTensor, combiner: Combiner) -> Body:
        """Joins a part to what is there."""
        bodies = self.writer.bodies
        if combiner != "add":
            return bodies.join(part.aval, 2, combiner)
        return bodies.join(part.aval, 2) if sofar.dtype == part.dtype else add_wide(bodies, sofar.aval, part.aval)

    def cast(self, tensor: PTensor, wide: PTensor) -> Op:
        """Casts a sum in more bits, that of all parts, back."""
        self.writer.wide[tensor] = wide
        return self.beside(tensor.name + "@cast", (wide,), tensor, cast(self.writer.bodies, wide.aval, tensor.dtype))
