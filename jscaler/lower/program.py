"""``Program``: what every device of the group executes, as data: computes, adapters and halo exchanges over slots.

A slot holds one local array: a PTensor in one layout. The program is the same for all devices of the group; what
differs per device are the part indices, which come from its place in the mesh.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import trace_flat
from jscaler.clusters import CostModel
from jscaler.clusters.transition_kinds import sends
from jscaler.ir import Graph, Loop, Nest, Op, PTensor
from jscaler.ir.loop import Item, chain_of
from jscaler.lower.level import START, WEIGHTS, Level, StageKind
from jscaler.lower.members import Members, members
from jscaler.materialize import Adapter, Completed, DeviceMesh, Layout, find_adapter
from jscaler.materialize.completed import OpLayouts
from jscaler.materialize.edges import Edge, extended_shape, halo_bytes, halo_cost
from jscaler.materialize.transitions import price_of
from jscaler.rules.rule_book import RuleBook

Slot = int


@dataclass(frozen=True)
class Compute:
    """Run ``jaxpr`` (a local body) of ``op``; its last operands are the device's numbers among ``parts``."""

    op: Op
    jaxpr: core.Jaxpr
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    parts: tuple[Members, ...] = ()
    after: tuple[Slot, ...] = ()  # what op_order puts before it, beside its data


@dataclass(frozen=True)
class Adapt:
    """Bring ``tensor`` from one layout to another.

    Attributes:
        reduce_dtype: the dtype in which value shares are added; None for the tensor's own.
    """

    tensor: PTensor
    adapter: Adapter
    input: Slot
    output: Slot
    reduce_dtype: str | None = None

    def sent(self, itemsize: int) -> Iterator[tuple[str, float]]:
        """Kind and bytes per device of every step, for elements of ``itemsize`` bytes where no ``reduce_dtype`` holds."""
        itemsize = self.sent_itemsize(itemsize)
        for layout, step in self.adapter.walk:
            yield step.kind, step.bytes(layout, itemsize)

    def sent_itemsize(self, itemsize: int) -> int:
        """Bytes of each element on its way."""
        adds = self.reduce_dtype is not None and self.adapter.adds
        return jnp.dtype(self.reduce_dtype).itemsize if adds else itemsize

    def price(self, itemsize: int, cost: CostModel) -> float:
        """What its collectives cost, in the model's unit."""
        own = self.sent_itemsize(itemsize)
        return sum(price_of(layout, step, own, cost) for layout, step in self.adapter.walk if sends(step.kind))


@dataclass(frozen=True)
class Extend:
    """Bring a part of ``tensor``, which lies in ``layout``, the rows around it that its reader's windows reach."""

    tensor: PTensor
    layout: Layout
    edges: tuple[Edge, ...]
    input: Slot
    output: Slot

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of an extended part."""
        return extended_shape(self.layout, self.edges)

    def sent(self, itemsize: int) -> Iterator[tuple[str, float]]:
        """``halo`` and the bytes per device of every message."""
        for nbytes in halo_bytes(self.layout, self.edges, itemsize):
            yield "halo", nbytes

    def price(self, itemsize: int, cost: CostModel) -> float:
        """What the messages cost, in the model's unit."""
        return halo_cost(self.layout, self.edges, itemsize, cost)


@dataclass(frozen=True)
class Repeat:
    """Run ``tasks`` for each iteration of ``loop``; they may read slots of the program around it.

    Attributes:
        carries: per carry the slots before the first iteration, in an iteration, at its end, and after the last.
        xs: per stack that is read its slot, and that of a slice.
        ys: per stack that is written the slot of a slice, and its own.
        after: what op_order puts before it, beside its data.
    """

    loop: Loop
    tasks: tuple["Task", ...]
    carries: tuple[tuple[Slot, Slot, Slot, Slot], ...]
    xs: tuple[tuple[Slot, Slot], ...]
    ys: tuple[tuple[Slot, Slot], ...]
    after: tuple[Slot, ...] = ()

    @property
    def outputs(self) -> tuple[Slot, ...]:
        return (*(final for *_, final in self.carries), *(stack for _, stack in self.ys))


Task = Compute | Adapt | Extend | Repeat


def walk(tasks: Iterable[Task], times: int = 1) -> Iterator[tuple[Compute | Adapt | Extend, int]]:
    """All tasks in order, those of loops after what stands before the loop, and how many times each runs."""
    for task in tasks:
        if isinstance(task, Repeat):
            yield from walk(task.tasks, times * task.loop.length)
        else:
            yield task, times


def all_tasks(tasks: Iterable[Task]) -> Iterator[Task]:
    """``tasks`` in order, and those of the loops among them behind their loop."""
    for task in tasks:
        yield task
        if isinstance(task, Repeat):
            yield from all_tasks(task.tasks)


