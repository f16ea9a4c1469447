"""Time axes become loops: what runs part by part is written as a user would write the ``lax.scan`` by hand.

    for part i of n:   x' = part i of x ──► ops at part shapes ──► y' ──► stack ──► y        cut, and put together
                                                              └──► s' ──► + ───► carry ──► s  added up in place

The loops are the graph's own (`ir.Loop`): how their tensors lie on devices, their collectives, their lowering to
``lax.scan``, estimates and proofs are those of a stack of layers. Ops keep their paths and the names of their factors, so
that the plan's decisions in space hold for the parts.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from jscaler.capture.bodies import BodyTable
from jscaler.ir import Body, Graph, Op, PTensor, flat
from jscaler.ir.loop import Item, chain_of
from jscaler.ir.walk import closure
from jscaler.primitives import Decision, Plan, Trans
from jscaler.rules.book import RuleBook
from jscaler.schedule.alone import handed_on
from jscaler.schedule.part_loop import RegionWriter, TornApartError
from jscaler.schedule.parts import Form, OpPart, Sliced, Summed, like_its_forward, names_of, op_part, passed_on
from jscaler.schedule.regions import Region, Regions
from jscaler.schedule.time_axes import TimeCut, time_axes
from jscaler.schedule.unrolled import unrolled
from jscaler.schedule.wide import read_wide


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
        except TornApartError as torn:
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
        items = self.regions.rewritten(self.graph.tree, None, self._region)
        ops = tuple(self._linked(op) for op in flat(items))
        return read_wide(dataclasses.replace(self.graph, ops=ops, loops=self.loops), self.wide, self.bodies)

    def _parts(self) -> dict[str, OpPart]:
        found = {}
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
            is_alone = op.path in self.alone  # its body is that of a part
            if op.loop is None and op.kind != "backward" and not is_alone and all(t in known for t in op.inputs):
                known.update(op.outputs)
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

    def _reaches(self, tensor: PTensor, parts: Mapping[str, OpPart]) -> bool:
        """Whether an op in time reads ``tensor``, or what others make of it (the division of a loss, and its backward)."""
        readers = self.graph.consumers

        def onward(made: PTensor) -> Iterable[PTensor]:
            return (t for op in readers.get(made, ()) if op.kind != "update" for t in op.outputs)

        return any(op.path in parts for t in closure([tensor], onward) for op in readers.get(t, ()))

    # -- one level of loops

    def _region(self, region: Region, place: str | None) -> list[Item]:
        return RegionWriter(self, region, place).run()

    def _linked(self, op: Op) -> Op:
        """``op``, whose forward op is the one that stands in the graph now."""
        changes: dict[str, Any] = {}
        for name in ("forward", "again"):
            source = getattr(op, name)
            if source is not None and source.path in self.new_ops:
                changes[name] = self.new_ops[source.path]
        if changes and op.named is None and op.body is not None:  # it runs whole: its forward has other tensors now
            changes["named"] = names_of(self.graph.rule(self.graph[op.path]))
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


def _fits(op: Op, forms: Mapping[PTensor, Form], part: OpPart) -> bool:
    """Whether ``part`` reads what is there; a join takes nothing but parts."""
    pairs = list(zip(map(forms.get, op.inputs), part.inputs, strict=True))
    join = op.kind == "backward" and op.forward is None and op.again is None
    return all(f == own if join else f in (None, own) for f, own in pairs)


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
