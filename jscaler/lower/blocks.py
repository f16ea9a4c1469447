"""What runs on which device group, and what goes from group to group: a program for each group and phase of a step.

A *phase* is a stretch of the step: all of it; or, where the ops of a loop over micro-batches lie on several groups, what
stands in front of that loop, its body (of one that takes several micro-batches in an iteration, which take turns on the
groups: what it does for each), and what stands behind. `lower.op_blocks` says of which block each op of a phase is. A
block's *level* is behind those of the blocks that it reads::

    group 0   │ level 0 ├──────────────────┤ level 2 │      a value that a later level of the same group reads
    group 1             └──► level 1 ──────┘                stays where it is; one that another group reads crosses

Where stages have ranges of a stack of layers, the layers of a group are a program, and what it does besides (a look-up in a
table of words, the loss) is another: two *places* of one group, between which a value counts as crossing and is not sent.
So the layers of all stages are one program, for `lower.twins`, JAX and XLA.

Where a table has such blocks, gradients of weights (W), which no crossing waits for, are a part of their backward's level,
and what is computed again (R) is one of its forward's.

`lower.block_cuts` cuts each program by these levels. A value that goes from program to program is an array of its devices'
parts, one behind the other: so any layout can, also value shares and uneven blocks, in the order in which the group's mesh
has its devices.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from jscaler.clusters import FEW_STEPS, CostModel
from jscaler.errors import PlanError
from jscaler.ir import Graph, Loop, Nest, Op, PTensor, nested
from jscaler.ir.loop import Item, made_by, reads_of
from jscaler.ir.op import RecomputeRegion
from jscaler.ir.walk import closure
from jscaler.lower.level import FRONT, START, WEIGHTS, Level
from jscaler.lower.op_blocks import OpBlocks, Phase, Place, ops_of, region_of
from jscaler.lower.program import Program, Slot, Writer
from jscaler.lower.sums import summing_dtypes
from jscaler.materialize import Completed, DeviceMesh, Layout
from jscaler.materialize.crossing import Crossing, find_crossing, on_devices
from jscaler.rules.rule_book import RuleBook
from jscaler.tables.cuts import Cuts

Key = tuple[int, Place]  # number of a phase, and where: a program


@dataclass(frozen=True)
class Transfer:
    """A value that crosses from group to group, behind the blocks of ``level`` of ``phase``.

    Attributes:
        source, target: the numbers of the value that leaves, and of the one that arrives.
        crossing: its ends are how the value leaves and arrives; what is done inside of the groups, blocks do.
    """

    tensor: PTensor
    source: int
    target: int
    crossing: Crossing
    phase: int = 0
    level: Level = START


@dataclass(frozen=True)
class CarriedValue:
    """The numbers of a carry's values: in front of the loop, taken and left by an iteration, and behind the last."""

    init: int
    inside: int
    out: int
    final: int
    is_sum: bool


@dataclass(frozen=True)
class StackedValue:
    """The numbers of what iterations leave, and of the stack of all of these."""

    piece: int
    stack: int


@dataclass(frozen=True)
class SpanningLoop:
    """A loop whose body lies on several groups.

    Attributes:
        phases: those of its body, one for each turn of an iteration.
        indices: the numbers of the values that are the micro-batch's number, on each group that reads it, and whose turn
            it is.
    """

    loop: Loop
    phases: range
    carries: tuple[CarriedValue, ...]
    stacks: tuple[StackedValue, ...]
    indices: Mapping[int, int]

    def microbatch(self, phase: int, iteration: int) -> int:
        """The number of the micro-batch that an iteration's ``phase`` is for."""
        return iteration * len(self.phases) + phase - self.phases.start


@dataclass(frozen=True)
class Programs:
    """A step on device groups.

    Attributes:
        programs: by phase, then by group.
        spanning: the loop over groups, if there is one.
        values: how many numbers of values are taken; results have the first ones.
    """

    programs: tuple[Program, ...]
    transfers: tuple[Transfer, ...]
    spanning: SpanningLoop | None
    values: int


