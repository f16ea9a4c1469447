"""From where ops read tensors: the op that makes each, through loops and what follows parameters; and how often they do.

A tensor that a loop hands on or stacks up is read as the op made it, a dim more or less. All that reads one tensor as often
shares what is brought: one re-layout serves all of these readers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jscaler.estimate.prices.in_time import InTime, iterations
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import origins, tensor_kinds
from jscaler.materialize.layout import Layout, without_values
from jscaler.plan_search.program.choices import Choice, Node, Nodes


class Source(NamedTuple):
    """Where a tensor comes from.

    Attributes:
        tensor: as an op makes it, or an input.
        lift: the length of the loop that stacks it up, where a stack of it is read; -1 where a slice is; else 0.
        carried: whether an iteration takes it from the one before, with its value shares joined.
    """

    tensor: PTensor
    lift: int = 0
    carried: bool = False

    def layout(self, layout: Layout) -> Layout:
        """How what is read lies, where the tensor lies so."""
        if self.lift == 0:
            return layout
        return layout.stacked(self.lift) if self.lift > 0 else layout.sliced()


class Read(NamedTuple):
    """An op of a node, and the index of what it reads; ``~index`` of what it makes, which a loop is to begin with."""

    node: Node
    op: Op
    index: int

    def layout(self, nodes: Nodes, choice: Choice) -> Layout:
        """The layout that it wants."""
        if self.index >= 0:
            return nodes.layout(self.op, choice, self.index)
        return without_values(nodes.layout(self.op, choice, ~self.index, result=True))


@dataclass
class Edge:
    """What all readers share that read one tensor as often.

    Attributes:
        tensor: as they read it.
        maker: the op that makes it, and its index among the results.
        weight: how often it is brought in a step.
        part: in how many parts in time, of which one is brought at a time.
        reads: of these one of each kind.
    """

    source: Source
    tensor: PTensor
    maker: Op
    index: int
    node: Node
    weight: float
    part: int
    reads: list[Read] = field(default_factory=list)

    def made(self, nodes: Nodes, choice: Choice) -> Layout:
        """How it lies, as it is made."""
        return self.source.layout(nodes.layout(self.maker, choice, self.index, result=True))


class Flows:
    """Where all that ops read comes from."""

    def __init__(self, nodes: Nodes, time: InTime):
        self.nodes, self.graph, self.time, self.folded = nodes, nodes.graph, time, nodes.folded
        graph = self.graph
        loops = graph.loops.values()
        self.carried = {c.inside: c.out for loop in loops for c in loop.carries if not c.is_sum}
        self.left = {c.final: c.out for loop in loops for c in loop.carries}
        self.slices = {x.slice: (x.stack, loop.length) for loop in loops for x in loop.xs}
        self.stacks = {y.stack: (y.slice, loop.length) for loop in loops for y in loop.ys}
        kinds = tensor_kinds(graph)
        self.parameters = [t for t in graph.inputs if kinds.get(t) == "parameter" and t.shape]
        self.cast_of = {}  # what is differentiated in place of a parameter -> the parameter
        self.gradients: dict[PTensor, PTensor] = {}
        inputs = frozenset(self.parameters)
        for call in graph.calls:
            for wrt, gradient in zip(call.wrt, call.gradients, strict=True):
                for leaf in origins(graph, wrt) & inputs:
                    self.gradients[leaf] = gradient
                    if wrt is not leaf:
                        self.cast_of[wrt] = leaf

    def source(self, tensor: PTensor) -> Source:
        """Where ``tensor`` comes from."""
        lift, carried, graph = 0, False, self.graph
        seen: set[PTensor] = set()
        while tensor not in seen:
            seen.add(tensor)
            if tensor in self.carried:
                tensor, carried = self.carried[tensor], True
            elif tensor in self.left:
                tensor, carried = self.left[tensor], True
            elif tensor in self.slices and lift <= 0:
                stack, _ = self.slices[tensor]
                if stack in self.stacks:
                    tensor = self.stacks[stack][0]
                else:
                    tensor, lift = stack, -1
            elif tensor in self.stacks and lift == 0:
                tensor, lift = self.stacks[tensor]
            elif tensor in self.stacks and lift == -1:
                tensor, lift = self.stacks[tensor][0], 0
            elif tensor in self.cast_of:
                tensor = self.cast_of[tensor]
            else:
                maker = graph.producer.get(tensor)
                followed = maker and (maker.again or maker)
                if followed is not None and followed.path in self.nodes.followers:
                    tensor = self.nodes.followers[followed.path]
                elif maker is not None and maker.forward is not None and maker.forward.path in self.nodes.followers:
                    tensor = next(t for _, t in maker.cotangents)
                else:
                    break
        return Source(tensor, lift, carried)

    def weight(self, maker: Op | None, reader: Op) -> float:
        """How often a step brings something from one op to another."""
        runs = self.time.runs.get(reader.path, 1)
        return runs * iterations(reader, self.graph) * self.folded.reads(reader, maker)

    def edges(self) -> list[Edge]:
        """What is brought from op to op; edges of equal layers are one."""
        parameters = frozenset(self.parameters)
        found: dict[tuple[object, ...], Edge] = {}
        for op in self.graph.ops:
            node = self.nodes.of_op.get(op.path)
            for index, tensor in enumerate(op.inputs if node is not None else ()):
                source = self.source(tensor)
                if not tensor.shape or source.tensor in parameters:
                    continue
                assert node is not None
                self._add(found, source, tensor, op, Read(node, op, index))
        for loop in self.graph.loops.values():
            for carry in loop.carries:
                maker = self.graph.producer.get(carry.out)
                if carry.is_sum or not carry.init.shape or maker is None or maker.path not in self.nodes.of_op:
                    continue
                index = maker.outputs.index(carry.out)
                read = Read(self.nodes.of_op[maker.path], maker, ~index)
                self._add(found, self.source(carry.init), carry.init, maker, read, once=True)
        return self._merged(found.values())

    def _add(
        self, found: dict[tuple[object, ...], Edge], source: Source, tensor: PTensor, op: Op, read: Read, once: bool = False
    ) -> None:
        maker = self.graph.producer.get(source.tensor)
        made_by = self.nodes.of_op.get(maker.path) if maker is not None else None
        if maker is None or made_by is None:
            return
        weight = self.weight(maker, op)
        if once:
            weight = self.time.runs.get(op.path, 1)
        key = source, weight
        if key not in found:
            part, index = self.time.shares.get(tensor.name, 1), maker.outputs.index(source.tensor)
            found[key] = Edge(source, tensor, maker, index, made_by, weight, part)
        found[key].reads.append(read)

    def _merged(self, edges: Iterable[Edge]) -> list[Edge]:
        """Those of layers that choose alike are one, which is as heavy as all of them."""
        found: dict[tuple[object, ...], Edge] = {}
        for edge in edges:
            edge.reads = list({self._key(read): read for read in edge.reads}.values())
            made = self._key(Read(edge.node, edge.maker, ~edge.index))
            key = made, edge.source[1:], frozenset(map(self._key, edge.reads))
            if key in found:
                found[key].weight += edge.weight
            else:
                found[key] = edge
        return list(found.values())

    def _key(self, read: Read) -> tuple[object, ...]:
        """What is equal of reads that want the same, whatever is chosen."""
        rule = self.nodes.book.rule(read.op)
        dims = rule.operands[read.index] if read.index >= 0 else rule.results[~read.index]
        return read.node.name, dims, read.index < 0, read.op.forward is not None and self._drops(read.op)

    def _drops(self, op: Op) -> bool:
        """Whether a backward cannot be split in some way in which its forward can."""
        assert op.forward is not None
        ahead, own = self.nodes.book.rule(op.forward).factors, self.nodes.book.rule(op).factors
        return any(f.splittable and (name not in own or own[name].kind == "blocked") for name, f in ahead.items())
