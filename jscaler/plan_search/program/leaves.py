"""Parameters: how each lies between steps, and in which ZeRO mode.

A parameter lies as its reader wants it, and follows its choice. What is open is whether its state and its update are split
over the devices that would hold copies (1), its gradients too (2), and it itself (3).
"""

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jscaler.estimate.prices.skeleton import as_cast
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.materialize.layout import Layout
from jscaler.plan_search.program.choices import Choice, Node
from jscaler.plan_search.program.flows import Flows, Read
from jscaler.plan_search.program.seconds import Seconds, nbytes

ZEROS = (0, 1, 2, 3)


class State(NamedTuple):
    """One way in which a parameter lies.

    Attributes:
        layout: in which its reader wants it, layer by layer where a loop takes it apart.
        zero: the mode.
        shard: the layout of its state.
        dim: that the shard cuts; None where nothing does.
    """

    layout: Layout
    zero: int
    shard: Layout
    dim: int | None


@dataclass
class Leaf:
    """A parameter, or those in the same place of equal layers.

    Attributes:
        name: of the one that stands for all.
        length: of the loop that takes it apart; 0 where none does.
        count: how many it stands for.
        main: the node whose choice it follows, and what of it reads it.
        others: what else reads it.
        updates: the ops that update it, each with the number of an operand of its shape.
        moments: bytes of its optimizer's state.
        maker: of its gradient, and its index among the results.
    """

    name: str
    tensor: PTensor
    names: list[str]
    length: int
    count: int
    main: list[Read] = field(default_factory=list)
    others: list[Read] = field(default_factory=list)
    updates: list[tuple[Op, int]] = field(default_factory=list)
    moments: int = 0
    maker: Op | None = None
    index: int = 0
    gradient_length: int = 0

    @property
    def node(self) -> Node:
        return self.main[0].node

    def stacked(self, layout: Layout) -> Layout:
        """The layout of all layers together."""
        return layout.stacked(self.length) if self.length else layout