@dataclass(frozen=True)
class Program:
    """What a device group does in one phase of the step; of a step on one group, all of it.

    Attributes:
        inputs: a slot and a layout for each of ``tensors``: inputs of the step, constants, then values of other programs.
        outputs: a slot and a layout for each of ``results``, the numbers of those of the step's that are left here; then
            for each of ``exports``.
        phase: its number; see `lower.phases`.
        imports, exports: the numbers of the values that it takes from other programs, and of those that it leaves them.
        import_levels: the first level at which each import may be read.
        export_levels: the level whose block leaves each export; None: the block that makes it.
        last_level: of its ops.
        pinned: path -> the level of an op that must run there: one that ``op_order`` names, or that computes again.
        times: how often it runs.
        of_layers: whether it is what a group does for its layers of a stack; what it does besides is another program.
        names: by level the cells of a table that its blocks are (`lower.block_names`).
    """

    group: DeviceMesh
    tasks: tuple[Task, ...]
    inputs: tuple[tuple[Slot, Layout], ...]
    outputs: tuple[tuple[Slot, Layout], ...]
    tensors: tuple[PTensor, ...]
    results: tuple[int, ...]
    phase: int = 0
    imports: tuple[int, ...] = ()
    exports: tuple[int, ...] = ()
    import_levels: tuple[Level, ...] = ()
    export_levels: tuple[Level | None, ...] = ()
    last_level: Level = START
    pinned: Mapping[str, Level] = field(default_factory=dict)
    times: int = 1
    of_layers: bool = False
    names: Mapping[Level, tuple[StageKind, ...]] = field(default_factory=dict)

    @property
    def block_levels(self) -> list[Level]:
        """The levels of the blocks that it is cut into, in order."""
        ends = (level for level in self.export_levels if level is not None)
        return sorted({max(self.last_level, *self.import_levels, START), *self.pinned.values(), *ends})

    def names_at(self, level: Level, levels: Container[Level]) -> tuple[StageKind, ...]:
        """The names of its block at ``level``, if it has blocks at ``levels``: of a backward in halves, those of the half.

        A backward whose gradient of the input nobody reads (of tokens, say) has no I: all of it is W. So is what a
        forward's block makes of the backward behind it for weights, where that begins at once (a loss).
        """
        names = self.names.get(level.whole if level.is_weights else level, ())
        if level.is_weights:
            backward = [stage for stage, kind in names if kind == "B"]
            every = {name for own in self.names.values() for name in own}
            behind = [stage for stage, kind in names if kind == "F" and (stage, "B") in every]
            return tuple((stage, "W") for stage in backward or behind)
        is_halved = Level(level.number, WEIGHTS) in levels
        return tuple((stage, "I" if is_halved and kind == "B" else kind) for stage, kind in names)

    @property
    def adapters(self) -> tuple[Adapt, ...]:
        """All adapters, those in loops once."""
        return tuple(t for t, _ in walk(self.tasks) if isinstance(t, Adapt))

    @property
    def halos(self) -> tuple[Extend, ...]:
        """All halo exchanges, those in loops once."""
        return tuple(t for t, _ in walk(self.tasks) if isinstance(t, Extend))


