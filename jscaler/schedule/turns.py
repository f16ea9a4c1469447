"""Parts in time that take turns on device groups: each part of an op may lie on devices of its own.

A plan that assigns the parts of an op along a time axis to different devices (Chimera's two directions,
https://arxiv.org/abs/2107.06925) is periodic: of as many *turns* as it has different parts. Its loop then takes a part of
each turn in an iteration, and writes its body out for each::

    iteration i      part 2i      f   on devices 0, 1 ──► g   on 2, 3 ──┐ out
                     part 2i + 1  f~1 on devices 2, 3 ──► g~1 on 0, 1 ──┴─► out~1      carries go from turn to turn
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate
from jscaler.errors import PlanError
from jscaler.ir import Graph, Loop, Nest, Op, Place, PTensor, Stacked, flat
from jscaler.ir.inherited import inherited
from jscaler.ir.loop import Item, made_by
from jscaler.ir.name import turn_mark
from jscaler.primitives import Assign, GridAxis, OnDevices, Order, Plan, Trans
from jscaler.primitives.plan import Decision
from jscaler.schedule.assigned_cells import assignments, cell_places, with_one_each

Places = tuple[Place, ...]
Devices = tuple[frozenset[int], ...]  # at each turn


@dataclass(frozen=True)
class Turns:
    """The ops whose parts in time lie on devices of their own.

    Attributes:
        places: op path -> the places of its cells in space, at each of its turns.
        counts: time axis -> how many turns it has.
    """

    places: Mapping[str, tuple[Places, ...]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def devices(self) -> dict[str, Devices]:
        """Op path -> its devices at each of its turns."""
        return {path: tuple(frozenset(p.device for p in places) for places in own) for path, own in self.places.items()}

    def of(self, decision: Decision, turn: int) -> Decision:
        """``decision`` as it is at a turn."""
        own = self.places.get(decision.op) if isinstance(decision, Assign) else None
        return decision if own is None else dataclasses.replace(decision, places=own[turn % len(own)])


def taken_in_turn(plan: Plan) -> tuple[Plan, Turns]:
    """``plan`` with parts in time on the devices of their first turn, and the turns.

    Raises:
        PlanError: a part lies nowhere, or twice; or parts of two axes of one op lie on devices of their own.
    """
    grids = {d.op: d.axes for d in plan.decisions if isinstance(d, Trans) and any(a.time for a in d.axes)}
    apart = {op: own for op, own in assignments(plan, grids).items() if any(_names_parts(d, grids[op]) for d in own)}
    counts = {d.axis: 2 for d in plan.decisions if isinstance(d, OnDevices) and d.turned}
    if not apart:
        return plan, Turns({}, counts)
    places: dict[str, tuple[Places, ...]] = {}
    first: dict[str, Assign] = {}
    for op, own in apart.items():
        axis, turns = _turns(op, grids[op], own)
        first[op] = Assign(op, tuple((0, a.parts) for a in grids[op]), turns[0])
        if len(turns) > 1:
            places[op] = turns
            counts[axis] = math.lcm(counts.get(axis, 1), len(turns))
    return with_one_each(plan, first), Turns(places, counts)


def devices_of_cells(plan: Plan) -> dict[str, Devices]:
    """The devices that the plan puts the cells of each op on."""
    known: dict[int, Devices] = {}  # many ops lie on one array of places
    for d in plan.decisions:
        if isinstance(d, Assign) and id(d.places) not in known:
            known[id(d.places)] = (frozenset(d.devices),)
    return {d.op: known[id(d.places)] for d in plan.decisions if isinstance(d, Assign)}


def stages_by_op(graph: Graph, plan: Plan) -> dict[str, tuple[Devices, int | None]]:
    """The devices of every op at each of its turns, and its stage, if ``plan`` knows several groups.

    Open ops go with what they read, fences with those that read them.
    """
    scheduled = plan.table is not None
    plan, turns = taken_in_turn(plan)
    on = [d for d in plan.decisions if isinstance(d, OnDevices)]
    devices = {path: tuple(frozenset(own) for own in (d.devices, d.turned) if own) for d in on for path in d.ops}
    devices |= devices_of_cells(plan) | turns.devices
    stages = {path: d.stage for d in on for path in d.ops} if scheduled else {}
    known = {path: (own, stages.get(path)) for path, own in devices.items()}
    return inherited(graph, known, from_makers=True) if len(set(devices.values())) > 1 else {}


def _names_parts(decision: Assign, axes: Sequence[GridAxis]) -> bool:
    """Whether a decision names the devices of single parts along a time axis."""
    cells = math.prod(stop - start for start, stop in decision.index)
    in_space = math.prod(stop - start for (start, stop), a in zip(decision.index, axes, strict=True) if not a.time)
    parted = any(a.time and cut != (0, a.parts) for cut, a in zip(decision.index, axes, strict=True))
    return parted or len(decision.places) == cells > in_space


def _turns(op: str, axes: Sequence[GridAxis], own: Sequence[Assign]) -> tuple[str, tuple[Places, ...]]:
    """The time axis along which the parts of ``op`` lie on devices of their own, and the places at each turn."""
    places = cell_places(op, axes, own)
    times = [i for i, a in enumerate(axes) if a.time]
    along = [i for i in times if not (places == places.take([0], i)).all()]
    if len(along) > 1:
        names = " and ".join(f"'{axes[i].time}'" for i in along)
        raise PlanError(f"'{op}': the parts along {names} lie on devices of their own; those of one time axis may")
    at = along[0] if along else times[0]
    for i in times:
        places = places.take([0], i) if i != at else places
    parts = places.shape[at]
    rows = [tuple(row) for row in np.moveaxis(places, at, 0).reshape(parts, -1)]
    period = next(n for n in range(1, parts + 1) if parts % n == 0 and rows == rows[:n] * (parts // n))
    return axes[at].time, tuple(rows[:period])


def in_turns(graph: Graph, plan: Plan, turns: Turns, axis: str, bodies: BodyTable) -> tuple[Graph, Plan]:
    """``graph`` whose loops of ``axis`` take a part of each turn in an iteration, and the decisions on these."""
    if axis not in turns.counts:
        return graph, plan
    writer = _Writer(graph, axis, turns.counts[axis], bodies)
    made = writer.run()
    dealt = tuple(new for decision in plan.decisions for new in writer.dealt(decision, turns))
    return made, dataclasses.replace(plan, decisions=dealt)


class _Writer:
    """Writes the bodies of an axis' loops out.

    Attributes:
        tensors: for each turn tensor of a body -> what stands for it.
        ops: path, turn -> what stands for an op of a body.
    """

    def __init__(self, graph: Graph, axis: str, count: int, bodies: BodyTable):
        self.graph, self.axis, self.count, self.bodies = graph, axis, count, bodies
        self.loops = dict(graph.loops)
        self.tensors: list[dict[PTensor, PTensor]] = [{} for _ in range(count)]
        self.ops: dict[tuple[str, int], Op] = {}

    def run(self) -> Graph:
        items = [made for item in self.graph.tree for made in self._item(item)]
        return dataclasses.replace(self.graph, ops=tuple(flat(items)), loops=self.loops)

    def dealt(self, decision: Decision, turns: Turns) -> list[Decision]:
        """``decision`` at each turn of the ops that it names."""
        if isinstance(decision, OnDevices):
            by_turn: dict[tuple[int, ...], list[str]] = {}
            for path in decision.ops:
                for turn in self._turns_of(path):
                    own = decision.turned if decision.turned and turn % 2 else decision.devices
                    by_turn.setdefault(own, []).append(self._path(path, turn))
            return [OnDevices(tuple(paths), own, stage=decision.stage) for own, paths in by_turn.items()]
        if isinstance(decision, Order):
            first, second = (self._turns_of(path) for path in (decision.before, decision.after))
            pairs = zip(first, second, strict=True) if len(first) == len(second) else itertools.product(first, second)
            return [Order(self._path(decision.before, i), self._path(decision.after, j)) for i, j in pairs]
        if not isinstance(decision, Trans | Assign):
            return [decision]
        return [
            dataclasses.replace(turns.of(decision, turn), op=self._path(decision.op, turn))
            for turn in self._turns_of(decision.op)
        ]

    def _turns_of(self, path: str) -> Sequence[int]:
        return range(self.count) if (path, 1) in self.ops else (0,)

    def _path(self, path: str, turn: int) -> str:
        return path + turn_mark(turn) if (path, turn) in self.ops else path

    def _item(self, item: Item) -> list[Item]:
        if isinstance(item, Op):
            return [self._op(item, 0, item.loop)]
        if item.loop.time != self.axis:
            inner = tuple(made for one in item.items for made in self._item(one))
            return [Nest(item.loop, inner)]
        return self._loop(item)

    def _loop(self, nest: Nest) -> list[Item]:
        """``nest``, what takes its stacks apart in front of it, and what puts those that it leaves together."""
        loop, length = nest.loop, nest.loop.length // self.count
        for turn in range(1, self.count):
            table = self.tensors[turn]
            table.update({x.slice: self._named(x.slice, turn) for x in loop.xs})
            table.update({t: self._named(t, turn) for item in nest.items for t in made_by(item)})
            table.update({c.inside: self.tensors[turn - 1].get(c.out, c.out) for c in loop.carries})
        before, behind = list[Item](), list[Item]()
        xs = [self._taken(x, turn, loop, before) for x in loop.xs for turn in range(self.count)]
        ys = [new for y in loop.ys for new in self._left(y, loop, behind)]
        carries = (dataclasses.replace(c, out=self.tensors[-1].get(c.out, c.out)) for c in loop.carries)
        body = [self._copied(item, turn, loop.name) for turn in range(self.count) for item in nest.items]
        new = dataclasses.replace(loop, length=length, carries=tuple(carries), xs=tuple(xs), ys=tuple(ys), turns=self.count)
        self.loops[loop.name] = new
        return [*before, Nest(new, tuple(body)), *behind]

    def _named(self, tensor: PTensor, turn: int) -> PTensor:
        return dataclasses.replace(tensor, name=tensor.name + turn_mark(turn))

    def _taken(self, x: Stacked, turn: int, loop: Loop, before: list[Item]) -> Stacked:
        """The slices of one turn."""
        aval = x.stack.aval.update(shape=(loop.length // self.count, *x.stack.shape[1:]))
        stack = PTensor(x.stack.name + f"@turn{turn}", aval, x.stack.role)
        maker, step = self.graph.producer.get(x.stack), self.count
        if maker is not None and not maker.inputs and maker.body is not None:  # the numbers of parts
            jaxpr, place = maker.body.jaxpr, maker.outputs.index(x.stack)
            body = self.bodies.traced(lambda: [evaluate(jaxpr, [])[place][turn::step]], [])
            inputs = ()
        else:
            body = self.bodies.traced(lambda whole: [whole[turn::step]], [x.stack.aval])
            inputs = (x.stack,)
        kind = maker.kind if maker is not None else "forward"
        call = maker.call if maker is not None else None
        before.append(Op(stack.name, kind, inputs, (stack,), body, call=call, loop=loop.parent))
        return dataclasses.replace(x, stack=stack, slice=self.tensors[turn].get(x.slice, x.slice))

    def _left(self, y: Stacked, loop: Loop, behind: list[Item]) -> list[Stacked]:
        """What the parts of each turn leave; behind the loop they are put together in their order."""
        aval = y.stack.aval.update(shape=(loop.length // self.count, *y.stack.shape[1:]))
        stacks = tuple(PTensor(y.stack.name + f"@turn{turn}", aval, y.stack.role) for turn in range(self.count))
        shape = y.stack.shape
        body = self.bodies.traced(lambda *own: [jnp.stack(own, 1).reshape(shape)], [aval] * self.count)
        maker = next(op for op in self.graph.ops if op.loop == loop.name)
        behind.append(Op(y.stack.name + "@turns", maker.kind, stacks, (y.stack,), body, call=maker.call, loop=loop.parent))
        return [
            dataclasses.replace(y, stack=stack, slice=self.tensors[turn].get(y.slice, y.slice))
            for turn, stack in enumerate(stacks)
        ]

    def _copied(self, item: Item, turn: int, place: str) -> Item:
        """An item of a body at a turn, in the loop ``place``."""
        if isinstance(item, Op):
            return self._op(item, turn, place)
        name = item.loop.name + turn_mark(turn)
        items = tuple(self._copied(one, turn, name) for one in item.items)
        table = self.tensors[turn]
        forward = item.loop.forward and item.loop.forward + turn_mark(turn)
        inner = item.loop.mapped(lambda t: table.get(t, t))
        self.loops[name] = dataclasses.replace(inner, name=name, parent=place, forward=forward)
        return Nest(self.loops[name], items)

    def _op(self, op: Op, turn: int, place: str | None) -> Op:
        table = self.tensors[turn]

        def like(source: Op | None) -> Op | None:
            return None if source is None else self.ops.get((source.path, turn), source)

        if turn == 0:  # what it links to may stand for itself in another loop, too
            made = dataclasses.replace(op, forward=like(op.forward), again=like(op.again))
        else:
            made = dataclasses.replace(
                op.mapped(lambda t: table.get(t, t)),
                path=op.path + turn_mark(turn),
                forward=like(op.forward),
                again=like(op.again),
                backward=None,
                loop=place,
                turn=turn,
            )
        if place is not None:
            self.ops[op.path, turn] = made
        return made