def make_programs(
    graph: Graph,
    order: Sequence[Op],
    completed: Completed,
    book: RuleBook,
    after: Mapping[str, Sequence[str]],
    cost: CostModel = FEW_STEPS,
    reduce_dtype: str | None = None,
    cuts: Cuts | None = None,
) -> Programs:
    """Lay ops out in ``order``, on each group, with an adapter wherever a reader wants another layout than is at hand.

    Args:
        after: op path -> paths of ops that ``op_order`` puts before it.
        cost: what adapters and crossings cost.
        reduce_dtype: the dtype in which gradients are added between devices; see `lower.sums` for the default.
        cuts: what blocks of a loop over groups are cut at, beside crossings; two stages of one group are blocks of their
            own, too.

    Raises:
        PlanError: a loop lies on several groups which cannot be lowered so.
    """
    cuts = cuts or Cuts()
    read = _read(graph) if len(completed.groups) > 1 else graph.by_path
    order = [op for op in order if op.path in read]
    phases = _phases(graph, nested(order, graph.loops), completed, after)
    dtypes = summing_dtypes(graph, order, reduce_dtype)
    levels = OpBlocks(graph, completed, after, cuts)
    levels.find_layers(phases)
    made = _Blocks(graph, completed, cost, phases, levels, cuts.weights)

    def writer(key: Key) -> Writer:
        return Writer(graph, completed, book, cost, dtypes, after, made.bring, key)

    made.new_writer = writer
    made.run()
    return Programs(made.programs(), tuple(made.transfers), made.spanning, made.count)


def _read(graph: Graph) -> set[str]:
    """The ops in loops, those whose results are read, and those that do more; an unread loss is none."""
    ends = [t for loop in graph.loops.values() for t in (*loop.operands, *loop.returned)]
    found = [graph.producer[t] for t in (*graph.outputs, *ends) if t in graph.producer]
    found += [op for op in graph.ops if op.loop is not None or (op.body is not None and op.body.jaxpr.effects)]
    return {op.path for op in closure(found, lambda op: (graph.producer[t] for t in op.inputs if t in graph.producer))}


def _phases(graph: Graph, items: Sequence[Item], completed: Completed, after: Mapping[str, Sequence[str]]) -> list[Phase]:
    """One phase; or more, where a loop lies on several groups: what it needs runs in front of it."""
    spanning = [item for item in items if isinstance(item, Nest) and len(_groups(item, completed)) > 1]
    if not spanning:
        return [Phase(tuple(items))]
    nest = _checked(spanning, completed)
    maker = {t: item for item in items for t in made_by(item)}
    of_op = {op.path: item for item in items for op in ops_of(item)}

    def needs(item: Item) -> list[Item]:
        found = [maker[t] for t in reads_of(item) if t in maker]
        found += [of_op[p] for op in ops_of(item) for p in after.get(op.path, ()) if p in of_op]
        return [other for other in found if other is not item]

    needed = {id(item) for item in closure([nest], needs)}
    before = tuple(item for item in items if id(item) in needed and item is not nest)
    behind = tuple(item for item in items if id(item) not in needed)
    turns = (tuple(i for i in nest.items if ops_of(i)[0].turn == turn) for turn in range(nest.loop.turns))
    return [Phase(before), *(Phase(own, nest.loop, 1) for own in turns), Phase(behind)]


def _checked(spanning: Sequence[Nest], completed: Completed) -> Nest:
    """The one loop over groups that there may be.

    Raises:
        PlanError: there are two; it is the model's own; a loop in it is on several groups, too.
    """
    nest, *others = spanning
    inner = next((i for i in nest.items if isinstance(i, Nest) and len(_groups(i, completed)) > 1), None)
    own = inner or next((other for other in spanning if not other.loop.time), None)
    if own is not None:
        (one, first), (other, second), *_ = _groups(own, completed).items()
        cuts = ["x".join(str(size) for _, size in group.axes) for group in (one, other)]
        turned = f" (in another order and cut {cuts[1]}, not {cuts[0]})" if set(one.devices) == set(other.devices) else ""
        raise PlanError(
            f"the loop '{own.loop.name}' has ops on several device groups, '{first.path}' on {list(one.devices)} and "
            f"'{second.path}' on {list(other.devices)}{turned}: only the loop over micro-batches may, outermost; place all "
            "ops of this one on one group, or cut it into ranges, one for each group (graph.ranges)"
        )
    if others:
        one, other = nest.loop, others[0].loop
        why = "give the ops of both one time axis, or else"
        if one.time == other.time:  # else they would be one loop
            why = "one of them needs what all micro-batches leave of the other (a gradient at parameters that it changes);"
        raise PlanError(
            f"two loops have ops on several device groups, '{one.name}' and '{other.name}': one loop over micro-batches "
            f"may; {why} place those of one on a single group"
        )
    return nest