@dataclass
class Writer:
    """Writes the tasks of one program.

    Attributes:
        bring: called with ``key``, that of the program, a tensor that it does not have, and a layout; defines it,
            in that or another layout.
    """

    graph: Graph
    completed: Completed
    book: RuleBook
    cost: CostModel
    reduce_dtypes: Mapping[PTensor, str]
    after: Mapping[str, Sequence[str]]
    bring: Callable[[tuple[int, int], PTensor, Layout], None]
    key: tuple[int, int]
    tasks: list[Task] = field(default_factory=list)  # of the loop that is being written, or of the program
    home: dict[PTensor, list[Task]] = field(default_factory=dict)  # where a tensor is defined, and so adapted
    slots: dict[PTensor, list[tuple[Layout, Slot]]] = field(default_factory=dict)
    results: dict[str, tuple[Slot, ...]] = field(default_factory=dict)  # of ops, and of loops by name
    extended: dict[tuple[Slot, tuple[Edge, ...]], Slot] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.outermost = self.tasks

    def define(self, tensor: PTensor, layout: Layout) -> Slot:
        self.home.setdefault(tensor, self.tasks)
        slot = self.count
        self.count += 1
        self.slots.setdefault(tensor, []).append((layout, slot))
        return slot

    def read(self, tensor: PTensor, layout: Layout) -> Slot:
        """The slot that holds ``tensor`` in ``layout``, adapted from the cheapest layout at hand.

        What comes from outside a loop is adapted once, before it.
        """
        if tensor not in self.slots:
            inside, self.tasks = self.tasks, self.outermost
            self.bring(self.key, tensor, layout)
            self.tasks = inside
        held = self.slots[tensor]
        for known, slot in held:
            if known == layout:
                return slot
        narrow = self.reduce_dtypes.get(tensor)
        itemsize = jnp.dtype(narrow).itemsize if narrow else tensor.itemsize
        options = [(find_adapter(known, layout, itemsize, self.cost), slot) for known, slot in held]
        adapter, slot = min(options, key=lambda o: o[0].cost)
        if adapter.nothing:
            held.append((layout, slot))
            return slot
        output = self.define(tensor, layout)
        self.home[tensor].append(Adapt(tensor, adapter, slot, output, self.reduce_dtypes.get(tensor)))
        return output

    def nearest(self, tensor: PTensor, layout: Layout) -> Layout:
        """Of the layouts in which ``tensor`` is at hand the cheapest to adapt to ``layout``; of a scalar itself."""
        held = [known for known, _ in self.slots[tensor]]
        if not layout.sizes or layout in held:
            return layout
        return min(held, key=lambda known: find_adapter(known, layout, tensor.itemsize, self.cost).cost)

    def extend(self, tensor: PTensor, layout: Layout, edges: tuple[Edge, ...]) -> Slot:
        """The slot that holds ``tensor`` in ``layout`` with the rows of ``edges``."""
        slot = self.read(tensor, layout)
        if not edges:
            return slot
        if (slot, edges) not in self.extended:
            self.extended[slot, edges] = self.count
            self.home[tensor].append(Extend(tensor, layout, edges, slot, self.count))
            self.count += 1
        return self.extended[slot, edges]

    def write(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, Op):
                self.compute(item)
            else:
                self.repeat(item)

    def compute(self, op: Op) -> None:
        laid = self.completed.ops[op.path]
        if laid.placement.as_it_lies(op):
            jaxpr, indexed = self._anywhere(op, laid), ()
        else:
            place = laid.placement
            jaxpr, indexed = self.book.local(op, place.parts, place.sizes, place.chunks)
        inputs = tuple(
            self.extend(t, layout, laid.edges_of(i))
            for i, (t, layout) in enumerate(zip(op.inputs, laid.inputs, strict=True))
        )
        outputs = tuple(self.define(t, layout) for t, layout in zip(op.outputs, laid.outputs, strict=True))
        own, group = laid.placement.group, self.completed.group_of(laid.placement.group)
        parts = tuple(members(group, own, laid.placement.factors[f]) for f in indexed)
        self.results[op.path] = outputs
        self.tasks.append(Compute(op, jaxpr, inputs, outputs, parts, self._before(op.path, op.path)))

    def _anywhere(self, op: Op, laid: OpLayouts) -> core.Jaxpr:
        """The body of an op that is right for any part."""
        if op.anywhere == "zeros":
            (made,), (layout,) = op.outputs, laid.outputs
            return self.book.bodies.fill(made.aval.update(shape=layout.local_shape), 0).jaxpr
        avals = tuple(t.aval.update(shape=at.local_shape) for t, at in zip(op.inputs, laid.inputs, strict=True))
        key, memo = ("anywhere", op.anywhere, avals), self.book.memo
        if key not in memo:
            fence, add = lambda *xs: list(lax.optimization_barrier(xs)), lambda a, b: [a + b]
            memo[key] = trace_flat(fence if op.anywhere == "fence" else add, avals)
        return memo[key]

    def repeat(self, nest: Nest) -> None:
        """Write a loop: its body's tasks, and what comes in and goes out."""
        loop, laid = nest.loop, self.completed.loops[nest.loop.name]
        inits = [self.read(c.init, layout) for c, layout in zip(loop.carries, laid.carries, strict=True)]
        stacks = [self.read(x.stack, layout.stacked(loop.length)) for x, layout in zip(loop.xs, laid.xs, strict=True)]
        outside, self.tasks = self.tasks, []
        insides = [self.define(c.inside, layout) for c, layout in zip(loop.carries, laid.carries, strict=True)]
        slices = [self.define(x.slice, layout) for x, layout in zip(loop.xs, laid.xs, strict=True)]
        self.write(nest.items)
        outs = [self.read(c.out, layout) for c, layout in zip(loop.carries, laid.carries, strict=True)]
        written = [self.read(y.slice, layout) for y, layout in zip(loop.ys, laid.ys, strict=True)]
        inner, self.tasks = tuple(self.tasks), outside
        finals = [self.define(c.final, layout) for c, layout in zip(loop.carries, laid.carries, strict=True)]
        made = [self.define(y.stack, layout.stacked(loop.length)) for y, layout in zip(loop.ys, laid.ys, strict=True)]
        carries = tuple(zip(inits, insides, outs, finals, strict=True))
        before = tuple(slot for op in nest.ops() for slot in self._before(op.path, loop.name))
        xs, ys = tuple(zip(stacks, slices, strict=True)), tuple(zip(written, made, strict=True))
        task = Repeat(loop, inner, carries, xs, ys, tuple(dict.fromkeys(before)))
        self.results[loop.name] = task.outputs[: max(len(carries), 1)]  # a stack that nobody reads is never written
        self.tasks.append(task)

    def _before(self, path: str, item: str) -> tuple[Slot, ...]:
        """What ``item``, op ``path`` or a loop around it, waits for: of two ops in different loops the loops wait."""
        own = (*chain_of(self.graph[path].loop, self.graph.loops), path)
        found: list[Slot] = []
        for other in self.after.get(path, ()):
            first = (*chain_of(self.graph[other].loop, self.graph.loops), other)
            level = next(i for i, (a, b) in enumerate(zip(first, own, strict=False)) if a != b)
            if own[level] == item and first[level] in self.results:  # one of another block has run
                found += self.results[first[level]]
        return tuple(found)
