"""Time axes whose parts are unequal, or that a plan orders one by one: each part is a group of ops of its own.

    x ──► cut[0] ──► f[0] ──► g[0] ──┐
    x ──► cut[1] ──► f[1] ──► g[1] ──┴──► join ──► y           pinned: cut[1] and f[1] wait for g[0]

Which ops run part by part together is what `regions` finds for loops. The parts are pinned by orders (`op_order`), which
are lowered to fences around all that an op reads, and what is done before: only one part's temporaries live at a time, and
the backward pass computes again what it needs of a part, as a loop's would.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jscaler.capture.bodies import BodyTable
from jscaler.capture.recompute import with_fence_body
from jscaler.errors import PlanError
from jscaler.ir import Body, Graph, Op, PTensor, flat
from jscaler.ir.loop import Item
from jscaler.primitives import Assign, Order, Trans
from jscaler.primitives.algorithms import parts_text
from jscaler.primitives.plan import Decision
from jscaler.rules.book import RuleBook
from jscaler.schedule.parts import CellParts, Form, OpPart, Ranged, Summed, cell_parts, passed_on
from jscaler.schedule.regions import Region, Regions
from jscaler.schedule.runs import Runs, pins
from jscaler.schedule.time_axes import CellOrder, Cells, TimeAxes, TimeCut
from jscaler.schedule.wide import add_wide, cast, is_widened, read_wide


def unrolled(graph: Graph, axes: TimeAxes, number: int, book: RuleBook, bodies: BodyTable) -> tuple[Graph, TimeAxes]:
    """``graph`` with a group of ops for every part along the axis ``number``, and the decisions on them.

    Raises:
        PlanError: an op cannot run part by part so.
        OrderError: the parts cannot run in the order that the plan says.
    """
    name = axes.names[number]
    cuts = {path: own[name] for path, own in axes.cuts.items() if name in own}
    writer = _Writer(graph, name, cuts, book, bodies, axes.plan.accumulation.dtype)
    made = writer.run()
    cells = writer.cells
    dealt = tuple(d for decision in axes.plan.decisions for d in _dealt(decision, cells))
    asked = [
        Order(a, b)
        for order in axes.orders
        if _axis_of(order) == name
        for a in _paths(order.decision.before, order.before, cells)
        for b in _paths(order.decision.after, order.after, cells)
    ]
    known = [*asked, *(d for d in dealt if isinstance(d, Order))]
    plan = dataclasses.replace(axes.plan, decisions=(*dealt, *asked, *pins(made, writer.runs, known)))
    later = {new: axes.cuts[path] for path in axes.cuts for new in cells.get(path, (path,))}
    return made, dataclasses.replace(axes, cuts=later, plan=plan)


def _axis_of(order: CellOrder) -> str:
    """The time axis whose cells an order names."""
    names = list(dict.fromkeys(cells.axis for cells in (order.before, order.after) if cells is not None))
    if len(names) > 1:
        raise PlanError(f"{order.decision}: its cells lie on different time axes, '{names[0]}' and '{names[1]}'")
    return names[0]


def _paths(path: str, named: Cells | None, cells: Mapping[str, Sequence[str]]) -> Sequence[str]:
    own = cells.get(path, (path,))
    if named is None:
        return own
    if path not in cells:
        raise PlanError(f"op_order names cells of '{path}' along '{named.axis}', which another time axis has cut before")
    return [own[i] for i in named.numbers]


def _dealt(decision: Decision, cells: Mapping[str, Sequence[str]]) -> list[Decision]:
    """``decision`` on each cell of the op that it names."""
    if isinstance(decision, (Trans, Assign)):
        return [dataclasses.replace(decision, op=path) for path in cells.get(decision.op, (decision.op,))]
    if isinstance(decision, Order) and (decision.before in cells or decision.after in cells):
        before, after = (cells.get(path, (path,)) for path in (decision.before, decision.after))
        return [Order(a, b) for a in before for b in after]
    return [decision]


class _Writer:
    """Writes the parts of one time axis."""

    def __init__(self, graph: Graph, axis: str, cuts: Mapping[str, TimeCut], book: RuleBook, bodies: BodyTable, dtype: Any):
        self.graph, self.axis, self.book, self.bodies = graph, axis, book, bodies
        self.sum_dtype: str | None = dtype  # of gradients with fewer bits
        self.wide: dict[PTensor, PTensor] = {}  # gradient -> the sum in more bits that it is a cast of
        self.cuts = cuts
        self.regions = Regions(graph, self._parts(), self._follow, frozenset(graph.loops))
        self.part_of: dict[tuple[PTensor, int], PTensor] = {}
        self.cells: dict[str, tuple[str, ...]] = {}
        self.old: dict[str, tuple[Op, int]] = {}  # a cell's path -> the op that it is a part of, and which
        self.runs = Runs()
        self.returned = {t for loop in graph.loops.values() for t in (*loop.operands, *loop.returned)} | set(graph.outputs)

    def run(self) -> Graph:
        ops = tuple(flat(self.regions.rewritten(self.graph.tree, None, self._region)))
        table = {op.path: op for op in ops}
        made = dataclasses.replace(self.graph, ops=tuple(self._linked(op, table) for op in ops))
        return read_wide(made, self.wide, self.bodies)

    # -- what runs part by part

    def _parts(self) -> dict[str, OpPart]:
        found: dict[str, OpPart] = {}
        for path, cut in self.cuts.items():
            op = self.graph[path]
            if cut.blocks > 1:
                raise PlanError(
                    f"'{path}': its parts along '{cut.factor}' are ordered one by one, and devices split it too; "
                    "split another factor between devices, or leave the order of the parts open"
                )
            part = cell_parts(op, cut.factor, _sizes(op, cut, self.book), self.book, self.bodies)
            if part is not None:
                found[path] = part
            elif op.forward is None and op.again is None:
                parts = parts_text(cut.parts, cut.sizes)
                raise PlanError(
                    f"'{path}' cannot run in parts {parts} of '{cut.factor}' one after another: it needs it whole"
                )
        return found

    def _follow(self, op: Op, forms: Mapping[PTensor, Form]) -> OpPart | None:
        """How an op goes on with the parts that it reads though no plan says so."""
        part = passed_on(op, forms, self.book)
        if part is not None or op.kind == "update" or op.anywhere or op.body is None or not self._between(op):
            return part
        for tensor, dims in zip(op.inputs, self.book.rule(op).operands, strict=True):
            form = forms.get(tensor)
            for factor in dims[form.dim] if isinstance(form, Ranged) else ():
                assert isinstance(form, Ranged)
                made = cell_parts(op, factor, form.sizes, self.book, self.bodies)
                if made is not None and all(
                    forms.get(t) in (None, own) for t, own in zip(op.inputs, made.inputs, strict=True)
                ):
                    return made
        return None

    def _between(self, op: Op) -> bool:
        """Whether ``op`` stands between ops that the plan splits, or is the backward of one that does."""
        like = op.forward or op.again
        if like is not None:
            return like.path in self.regions.parts
        readers = [r for t in op.outputs for r in self.graph.consumers.get(t, ())]
        return op.kind == "backward" or any(r.path in self.regions.planned and r.kind == op.kind for r in readers)

    # -- one level of loops

    def _region(self, region: Region, place: str | None) -> list[Item]:
        return _RegionWriter(self, region, place).run()

    def _linked(self, op: Op, table: Mapping[str, Op]) -> Op:
        """``op``, whose forward op is the one that stands in the graph now."""
        changes: dict[str, object] = {}
        for name in ("forward", "again"):
            source = getattr(op, name)
            if source is None or (source.path in table and op.path not in self.old):
                continue
            path = f"{source.path}[{self.old[op.path][1]}]" if op.path in self.old else ""
            changes[name] = table.get(path)
            if path not in table and op.named is None and name == "forward":
                changes["named"] = self.book.names_from_forward(op)
        return dataclasses.replace(op, **changes) if changes else op  # type: ignore[arg-type]

    def outside(self, tensor: PTensor, region: Region) -> bool:
        """Whether someone needs ``tensor``, which ``region`` makes, whole and outside."""
        if tensor in self.returned:
            return True
        form = self.regions.forms.get(tensor)
        for op in self.graph.consumers.get(tensor, ()):
            if op.path not in region.ops:
                part = self.regions.parts.get(op.path)
                if part is None or not isinstance(form, Ranged) or part.inputs[op.inputs.index(tensor)] != form:
                    return True
        return False


class _RegionWriter:
    """Writes the parts of one region, one after another; those of the backward pass from the last."""

    def __init__(self, writer: _Writer, region: Region, place: str | None):
        self.writer, self.region, self.place = writer, region, place
        self.ops = list(flat(region.items))
        self.forms = writer.regions.forms
        self.name = f"{writer.axis}@{min(region.ops, key=writer.graph.position.__getitem__)}"
        self.count = next(iter(writer.cuts.values())).parts
        self.made = [t for op in self.ops for t in op.outputs]
        self.items: list[Op] = []

    def run(self) -> list[Item]:
        first = self.ops[0]
        numbers = list(range(self.count))
        if first.kind == "backward" or first.again is not None:
            numbers.reverse()
        wanted = [t for t in self.made if self.writer.outside(t, self.region)]
        sums: dict[PTensor, PTensor] = {}
        for number in numbers:
            self.cut: dict[tuple[PTensor, Ranged], PTensor] = {}
            start = len(self.items)
            last = number == numbers[-1]
            for op in self.ops:
                self._cell(op, number, wanted if last else ())
            for tensor in wanted:
                form = self.forms.get(tensor)
                if isinstance(form, Summed):
                    sums[tensor] = self._added(tensor, form, sums.get(tensor), number, last)
            self.writer.runs.add(self.place, self.name, [op.path for op in self.items[start:]])
        for op in self.ops:
            self.writer.cells[op.path] = tuple(f"{op.path}[{i}]" for i in range(self.count))
        for tensor in wanted:
            form = self.forms.get(tensor)
            if isinstance(form, Ranged):
                parts = tuple(self.writer.part_of[tensor, i] for i in range(self.count))
                body = self.writer.bodies.traced(lambda *xs, form=form: [form.merge(xs)], [t.aval for t in parts])
                self.items.append(self._beside(f"{tensor.name}@merge", parts, tensor, body))
        return list(self.items)

    def _cell(self, op: Op, number: int, whole: Sequence[PTensor]) -> None:
        """One part of an op; what is the same for all parts is handed on by the last, under its own name."""
        writer = self.writer
        part = writer.regions.parts[op.path]
        inputs = tuple(self._read(t, form, number, op) for t, form in zip(op.inputs, part.inputs, strict=True))
        table = dict(zip(op.inputs, inputs, strict=True))
        for tensor, form in zip(op.outputs, part.outputs, strict=True):
            shape = form.shape(tensor.shape, number) if isinstance(form, Ranged) else tensor.shape
            kept = form is None and tensor in whole
            made = tensor if kept else PTensor(f"{tensor.name}[{number}]", tensor.aval.update(shape=shape), tensor.role)
            writer.part_of[tensor, number] = made
        changes: dict[str, object] = {
            "path": f"{op.path}[{number}]",
            "inputs": inputs,
            "outputs": tuple(writer.part_of[t, number] for t in op.outputs),
            "cotangents": tuple((i, table.get(t, t)) for i, t in op.cotangents),
            "saved": tuple((table.get(t, t), stands) for t, stands in op.saved),
            "backward": None,
        }
        if isinstance(part, CellParts):
            changes |= {"body": part.bodies[number], "named": part.names[number]}
        elif part.named is not None:
            changes["named"] = part.named
        made_op = with_fence_body(dataclasses.replace(op, **changes), writer.bodies)  # type: ignore[arg-type]
        writer.old[made_op.path] = op, number
        self.items.append(made_op)

    def _read(self, tensor: PTensor, form: Form, number: int, reader: Op) -> PTensor:
        """What a part reads of ``tensor``: a part that another makes, a piece that is cut off here, or the whole."""
        here = self.writer.part_of.get((tensor, number))
        if here is not None and (self.forms.get(tensor) == form if isinstance(form, Ranged) else tensor in self.made):
            return here
        if not isinstance(form, Ranged):
            return tensor
        if (tensor, form) not in self.cut:
            source = here if here is not None and tensor in self.made else tensor
            mark = f"#{len(self.cut)}" if any(t == tensor for t, _ in self.cut) else ""
            aval = source.aval.update(shape=form.shape(source.shape, number), weak_type=False)
            made = PTensor(f"{tensor.name}@{self.name}{mark}[{number}]", aval, tensor.role)
            body = self.writer.bodies.traced(lambda x: [form.take(x, number)], [source.aval])
            path = f"{tensor.name}@cut{mark}@{self.name}[{number}]"
            kind = "backward" if reader.kind == "backward" else "forward"
            self.items.append(Op(path, kind, (source,), (made,), body, call=reader.call, loop=self.place))
            self.cut[tensor, form] = made
        return self.cut[tensor, form]

    def _added(self, tensor: PTensor, form: Summed, before: PTensor | None, number: int, last: bool) -> PTensor:
        """What the parts so far add up to, or join to."""
        part = self.writer.part_of[tensor, number]
        if form.combiner == "add" and is_widened(tensor, self.writer.sum_dtype):
            return self._added_wide(tensor, part, before, number, last)
        if before is None:
            return part
        out = tensor if last else PTensor(f"{tensor.name}@sum[{number}]", tensor.aval, tensor.role)
        bodies = self.writer.bodies
        body = bodies.join(tensor.aval, 2)
        if form.combiner != "add":
            join = jnp.maximum if form.combiner == "max" else jnp.minimum
            body = bodies.traced(lambda a, b: [join(a, b)], [tensor.aval] * 2)
        self.items.append(self._beside(f"{tensor.name}@more[{number}]", (before, part), out, body))
        return out

    def _added_wide(self, tensor: PTensor, part: PTensor, before: PTensor | None, number: int, last: bool) -> PTensor:
        """A sum of gradients in more bits than they have; behind the last it is cast."""
        bodies, dtype = self.writer.bodies, self.writer.sum_dtype
        wide = PTensor(f"{tensor.name}@wide[{number}]", tensor.aval.update(dtype=jnp.dtype(dtype)), tensor.role)
        if before is None:
            body = cast(bodies, tensor.aval, dtype)
            self.items.append(self._beside(f"{tensor.name}@first[{number}]", (part,), wide, body))
            return wide
        body = add_wide(bodies, wide.aval, part.aval)
        self.items.append(self._beside(f"{tensor.name}@more[{number}]", (before, part), wide, body))
        if last:
            body = cast(bodies, wide.aval, tensor.dtype)
            self.items.append(self._beside(f"{tensor.name}@cast", (wide,), tensor, body))
            self.writer.wide[tensor] = wide
        return wide

    def _beside(self, path: str, inputs: tuple[PTensor, ...], output: PTensor, body: Body) -> Op:
        like = self.ops[0]
        kind = "backward" if output.role == "gradient" else like.kind
        return Op(path, kind, inputs, (output,), body, call=like.call, loop=self.place)


def _sizes(op: Op, cut: TimeCut, book: RuleBook) -> tuple[int, ...]:
    """The sizes of the parts of an op; of a backward op whose factor is another's, those of its own."""
    if cut.sizes is not None:
        return cut.sizes
    factor = book.rule(op).factors.get(cut.factor)
    return (factor.size // cut.parts if factor is not None else 0,) * cut.parts