class Leaves:
    """All parameters that nodes read."""

    def __init__(self, flows: Flows, seconds: Seconds, microbatches: int):
        self.flows, self.seconds, self.nodes, self.microbatches = flows, seconds, flows.nodes, microbatches
        self.graph = flows.graph
        self.by_name: dict[str, Leaf] = {}
        self.owner: dict[PTensor, PTensor] = {}  # what an update reads and makes -> its parameter
        self.updated = self._find_updates()
        self.gradients = self._find_gradients()
        reads: dict[str, list[tuple[Read, int, PTensor]]] = {}
        parameters = frozenset(flows.parameters)
        for op in self.graph.ops:
            node = self.nodes.of_op.get(op.path)
            for index, tensor in enumerate(op.inputs if node is not None else ()):
                source = flows.source(tensor)
                if source.tensor in parameters:
                    assert node is not None
                    length = flows.slices[tensor][1] if source.lift == -1 and tensor in flows.slices else 0
                    reads.setdefault(source.tensor.name, []).append((Read(node, op, index), length, source.tensor))
        for name, own in reads.items():
            kind = flows.folded.kind(name)
            count = flows.folded.counts.get(name, 1)
            if kind in self.by_name:
                self.by_name[kind].count += count
                self.by_name[kind].names.append(name)
            else:
                self.by_name[kind] = self._leaf(kind, own, count)

    def _leaf(self, name: str, reads: list[tuple[Read, int, PTensor]], count: int) -> Leaf:
        tensor = reads[0][2]
        works = {read.node.name: self.seconds.of(read.node, read.node.choices[0]) for read, _, _ in reads}
        main = max(works, key=lambda node: works[node])
        found = Leaf(name, tensor, [tensor.name], max(n for read, n, _ in reads if read.node.name == main), count)
        for read, _, _ in reads:
            (found.main if read.node.name == main else found.others).append(read)
        updates, states = self.updated.get(tensor, ([], []))
        found.updates, found.moments = updates, sum(t.nbytes for t in states)
        gradient = self.flows.gradients.get(tensor)
        if gradient is not None:
            source = self.flows.source(gradient)
            maker = self.graph.producer.get(source.tensor)
            if maker is not None and maker.path in self.nodes.of_op:
                found.maker, found.index = maker, maker.outputs.index(source.tensor)
                found.gradient_length = max(source.lift, 0)
        return found

    def _find_updates(self) -> dict[PTensor, tuple[list[tuple[Op, int]], list[PTensor]]]:
        """By parameter the ops that update it, and the state that they read."""
        kinds = tensor_kinds(self.graph)
        owner = {gradient: p for p, gradient in self.flows.gradients.items()} | {p: p for p in self.flows.parameters}
        found: dict[PTensor, tuple[list[tuple[Op, int]], list[PTensor]]] = {}
        for op in self.graph.ops:
            if op.kind != "update":
                continue
            mine = next((owner[t] for t in op.inputs if t in owner), None)
            if mine is None:
                continue
            index = next((i for i, t in enumerate(op.inputs) if t.shape == mine.shape), None)
            if index is None:
                continue
            updates, states = found.setdefault(mine, ([], []))
            updates.append((op, index))
            for t in (*op.inputs, *op.outputs):
                if t.shape == mine.shape and t not in owner:
                    owner[t] = mine
                    if kinds.get(t) == "optimizer":
                        states.append(t)
        gradients = frozenset(self.flows.gradients.values())
        self.owner = {t: p for t, p in owner.items() if t not in gradients}
        return found

    def _find_gradients(self) -> dict[str, str]:
        """Name of a gradient, of what is stacked up or added up to it -> kind of its parameter."""
        found = {}
        for parameter, gradient in self.flows.gradients.items():
            kind = self.flows.folded.kind(parameter.name)
            found[gradient.name] = found[self.flows.source(gradient).tensor.name] = kind
            found.update(dict.fromkeys((t.name for t in self.graph.flow.sources(gradient, "stack", "exit")), kind))
        return found

    def states(self, leaf: Leaf, layout: Layout, zeros: Collection[int]) -> Iterator[State]:
        """The ways in which it may lie where its reader wants it in ``layout``."""
        shard, dim = _shard(layout)
        for zero in ZEROS:
            if zero not in zeros or (zero and dim is None) or (zero == 2 and self.microbatches == 1 and 1 in zeros):
                continue
            yield State(layout, zero, shard if zero else layout, dim if zero else None)

    def cost(self, leaf: Leaf, state: State, made: Layout | None) -> float:
        """Of updating it, and of bringing it to its main reader; and its gradient, if that is ``made`` by the same node."""
        shard, whole = leaf.stacked(state.shard), leaf.stacked(state.layout)
        total = math.fsum(self._update(op, index, shard) for op, index in leaf.updates)
        if state.zero in (1, 2):
            total += leaf.count * self.seconds.moved(shard, whole, leaf.tensor.itemsize)
        if state.zero == 3:
            total += math.fsum(self.fetched(leaf, read, state, state.layout) for read in leaf.main)
        return total + (self.gradient(leaf, state, made) if made is not None else 0.0)

    def fetched(self, leaf: Leaf, read: Read, state: State, layout: Layout) -> float:
        """Of bringing it to a read in ``layout``, as often as that runs in a step."""
        tensor = read.op.inputs[read.index]
        itemsize = min(tensor.itemsize, as_cast(tensor, read.op))
        here = state.shard if state.zero == 3 else state.layout
        return self.flows.weight(None, read.op) * self._times(leaf, read) * self.seconds.moved(here, layout, itemsize)

    def _times(self, leaf: Leaf, read: Read) -> float:
        """Layers that choose alike each fetch their own."""
        return leaf.count / self.flows.folded.count(read.op)

    def _update(self, op: Op, index: int, layout: Layout) -> float:
        rule, parts = self.nodes.book.rule(op), dict[str, int]()
        for dims, size, local in zip(rule.operands[index], layout.shape, layout.local_shape, strict=True):
            if dims and local < size:
                parts[dims[0]] = -(-size // local)
        same = self.flows.folded
        every = [o for o in self.graph.of_kind("update") if same.kind(o.path) == same.kind(op.path)]
        return math.fsum(self.seconds.of_op(one, parts) for one in every)

    def gradient(self, leaf: Leaf, state: State, made: Layout) -> float:
        """Of bringing its gradient, made in ``made``, to where it is updated."""
        size = leaf.tensor.itemsize
        if state.zero == 0:
            return leaf.count * self.seconds.moved(self._made(leaf, made), leaf.stacked(state.layout), size)
        often = self.microbatches if state.zero > 1 else 1
        if leaf.gradient_length:
            return leaf.count * often * leaf.gradient_length * self.seconds.moved(made, state.shard, size)
        return leaf.count * often * self.seconds.moved(made, leaf.stacked(state.shard), size)

    def _made(self, leaf: Leaf, made: Layout) -> Layout:
        return made.stacked(leaf.gradient_length) if leaf.gradient_length else made

    def made(self, leaf: Leaf, choice: Choice) -> Layout:
        """How its gradient is made."""
        assert leaf.maker is not None
        return self.nodes.layout(leaf.maker, choice, leaf.index, result=True)

    def held(self, leaf: Leaf, state: State) -> float:
        """Bytes that a device holds of it and its optimizer's state."""
        shard, whole = leaf.stacked(state.shard), leaf.stacked(state.layout)
        part = math.prod(shard.local_shape) / math.prod(shard.shape)
        return leaf.count * (nbytes(shard if state.zero == 3 else whole, leaf.tensor.itemsize) + leaf.moments * part)


def _shard(layout: Layout) -> tuple[Layout, int | None]:
    """``layout`` cut further by all axes that replicate it, along its first dim that divides; and that dim."""
    free = layout.free
    count = layout.mesh.size(free)
    if count == 1:
        return layout, None
    first = 0
    for dim, (sizes, local) in enumerate(zip(layout.subdims, layout.local_shape, strict=True)):
        if len(sizes) == 1 and local % count == 0:
            cuts = list(layout.cuts)
            cuts[first] = (*cuts[first], *free)
            return dataclasses.replace(layout, cuts=tuple(cuts)), dim
        first += len(sizes)
    return layout, None