def _groups(item: Item, completed: Completed) -> dict[DeviceMesh, Op]:
    """The groups of an item, each with an op that lies there."""
    return {completed.group_of(completed.ops[op.path].placement.group): op for op in ops_of(item)}


@dataclass
class _Blocks:
    """Writes the programs of all phases.

    Attributes:
        held: tensor, place -> the program of that place that has it, or in which it arrives.
        given: of a program, its slots that are not its own: the argument, or the number of the value.
        finals: what a loop over groups leaves -> the number of the value, and its layout.
    """

    graph: Graph
    completed: Completed
    cost: CostModel
    phases: Sequence[Phase]
    levels: OpBlocks
    weights_apart: bool = False
    new_writer: Callable[[Key], Writer] = field(init=False)
    writers: dict[Key, Writer] = field(default_factory=dict)
    held: dict[tuple[PTensor, int], Key] = field(default_factory=dict)
    given: dict[Key, dict[Slot, PTensor | int]] = field(default_factory=dict)
    inputs: dict[Key, list[tuple[PTensor, Slot, Layout]]] = field(default_factory=dict)
    imports: dict[Key, list[tuple[PTensor, Slot, Layout, int, Level]]] = field(default_factory=dict)  # value, level
    exports: dict[Key, list[tuple[Slot, Layout, int, Level | None]]] = field(default_factory=dict)  # value, level
    left: dict[tuple[Key, Slot, Layout, Level | None], int] = field(default_factory=dict)
    own_levels: dict[Key, Level] = field(default_factory=dict)
    pinned: dict[Key, dict[str, Level]] = field(default_factory=dict)
    finals: dict[PTensor, tuple[int, Layout]] = field(default_factory=dict)
    inside: dict[PTensor, tuple[int, Layout]] = field(default_factory=dict)
    indices: dict[Key, int] = field(default_factory=dict)  # number of the value
    slices: set[PTensor] = field(default_factory=set)  # the micro-batch's number, in the loop's words
    made: dict[PTensor, tuple[Key, Level, bool]] = field(default_factory=dict)  # program, level, if it is backward
    transfers: list[Transfer] = field(default_factory=list)
    spanning: SpanningLoop | None = None
    phase: int = 0

    def __post_init__(self) -> None:
        self.count = len(self.graph.outputs)  # numbers of values, behind those of results
        self.everywhere = {t for t, _ in self.graph.constants}
        waits = {p for others in self.levels.after.values() for p in others}
        self.ordered = waits | self.levels.after.keys()

    def run(self) -> None:
        """Write all phases; the results are left where they are made, or else in the last."""
        if len(self.completed.groups) == 1:
            self._open((0, 0))
        for number, phase in enumerate(self.phases):
            self.phase = number
            if phase.loop is None:
                self.levels.begin(number, phase, {t: layout for t, (_, layout) in self.finals.items()})
                self._write(phase.items)
            elif phase.first == number:
                self._repeat(phase.loop, range(number, number + phase.loop.turns))
        self.results: dict[Key, list[tuple[Slot, Layout, int]]] = {}
        for number, (tensor, layout) in enumerate(zip(self.graph.outputs, self.completed.outputs, strict=True)):
            key = self._home_of_result(tensor, layout)
            slot = self._open(key).read(tensor, layout)
            self.results.setdefault(key, []).append((slot, layout, number))

    def _home_of_result(self, tensor: PTensor, layout: Layout) -> Key:
        found = (self.held.get((tensor, place)) for place in self.levels.places(layout))
        known = (key for key in found if key is not None and self.phases[key[0]].loop is None)
        return next(known, (self.phase, self.levels.number_of(layout)))

    def _write(self, items: Iterable[Item]) -> None:
        again: dict[tuple[Key, RecomputeRegion | None], dict[str, Level]] = {}
        for item in items:
            level, place, mark = self.levels.of_op[ops_of(item)[0].path]
            key = self.phase, place
            writer = self._open(key)
            for tensor in self.levels.handed_over(item):
                layout = _between(writer.slots[tensor][0][0])
                self._leave(writer, writer.read(tensor, layout), layout, self.levels.of_tensor[tensor][0])
            writer.write([item])
            self.own_levels[key] = max(self.own_levels[key], level)
            self.pinned[key].update((op.path, level) for op in ops_of(item) if op.path in self.ordered)
            if mark is not None and mark[1] == "R":
                again.setdefault((key, region_of(ops_of(item)[0])), {}).update((op.path, level) for op in ops_of(item))
            made = (*ops_of(item), item) if isinstance(item, Nest) else (item,)
            for tensor in (t for one in made for t in (one.outputs if isinstance(one, Op) else one.loop.results)):
                self.held[tensor, place] = key
                self.made[tensor] = key, level, mark is not None and mark[1] == "B"
        for (key, _), levels in again.items():  # a region runs when all that it reads is there
            self.pinned[key].update(dict.fromkeys(levels, max(levels.values())))

    def _repeat(self, loop: Loop, phases: range) -> None:
        """The body of a loop over groups, once for all iterations."""
        laid = self.completed.loops[loop.name]
        carried = []
        for carry, layout in zip(loop.carries, laid.carries, strict=True):
            front = self._open((self.phase - 1, self.levels.place_of(carry.init, layout)))
            init = self._leave(front, front.read(carry.init, layout), layout, None, fresh=True)
            values = CarriedValue(init, self._new(), self._new(), self._new(), carry.is_sum)
            self.inside[carry.inside] = values.inside, layout
            carried.append(values)
        for x in loop.xs:
            self._check_counts(loop, x.stack)
        self.slices = {x.slice for x in loop.xs}
        for self.phase in phases:
            there = {c.inside: layout for c, layout in zip(loop.carries, laid.carries, strict=True)}
            self.levels.begin(self.phase, self.phases[self.phase], there)
            self._write(self.phases[self.phase].items)

        def writer_of(tensor: PTensor, layout: Layout) -> Writer:
            phase = self.made[tensor][0][0] if tensor in self.made else phases.start
            return self._open((max(phase, phases.start), self.levels.place_of(tensor, layout)))

        exits = []
        for values, carry, layout in zip(carried, loop.carries, laid.carries, strict=True):
            writer = writer_of(carry.out, layout)
            self._leave(writer, writer.read(carry.out, layout), layout, self._exit(carry.out, writer), values.out)
            self.finals[carry.final] = values.final, layout
        for y, layout in zip(loop.ys, laid.ys, strict=True):
            writer = writer_of(y.slice, layout)
            level = self._exit(y.slice, writer)
            piece, stack = self._leave(writer, writer.read(y.slice, layout), layout, level, fresh=True), self._new()
            exits.append(StackedValue(piece, stack))
            self.finals[y.stack] = stack, layout.stacked(loop.length)
        indices = {value: phase - phases.start for (phase, _), value in self.indices.items()}
        self.spanning = SpanningLoop(loop, phases, tuple(carried), tuple(exits), indices)

    def _exit(self, tensor: PTensor, writer: Writer) -> Level | None:
        """Behind which level an iteration leaves ``tensor``: that of its op, or the one of weights behind it."""
        key, level, is_backward = self.made.get(tensor, (None, START, False))
        if key != writer.key:
            return None
        return Level(level.number, WEIGHTS) if is_backward and self.weights_apart else level

    def _check_counts(self, loop: Loop, stack: PTensor) -> None:
        maker = self.graph.producer.get(stack)
        if maker is None or maker.inputs or len(stack.shape) != 1:
            raise PlanError(
                f"the loop '{loop.name}' has ops on several device groups and takes slices of '{stack.name}', which "
                "another loop leaves: give the ops of both loops one time axis"
            )

    # -- programs

    def _open(self, key: Key) -> Writer:
        """The program ``key``; of a step on one group it takes all arguments and constants, else those that it reads."""
        if key not in self.writers:
            self.writers[key] = self.new_writer(key)
            self.inputs[key], self.imports[key], self.exports[key] = [], [], []
            self.given[key], self.own_levels[key], self.pinned[key] = {}, START, {}
            if len(self.completed.groups) == 1:
                for tensor in self.graph.inputs:
                    self._take(key, tensor)
                for tensor, _ in self.graph.constants:
                    self._take(key, tensor)
        return self.writers[key]

    def _take(self, key: Key, tensor: PTensor) -> None:
        group = self.levels.group(key[1])
        constant = tensor in self.everywhere
        layout = Layout.replicated(group, tensor.shape) if constant else self.completed.inputs[tensor]
        slot = self._defined(key, tensor, layout)
        self.inputs[key].append((tensor, slot, layout))
        self.given[key][slot] = tensor

    def _import(self, key: Key, tensor: PTensor, layout: Layout, value: int, level: Level = START) -> None:
        slot = self._defined(key, tensor, layout)
        self.imports[key].append((tensor, slot, layout, value, level))
        self.given[key][slot] = value

    def _defined(self, key: Key, tensor: PTensor, layout: Layout) -> Slot:
        writer = self.writers[key]
        inside, writer.tasks = writer.tasks, writer.outermost
        slot = writer.define(tensor, layout)
        writer.tasks = inside
        return slot

    def _leave(
        self, writer: Writer, slot: Slot, layout: Layout, level: Level | None, value: int | None = None, fresh: bool = False
    ) -> int:
        """The number of the value that ``writer`` leaves behind ``level``; None for the end of its phase."""
        end = (writer.key, slot, layout, level)
        if value is None and not fresh and end in self.left:
            return self.left[end]
        number = self._new() if value is None else value
        self.exports[writer.key].append((slot, layout, number, level))
        if value is None and not fresh:
            self.left[end] = number
        return number

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    # -- from program to program

    def bring(self, key: Key, tensor: PTensor, layout: Layout) -> None:
        """Define ``tensor``, which another program has, in the program ``key``: in ``layout``, or close to it."""
        phase, place = key
        group = self.levels.group(place)
        in_loop = self.phases[phase].loop is not None
        if tensor in self.everywhere or (self._lies(tensor, group) and not in_loop):
            self._take(key, tensor)
        elif in_loop and not self._in_body(tensor):
            self._hand_on(key, tensor, layout)
        elif in_loop and tensor in self.slices:
            if key not in self.indices:
                self.indices[key] = self._new()
            self._import(key, tensor, Layout.replicated(group, ()), self.indices[key])
        elif in_loop and tensor in self.inside and self._is_on(self.inside[tensor][1], group):
            value, carried = self.inside[tensor]
            self._import(key, tensor, carried, value)
        elif tensor in self.finals and self._is_on(self.finals[tensor][1], group):
            value, final = self.finals[tensor]
            self._import(key, tensor, final, value)
        elif (tensor, place) in self.held:
            front = self.writers[self.held[tensor, place]]
            known = front.nearest(tensor, _between(layout))
            self._pass_on(front, tensor, known, key)
        else:
            self._cross(key, tensor, layout)
        self.held.setdefault((tensor, place), key)

    def _is_on(self, layout: Layout, group: DeviceMesh) -> bool:
        """Whether what a loop over groups finds, or leaves, is there: for both places of its group."""
        return self.completed.group_of(layout.mesh) == group

    def _lies(self, tensor: PTensor, group: DeviceMesh) -> bool:
        return tensor in self.completed.inputs and self.completed.inputs[tensor].mesh == group

    def _in_body(self, tensor: PTensor) -> bool:
        earlier = tensor in self.made and self.phases[self.made[tensor][0][0]].loop is not None  # at an earlier turn
        return earlier or tensor in self.levels.of_tensor or tensor in self.slices

    def _hand_on(self, key: Key, tensor: PTensor, layout: Layout) -> None:
        """What all iterations read of the program around them is brought to its layout once, in front of the loop."""
        group = self.levels.group(key[1])
        if self._lies(tensor, group) and self.completed.inputs[tensor] == layout:
            self._take(key, tensor)
        else:
            self._pass_on(self._open((self.phases[key[0]].first - 1, key[1])), tensor, _between(layout), key)

    def _pass_on(self, front: Writer, tensor: PTensor, layout: Layout, key: Key) -> None:
        """From an earlier program of the same group; what that has only been given is taken from where it comes from."""
        slot = front.read(tensor, layout)
        origin = self.given[front.key].get(slot)
        if isinstance(origin, PTensor):
            self._take(key, tensor)
        elif origin is not None:
            own = next(one for one in self.imports[front.key] if one[1] == slot)
            self._import(key, tensor, own[2], origin)
        else:
            self._import(key, tensor, layout, self._leave(front, slot, layout, None))

    def _cross(self, key: Key, tensor: PTensor, layout: Layout) -> None:
        """From another place: out of the program that makes it, or that has been given it."""
        origin, level, _ = self.made.get(tensor) or ((key[0], self._group_of(tensor)), START, False)
        holder = self._open(origin)
        if tensor not in holder.slots:
            self.bring(origin, tensor, layout)
        held = [self._in_order(known, origin) for known, _ in holder.slots[tensor]]
        wanted = self._in_order(layout, key)
        inside = self.levels.group(origin[1]) == wanted.mesh
        if inside:
            leaving = arriving = self._handed_on(tensor, held, wanted)
        else:
            leaving, arriving = self._ends(tensor, held, wanted)
        slot = holder.read(tensor, leaving)
        source = self.given[origin].get(slot)
        if isinstance(source, int):
            level = FRONT  # given to it from in front of its phase
        else:
            source = self._leave(holder, slot, leaving, level)
        target = source
        if not inside:
            target = self._new()
            self.transfers.append(Transfer(tensor, source, target, Crossing.bare(leaving, arriving), origin[0], level))
        is_behind = origin[0] == key[0] and level != FRONT
        self._import(key, tensor, arriving, target, Level(level.number + 1) if is_behind else START)

    def _in_order(self, layout: Layout, key: Key) -> Layout:
        """``layout`` in the order of its program's mesh, in which values leave and arrive."""
        group = self.levels.group(key[1])
        return layout if layout.mesh.devices == group.devices else dataclasses.replace(layout, mesh=group)

    def _group_of(self, tensor: PTensor) -> int:
        """Where an argument lies, or what a loop over groups finds and leaves."""
        ends = self.inside if tensor in self.inside else self.finals
        layout = ends[tensor][1] if tensor in ends else self.completed.inputs[tensor]
        return self.levels.number_of(layout)

    def _handed_on(self, tensor: PTensor, held: Sequence[Layout], wanted: Layout) -> Layout:
        """How a tensor lies that goes from one place of a group to the other: as it would arrive from a group beside it, so
        that layers behind the model's first end are the program that they are behind others.
        """
        groups, group, own = self.completed.groups, wanted.mesh, self.levels.number_of(wanted)
        near = [groups[n] for n in (own - 1, own + 1) if 0 <= n < len(groups)]
        beside = [g for g in near if g.axes == group.axes and not {*g.devices} & {*group.devices}]
        if not beside:
            return _between(held[0])
        pairs = list(zip(group.devices, beside[0].devices, strict=True))
        _, arriving = self._ends(tensor, held, on_devices(wanted, dict(pairs)))
        return on_devices(arriving, {there: here for here, there in pairs})

    def _ends(self, tensor: PTensor, held: Sequence[Layout], wanted: Layout) -> tuple[Layout, Layout]:
        """How a tensor that is ``held`` leaves its group, and how it arrives where it is ``wanted``."""
        if not wanted.sizes or jax.dtypes.issubdtype(tensor.dtype, jax.dtypes.extended):  # a key is not cut into pieces
            return Layout.replicated(held[0].mesh, tensor.shape), Layout.replicated(wanted.mesh, tensor.shape)
        crossings = (find_crossing(known, wanted, tensor.itemsize, self.cost) for known in dict.fromkeys(held))
        best = min(crossings, key=lambda found: found.cost)
        return best.leave.target, best.arrive.source

    def programs(self) -> tuple[Program, ...]:
        """All programs, by phase and by group."""
        made = []
        groups = len(self.completed.groups)
        for key, writer in sorted(self.writers.items(), key=lambda pair: (pair[0][0], pair[0][1] % groups, pair[0][1])):
            taken = sorted(self.inputs[key], key=lambda one: one[0] in self.everywhere)  # constants last
            brought, left, results = self.imports[key], self.exports[key], self.results.get(key, [])
            loop = self.phases[key[0]].loop
            made.append(
                Program(
                    self.levels.group(key[1]),
                    tuple(writer.tasks),
                    tuple((slot, layout) for _, slot, layout, *_ in (*taken, *brought)),
                    tuple((slot, layout) for slot, layout, *_ in (*results, *left)),
                    tuple(tensor for tensor, *_ in (*taken, *brought)),
                    tuple(number for *_, number in results),
                    key[0],
                    tuple(value for *_, value, _ in brought),
                    tuple(value for *_, value, _ in left),
                    tuple(level for *_, level in brought),
                    tuple(level for *_, level in left),
                    self.own_levels[key],
                    self.pinned[key],
                    loop.length if loop is not None else 1,
                    self.levels.is_layers(key[1]),
                    self.levels.marks.get(key, {}),
                )
            )
        return tuple(made)


def _between(layout: Layout) -> Layout:
    """How a value may lie between blocks: a scalar, which has no dim to stand in, as it is on every device."""
    return layout if layout.sizes else Layout.replicated(layout.mesh, ())
