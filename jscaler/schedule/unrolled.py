"""Time axes whose parts are unequal, or that a plan orders one by one: each part is a group of ops of its own.

    x ──► cut[0] ──► f[0] ──► g[0] ──┐
    x ──► cut[1] ──► f[1] ──► g[1] ──┴──► join ──► y           pinned: cut[1] and f[1] wait for g[0]

Which ops run part by part together is what `regions` finds for loops. The parts are pinned by orders (`op_order`), which
are lowered to fences around all that an op reads, and what is done before: only one part's temporaries live at a time, and
the backward pass computes again what it needs of a part, as a loop's would.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError
from jscaler.ir import Graph, Op, PTensor, flat
from jscaler.ir.loop import Item
from jscaler.primitives import Assign, Order, Trans
from jscaler.primitives.algorithms import parts_text
from jscaler.primitives.plan import Decision
from jscaler.rules.part_forms import OpPart, Piece, Ranged, Summed, cell_parts
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.pinned_runs import Runs, pins
from jscaler.schedule.time_axes import CellOrder, Cells, TimeAxes, TimeCut
from jscaler.schedule.time_regions import TimeRegion
from jscaler.schedule.turns import Turns
from jscaler.schedule.wide_sums import cast, wide_sum
from jscaler.schedule.writer import AxisWriter, RegionWriter


def unrolled(graph: Graph, axes: TimeAxes, number: int, book: RuleBook, bodies: BodyTable) -> tuple[Graph, TimeAxes]:
    """``graph`` with a group of ops for every part along the axis ``number``, and the decisions on them.

    Raises:
        PlanError: an op cannot run part by part so.
        OrderError: the parts cannot run in the order that the plan says.
    """
    name = axes.names[number]
    writer = _Writer(graph, axes, name, book, bodies)
    made = writer.run()
    cells = writer.paths
    dealt = tuple(d for decision in axes.plan.decisions for d in _dealt(decision, cells, axes.turns))
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


def _dealt(decision: Decision, cells: Mapping[str, Sequence[str]], turns: Turns) -> list[Decision]:
    """``decision`` on each cell of the op that it names."""
    if isinstance(decision, (Trans, Assign)):
        paths = cells.get(decision.op, (decision.op,))
        return [dataclasses.replace(turns.of(decision, turn), op=path) for turn, path in enumerate(paths)]
    if isinstance(decision, Order) and (decision.before in cells or decision.after in cells):
        before, after = (cells.get(path, (path,)) for path in (decision.before, decision.after))
        return [Order(a, b) for a in before for b in after]
    return [decision]


class _Writer(AxisWriter):
    """Writes the parts of one time axis as groups of ops."""

    def __init__(self, graph: Graph, axes: TimeAxes, axis: str, book: RuleBook, bodies: BodyTable):
        super().__init__(graph, axes, axis, book, bodies, frozenset(graph.loops))
        self.paths: dict[str, tuple[str, ...]] = {}  # of an op's cells
        self.runs = Runs()

    def planned(self) -> dict[str, OpPart]:
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

    def like(self, op: Op, factor: str, form: Piece) -> Iterator[OpPart]:
        assert isinstance(form, Ranged)
        part = cell_parts(op, factor, form.sizes, self.book, self.bodies)
        if part is not None:
            yield part

    def region(self, region: TimeRegion, place: str | None) -> list[Item]:
        return _Region(self, region, place).run()

    def counterpart(self, op: Op, source: Op) -> Op | None:
        """The same part of ``source``; who is no part of one finds none of those."""
        if op.path in self.cells:
            return self.new_ops.get(f"{source.path}[{self.cells[op.path][1]}]")
        return None if source.path in self.paths else source


class _Region(RegionWriter):
    """Writes the parts of one region, one after another; those of the backward pass from the last."""

    writer: _Writer

    def run(self) -> list[Item]:
        numbers = list(range(self.writer.count))
        if self.like.kind == "backward" or self.like.again is not None:
            numbers.reverse()
        self.last = numbers[-1]
        items: list[Item] = []
        sums: dict[PTensor, PTensor] = {}
        ops = list(flat(self.region.items))
        for number in numbers:
            start = len(items)
            self.begin(number, items, self.place)
            for op in ops:
                self.op(op)
            for tensor in self.wanted:
                form = self.forms.get(tensor)
                if isinstance(form, Summed):
                    sums[tensor] = self._added(tensor, form, sums.get(tensor))
            self.writer.runs.add(self.place, self.name, [op.path for op in flat(items[start:])])
        self.writer.paths |= {op.path: tuple(f"{op.path}[{i}]" for i in range(self.writer.count)) for op in ops}
        for tensor in self.wanted:
            form = self.forms.get(tensor)
            if isinstance(form, Ranged):
                parts = tuple(self.writer.part_of[tensor, i] for i in range(self.writer.count))
                avals = [t.aval for t in parts]
                body = self.writer.bodies.traced(lambda *xs, form=form: [form.merge(xs)], avals, key=("merge", form))
                items.append(self.beside(tensor.name + "@merge", parts, tensor, body))
        return items

    @property
    def mark(self) -> str:
        return f"[{self.number}]"

    def stand_in(self, tensor: PTensor, aval: Any) -> PTensor:
        """What is the same for all parts is handed on by the last, under its own name."""
        kept = self.number == self.last and self.forms.get(tensor) is None and tensor in self.wanted
        return tensor if kept else PTensor(tensor.name + self.mark, aval, tensor.role)

    def _added(self, tensor: PTensor, form: Summed, before: PTensor | None) -> PTensor:
        """What the parts so far add up to, or join to; a sum of gradients in more bits is cast behind the last."""
        part, items = self.part(tensor), self.levels[0][0]
        asked = self.writer.in_space.accumulation.dtype if form.combiner == "add" else None
        wide = wide_sum(tensor, asked, tensor.name + "@wide" + self.mark)
        if before is None and wide is None:
            return part
        out = tensor if self.number == self.last else PTensor(tensor.name + "@sum" + self.mark, tensor.aval, tensor.role)
        out = out if wide is None else wide
        if before is None:
            body = cast(self.writer.bodies, part.aval, out.dtype)
            items.append(self.beside(tensor.name + "@first" + self.mark, (part,), out, body))
        else:
            body = self.joining(before, part, form.combiner)
            items.append(self.beside(tensor.name + "@more" + self.mark, (before, part), out, body))
        items += [self.cast(tensor, out)] if wide is not None and self.number == self.last else []
        return out


def _sizes(op: Op, cut: TimeCut, book: RuleBook) -> tuple[int, ...]:
    """The sizes of the parts of an op; of a backward op whose factor is another's, those of its own."""
    if cut.sizes is not None:
        return cut.sizes
    factor = book.rule(op).factors.get(cut.factor)
    return (factor.size // cut.parts if factor is not None else 0,) * cut.parts
