"""Blocks: what device groups run between crossings, each a program; and what goes from block to block.

An op's *level* is the number of crossings on the longest way to it. Ops of one group and one level are a block, which
runs when all blocks of lower levels have::

    group 0   │ level 0 ├──────────────────┤ level 2 │      a value that a later block of the same group reads
    group 1             └──► level 1 ──────┘                stays where it is; one that another group reads crosses

Between blocks a value is an array of its devices' parts, one behind the other: so any layout can cross, also value shares
and uneven blocks, in the order in which the group's mesh has its devices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from jscaler.clusters import FEW_STEPS, CostModel
from jscaler.errors import PlanError
from jscaler.ir import Graph, Nest, Op, PTensor, nested
from jscaler.ir.loop import Item
from jscaler.lower.program import Program, Slot, Writer
from jscaler.lower.sums import summing_dtypes
from jscaler.materialize import Completed, Layout
from jscaler.materialize.crossing import Crossing, find_crossing
from jscaler.rules.rule_book import RuleBook

Key = tuple[int, int]  # level, number of the group: blocks run in this order


@dataclass(frozen=True)
class Transfer:
    """A value that crosses from group to group, behind the blocks of its level.

    Attributes:
        source, target: the numbers of the value that leaves, and of the one that arrives.
        crossing: its ends are how the value leaves and arrives; what is done inside of the groups, blocks do.
    """

    tensor: PTensor
    source: int
    target: int
    crossing: Crossing


def make_programs(
    graph: Graph,
    order: Sequence[Op],
    completed: Completed,
    book: RuleBook,
    after: Mapping[str, Sequence[str]],
    cost: CostModel = FEW_STEPS,
    reduce_dtype: str | None = None,
) -> tuple[tuple[Program, ...], tuple[Transfer, ...]]:
    """Lay the ops of each block out in ``order``, with an adapter wherever a reader wants another layout than is at hand.

    Args:
        after: op path -> paths of ops that ``op_order`` puts before it.
        cost: what adapters and crossings cost.
        reduce_dtype: the dtype in which gradients are added between devices; see `lower.sums` for the default.

    Raises:
        PlanError: the ops of a loop lie on several groups.
    """
    levels = _Levels(graph, completed, after)
    items = nested(order, graph.loops)
    for item in items:
        levels.add(item)
    dtypes = summing_dtypes(graph, order, reduce_dtype)
    blocks = _Blocks(graph, completed, cost, levels)
    for key in levels.blocks():
        blocks.open(key, Writer(graph, completed, book, cost, dtypes, after, blocks.bring))
    for item in sorted(items, key=lambda item: levels.of_item[_name(item)][0]):  # the first block that reads it brings it
        blocks.writers[levels.of_item[_name(item)]].write([item])
    return blocks.programs(), tuple(blocks.transfers)


def _name(item: Item) -> str:
    return item.path if isinstance(item, Op) else f"loop {item.loop.name}"


def _ops(item: Item) -> list[Op]:
    return [item] if isinstance(item, Op) else list(item.ops())


@dataclass
class _Levels:
    graph: Graph
    completed: Completed
    after: Mapping[str, Sequence[str]]
    of_item: dict[str, Key] = field(default_factory=dict)  # by path, or the loop's name
    of_op: dict[str, Key] = field(default_factory=dict)
    of_tensor: dict[PTensor, Key] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {group: number for number, group in enumerate(self.completed.groups)}
        self.number = numbers
        self.of_tensor.update({t: (0, numbers[layout.mesh]) for t, layout in self.completed.inputs.items()})
        self.everywhere = {t for t, _ in self.graph.constants}

    def add(self, item: Item) -> None:
        """Give ``item`` its level; what it reads and waits for has one."""
        ops = _ops(item)
        groups = {self.completed.ops[op.path].placement.group: op for op in ops}
        if len(groups) > 1:
            assert isinstance(item, Nest)
            (one, first), (other, second), *_ = groups.items()
            raise PlanError(
                f"the loop '{item.loop.name}' has ops on several device groups, '{first.path}' on {list(one.devices)} and "
                f"'{second.path}' on {list(other.devices)}: it cannot be lowered yet; place all ops of a loop on one group"
            )
        group = self.number[next(iter(groups))]
        own = {op.path for op in ops}
        operands = [t for op in ops for t in op.inputs]
        if isinstance(item, Nest):
            operands += item.loop.operands
        before = [self.of_tensor[t] for t in operands if t in self.of_tensor and t not in self.everywhere]
        before += [self.of_op[p] for op in ops for p in self.after.get(op.path, ()) if p not in own and p in self.of_op]
        key = self._behind(before, group)
        self.of_item[_name(item)] = key
        self.of_op.update(dict.fromkeys(own, key))
        made = [t for op in ops for t in op.outputs]
        made += item.loop.results if isinstance(item, Nest) else []
        self.of_tensor.update(dict.fromkeys(made, key))

    def _behind(self, before: Iterable[Key], group: int) -> Key:
        return max((level + (number != group) for level, number in before), default=0), group

    def of_output(self, number: int) -> Key:
        """The block that leaves a result of the step as it is to lie: the one that makes it, or one behind the crossing."""
        tensor, layout = self.graph.outputs[number], self.completed.outputs[number]
        group = self.number[layout.mesh]
        if tensor in self.everywhere or tensor not in self.of_tensor:
            return 0, group
        return self._behind([self.of_tensor[tensor]], group)

    def blocks(self) -> list[Key]:
        """All blocks in the order in which they run; of a group that holds an argument, the first is of level 0."""
        found = {*self.of_item.values(), *map(self.of_output, range(len(self.graph.outputs)))}
        found |= {(0, self.number[layout.mesh]) for layout in self.completed.inputs.values()}
        return sorted(found or {(0, 0)})


@dataclass
class _Blocks:
    graph: Graph
    completed: Completed
    cost: CostModel
    levels: _Levels
    writers: dict[Key, Writer] = field(default_factory=dict)
    held: dict[tuple[PTensor, int], Key] = field(default_factory=dict)  # tensor, group -> the first block that holds it
    inputs: dict[Key, list[tuple[PTensor, Slot, Layout]]] = field(default_factory=dict)
    imports: dict[Key, list[tuple[PTensor, Slot, Layout, int]]] = field(default_factory=dict)
    exports: dict[Key, dict[tuple[Slot, Layout], int]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    count: int = 0  # values between blocks

    def open(self, key: Key, writer: Writer) -> None:
        """The next block; the first of a group takes all arguments that lie there, and the constants that it reads."""
        first = all(other[1] != key[1] for other in self.writers)
        self.writers[key] = writer
        self.inputs[key], self.imports[key], self.exports[key] = [], [], {}
        writer.block = key
        if first:
            group = self.completed.groups[key[1]]
            for tensor in self.graph.inputs:
                if tensor in self.completed.inputs and self.completed.inputs[tensor].mesh == group:
                    self._take(key, tensor, self.completed.inputs[tensor])
            read = self._read_on(key[1]) if len(self.writers) > 1 else self.levels.everywhere
            for tensor, _ in self.graph.constants:
                if tensor in read:
                    self._take(key, tensor, Layout.replicated(group, tensor.shape))

    def _read_on(self, group: int) -> set[PTensor]:
        ops = [op for op in self.graph.ops if self.levels.of_op[op.path][1] == group]
        return {t for op in ops for t in (*op.inputs, *self._operands(op))}

    def _operands(self, op: Op) -> Iterator[PTensor]:
        for name in filter(None, [op.loop]):
            yield from self.graph.loops[name].operands

    def _take(self, key: Key, tensor: PTensor, layout: Layout) -> Slot:
        slot = self.writers[key].define(tensor, layout)
        self.inputs[key].append((tensor, slot, layout))
        return slot

    def bring(self, key: Key, tensor: PTensor, layout: Layout) -> None:
        """Define ``tensor``, which another block holds, in the block ``key``: in ``layout``, or close to it."""
        group = self.completed.groups[key[1]]
        constant = tensor in self.levels.everywhere
        if constant or (tensor in self.completed.inputs and self.completed.inputs[tensor].mesh == group):
            self._take(key, tensor, Layout.replicated(group, tensor.shape) if constant else self.completed.inputs[tensor])
            return
        origin = self.levels.of_tensor[tensor]
        if origin[1] == key[1] or (tensor, key[1]) in self.held:
            holder = self.writers[self.held.get((tensor, key[1]), origin)]
            known = holder.nearest(tensor, _between(layout))
            self._import(key, tensor, known, self._export(holder, tensor, known))
            return
        holder = self.writers[origin]
        leaving, arriving = self._ends(tensor, [known for known, _ in holder.slots[tensor]], layout)
        source, target = self._export(holder, tensor, leaving), self._new()
        self.transfers.append(Transfer(tensor, source, target, Crossing.bare(leaving, arriving)))
        self._import(key, tensor, arriving, target)

    def _ends(self, tensor: PTensor, held: Iterable[Layout], wanted: Layout) -> tuple[Layout, Layout]:
        """How a tensor that is ``held`` leaves its group, and how it arrives where it is ``wanted``."""
        if not wanted.sizes or jax.dtypes.issubdtype(tensor.dtype, jax.dtypes.extended):  # a key is not cut into pieces
            origin = next(iter(held)).mesh
            return Layout.replicated(origin, tensor.shape), Layout.replicated(wanted.mesh, tensor.shape)
        crossings = (find_crossing(known, wanted, tensor.itemsize, self.cost) for known in dict.fromkeys(held))
        best = min(crossings, key=lambda found: found.cost)
        return best.leave.target, best.arrive.source

    def _import(self, key: Key, tensor: PTensor, layout: Layout, value: int) -> None:
        self.imports[key].append((tensor, self.writers[key].define(tensor, layout), layout, value))
        self.held.setdefault((tensor, key[1]), key)

    def _export(self, holder: Writer, tensor: PTensor, layout: Layout) -> int:
        end, found = (holder.read(tensor, layout), layout), self.exports[holder.block]
        if end not in found:
            found[end] = self._new()
        return found[end]

    def _new(self) -> int:
        self.count += 1
        return len(self.graph.outputs) + self.count - 1

    def programs(self) -> tuple[Program, ...]:
        """All blocks, in the order in which they run."""
        results: dict[Key, list[tuple[Slot, Layout, int]]] = {key: [] for key in self.writers}
        for number, (tensor, layout) in enumerate(zip(self.graph.outputs, self.completed.outputs, strict=True)):
            key = self.levels.of_output(number)
            results[key].append((self.writers[key].read(tensor, layout), layout, number))
        made = []
        for key, writer in sorted(self.writers.items(), key=lambda pair: pair[0]):
            taken = sorted(self.inputs[key], key=lambda one: one[0] in self.levels.everywhere)  # constants last
            brought = self.imports[key]
            left = [*results[key], *((slot, layout, value) for (slot, layout), value in self.exports[key].items())]
            made.append(
                Program(
                    self.completed.groups[key[1]],
                    tuple(writer.tasks),
                    tuple((slot, layout) for _, slot, layout, *_ in (*taken, *brought)),
                    tuple((slot, layout) for slot, layout, _ in left),
                    tuple(tensor for tensor, *_ in (*taken, *brought)),
                    tuple(number for *_, number in results[key]),
                    key[0],
                    tuple(value for *_, value in brought),
                    tuple(self.exports[key].values()),
                )
            )
        return tuple(made)


def _between(layout: Layout) -> Layout:
    """How a value may lie between blocks: a scalar, which has no dim to stand in, as it is on every device."""
    return layout if layout.sizes else Layout.replicated(layout.mesh, ())
