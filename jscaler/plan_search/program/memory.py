"""Bytes of a device at each moment of a step, as sums over what is chosen: rows of the integer program.

They are those of `jscaler.estimate.prices`: the buffers of one device's program, each as small as the part of its tensor.
A step has hundreds of moments. Only those become rows at which a solution would hold too much.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jscaler.estimate.prices.in_time import iterations
from jscaler.estimate.prices.one_device import Buffer, OneDevice
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.materialize.layout import Layout
from jscaler.plan_search.program.again import INSIDE, Again, Made
from jscaler.plan_search.program.choices import Nodes
from jscaler.plan_search.program.flows import Edge
from jscaler.plan_search.program.leaves import Leaf, Leaves, State
from jscaler.plan_search.program.seconds import nbytes

Bytes = dict[int, float]  # by variable
APART = 8  # moments that are rows at a time


class Held(NamedTuple):
    """Bytes that are held from one moment to another, so many times."""

    first: int
    last: int
    size: Bytes | float
    count: float = 1.0


class Memory:
    """The rows that say what a device holds.

    Attributes:
        always: bytes of parameters and their optimizer's state, by variable.
        rest: of other arguments.
        copies: by the moments between which they are held, copies that readers gather.
    """

    def __init__(
        self, nodes: Nodes, leaves: Leaves, program: OneDevice, takes: Mapping[str, list[int]], begins: np.ndarray
    ):
        self.nodes, self.leaves, self.program, self.takes = nodes, leaves, program, takes
        self.time = leaves.flows.time
        self.begins = begins  # of each buffer, of a gradient that adds up over micro-batches, where its sum begins; else -1
        self.always: Bytes = {}
        self.copies: list[tuple[int, int, Bytes]] = []
        self.modes: dict[str, list[tuple[int, State, Layout | None]]] = {}
        self.rest = 0.0
        self._tensors = {t.name: t for op in nodes.graph.ops for t in (*op.inputs, *op.outputs)}
        self._tensors |= {t.name: t for loop in nodes.graph.loops.values() for t in (*loop.inner, *loop.results)}

    @cached_property
    def _readers_of_stacks(self) -> dict[str, tuple[Op, int]]:
        """Name of what a loop saves for its backward -> the first op that reads it there, and as which operand."""
        graph = self.nodes.graph
        found: dict[str, tuple[Op, int]] = {}
        saved = {y.stack for loop in graph.loops.values() for y in loop.ys if y.saved}
        for x in (x for loop in graph.loops.values() for x in loop.xs if x.stack in saved):
            reader = next((op for op in graph.consumers.get(x.slice, ()) if op.path in self.nodes.of_op), None)
            if reader is not None:
                found[x.stack.name] = reader, reader.inputs.index(x.slice)
        return found

    def add_leaf(self, leaf: Leaf, modes: list[tuple[int, State, Layout | None]]) -> None:
        """Count a parameter, by the variables of its modes, each with how the gradient is made if that follows."""
        self.modes[leaf.name] = modes
        for variable, state, _ in modes:
            self.always[variable] = self.leaves.held(leaf, state)
            if state.zero == 3:
                for read in leaf.main:
                    here = self.program.moments.get(read.op.path)
                    if here is not None:
                        self.copies.append((*here, {variable: nbytes(state.layout, read.op.inputs[read.index].itemsize)}))

    def add_edge(self, edge: Edge, flows: Mapping[tuple[Layout, Layout], int]) -> None:
        """Count the copies that readers gather."""
        grown: Bytes = {}
        for (source, target), variable in flows.items():
            before, after = (nbytes(layout, edge.tensor.itemsize / edge.part) for layout in (source, target))
            if after > before and len(target.values) >= len(source.values):
                grown[variable] = after
        moments = [self.program.moments[read.op.path] for read in edge.reads if read.op.path in self.program.moments]
        if grown and moments:
            self.copies += [(*own, grown) for own in dict.fromkeys(moments)]

    def finish(self, again: Again | None) -> None:
        """Work out what is held from when to when."""
        program = self.program
        self._inputs()
        self.sizes = [self._size(one, self.begins[n] >= 0) for n, one in enumerate(program.buffers)]
        saved = {
            n: made for n, one in enumerate(program.buffers) if again and (made := self._may_be_made_again(one, again))
        }
        all_layers: dict[int, Bytes | float] = {}
        self.spans: list[Held] = []
        for n, one in enumerate(program.buffers):
            first, last, size = int(program.first[n]), int(program.last[n]), self.sizes[n]
            if n in saved and isinstance(size, dict):
                assert again is not None
                stack = one.tensor if one.tensor in self._loop_of else ""
                known = self._tensors.get(one.tensor)
                tensor = self.leaves.flows.source(known).tensor if known is not None else None
                each = one.nbytes / self.time.shares.get(one.tensor, 1)
                unless = again.unless_saved(saved[n], {v: held / each for v, held in size.items()}, stack, tensor)
                held = all_layers[n] = {**size, **{v: -part * each for v, part in unless.items()}}
                self.spans += self._with_gap(one, size, held)
            else:
                self.spans.append(Held(first, last, size))
            if self.begins[n] >= 0:
                self.spans.append(Held(int(self.begins[n]), program.update - 1, size))
        for n, first, last, count in program.equal_layers:
            self.spans.append(Held(first, last, all_layers.get(n, self.sizes[n]), count))
            if self.begins[n] >= 0:
                self.spans.append(Held(int(self.begins[n]), program.update - 1, self.sizes[n], count))
        self.spans += [Held(first, last, grown) for first, last, grown in self.copies]
        self.spans += self._saved_for_clones(again) if again else []

    def _may_be_made_again(self, one: Buffer, again: Again) -> Made | None:
        """The result that a buffer saves for the backward pass, if that may be made again."""
        program, tensor = self.program, self._tensors.get(one.tensor)
        if not one.first < program.front <= one.last:
            return None
        if tensor is None:
            inside = self.nodes.of_op.get(one.op)
            made = (inside.name, INSIDE) if inside is not None else None
            return made if made in again.saved else None
        source = self.leaves.flows.source(tensor)
        maker = self.nodes.graph.producer.get(source.tensor)
        node = self.nodes.of_op.get(maker.path) if maker is not None else None
        if maker is None or node is None or source.carried:
            return None
        made = [(node.name, maker.outputs.index(source.tensor))]
        if not again.backward[made[0]]:  # it is saved in place of what is fused to it
            readers = (op for op in self.nodes.graph.consumers.get(source.tensor, ()) if op.path in self.nodes.of_op)
            made = [(self.nodes.of_op[op.path].name, i) for op in readers for i in range(len(op.outputs))]
        return next((one for one in made if one in again.saved and again.backward.get(one)), None)

    def _with_gap(self, one: Buffer, size: Bytes, saved: Bytes) -> Iterator[Held]:
        """A buffer that is let go behind its last reader in the forward pass, if it is not saved."""
        graph, moments = self.nodes.graph, self.program.moments
        slices = [x.slice for loop in graph.loops.values() for x in loop.xs if x.stack.name == one.tensor]
        tensor, maker = self._tensors.get(one.tensor), graph.by_path.get(one.op)
        readers = [
            op for t in slices or [tensor] if t is not None for op in graph.consumers.get(t, ()) if op.path in moments
        ]
        if tensor is None and maker is not None and maker.backward is not None:  # inside of its op
            readers = [op for op in (graph.by_path.get(maker.backward.path),) if op is not None and op.path in moments]
        behind = min((moments[op.path][0] for op in readers if op.kind == "backward"), default=one.last)
        behind = max(behind, self.program.front)
        if slices:
            length = self.nodes.graph.loops[self._loop_of[one.tensor]].length
            yield Held(one.first, one.last, saved)
            yield Held(behind, one.last, size, 1 / length)
            yield Held(behind, one.last, saved, -1 / length)
            return
        ahead = max((moments[op.path][1] for op in readers if op.kind == "forward"), default=one.first)
        ahead = min(max(ahead, one.first), behind - 1)
        yield Held(one.first, ahead, size)
        yield Held(ahead + 1, behind - 1, saved)
        yield Held(behind, one.last, size)

    @cached_property
    def _loop_of(self) -> dict[str, str]:
        """Name of a stack -> the loop that takes it apart."""
        return {x.stack.name: name for name, loop in self.nodes.graph.loops.items() for x in loop.xs}

    def _saved_for_clones(self, again: Again) -> Iterator[Held]:
        """What no backward reads, and what runs again does."""
        graph, moments = self.nodes.graph, self.program.moments
        for op in graph.of_kind("forward"):
            node = self.nodes.of_op.get(op.path)
            for index, tensor in enumerate(op.outputs if node is not None else ()):
                assert node is not None
                made = node.name, index
                if made not in again.saved or again.backward[made] or op.path not in moments or not tensor.shape:
                    continue
                each = again.forward[made]
                ends = [moments[r.backward.path][1] for r in each if r.backward is not None and r.backward.path in moments]
                times = iterations(op, graph) * self.nodes.folded.count(op)
                share = self.time.shares.get(tensor.name, 1)
                parts = {
                    variable: _part(self.nodes.layout(op, choice, index, result=True))
                    for choice, variable in zip(node.choices, self.takes[node.name], strict=True)
                }
                unless = {v: -part for v, part in again.unless_saved(made, parts, "", tensor).items()}
                size = {v: times * tensor.nbytes * part / share for v, part in {**parts, **unless}.items()}
                yield Held(moments[op.path][0], max(ends, default=0), size)

    def timeline(self, values: np.ndarray) -> np.ndarray:
        """Bytes at each moment, of a solution."""
        change = np.zeros(len(self.program.ops) + 1)
        for first, last, size, count in self.spans:
            if first <= last:
                held = count * _of(size, values)
                change[first] += held
                change[last + 1] -= held
        return self.program.scratch + np.cumsum(change)[:-1] + self.rest + _of(self.always, values)

    def row(self, moment: int) -> tuple[Bytes, float]:
        """What is held at a moment: by variable, and whatever is chosen."""
        terms, fixed = Bytes(self.always), self.rest + float(self.program.scratch[moment])
        for first, last, size, count in self.spans:
            if not first <= moment <= last:
                continue
            if isinstance(size, dict):
                for variable, held in size.items():
                    terms[variable] = terms.get(variable, 0.0) + count * held
            else:
                fixed += count * size
        return terms, fixed

    def worst(self, timeline: np.ndarray, most: float) -> list[int]:
        """Moments at which more than ``most`` is held: the highest of each stretch of them."""
        found = []
        for stretch in np.array_split(np.arange(len(timeline)), APART):
            if len(stretch):
                moment = int(stretch[np.argmax(timeline[stretch])])
                if timeline[moment] > most:
                    found.append(moment)
        return found

    def _inputs(self) -> None:
        """Arguments that are neither parameters nor their state lie as their first reader wants them."""
        kinds = tensor_kinds(self.nodes.graph)
        owned = {t for _, states in self.leaves.updated.values() for t in states} | {*self.leaves.flows.parameters}
        for tensor in self.nodes.graph.inputs:
            if tensor in owned:
                continue
            size = tensor.nbytes * self.nodes.folded.counts.get(tensor.name, 1)
            readers = (op for op in self.nodes.graph.consumers.get(tensor, ()) if op.path in self.nodes.of_op)
            reader = next(readers, None) if kinds.get(tensor) == "input" and tensor.shape else None
            if reader is None:
                self.rest += size
                continue
            index, node = reader.inputs.index(tensor), self.nodes.of_op[reader.path]
            for choice, variable in zip(node.choices, self.takes[node.name], strict=True):
                layout = self.nodes.layout(reader, choice, index)
                self.always[variable] = self.always.get(variable, 0.0) + size * _part(layout)
        names = {name for leaf in self.leaves.by_name.values() for name in leaf.names}
        for tensor in self.leaves.flows.parameters:  # that no node reads
            if tensor.name not in names:
                self.rest += tensor.nbytes * self.nodes.folded.counts.get(tensor.name, 1)

    def _size(self, one: Buffer, is_sum: bool) -> Bytes | float:
        """The bytes of a buffer by variable; of a gradient that adds up those of each part, or of the sum."""
        tensor = self._tensors.get(one.tensor)
        whole = one.wide if one.kind == "gradient" else one.nbytes
        found = dict(self._parts(one, tensor, is_sum))
        if not found:
            return float(one.nbytes)
        share = 1 if one.kind == "gradient" else self.time.shares.get(one.tensor, 1)
        return {variable: whole * part / share for variable, part in found.items()}

    def _parts(self, one: Buffer, tensor: PTensor | None, is_sum: bool) -> Iterator[tuple[int, float]]:
        """By variable the part of a tensor that a device has."""
        flows, graph = self.leaves.flows, self.nodes.graph
        source = flows.source(tensor).tensor if tensor is not None else None
        owner = self.leaves.owner.get(source) if source is not None else None
        gradient_of = self.leaves.gradients.get(one.tensor) if one.kind == "gradient" else None
        if gradient_of is not None and gradient_of in self.modes:
            for variable, state, made in self.modes[gradient_of]:
                once = is_sum and state.zero < 2
                yield (
                    variable,
                    _part(state.layout if made is None else made) if state.zero == 0 or once else _part(state.shard),
                )
            return
        if owner is not None and self.nodes.folded.kind(owner.name) in self.modes:
            is_parameter = source is owner
            for variable, state, _ in self.modes[self.nodes.folded.kind(owner.name)]:
                yield variable, _part(state.layout if is_parameter and state.zero < 3 else state.shard)
            return
        reader = self._readers_of_stacks.get(one.tensor)
        if reader is not None:  # it is saved as the first reader behind wants it
            op, index = reader
            node = self.nodes.of_op[op.path]
            for choice, variable in zip(node.choices, self.takes[node.name], strict=True):
                yield variable, _part(self.nodes.layout(op, choice, index))
            return
        maker = graph.producer.get(source) if source is not None else None
        node = self.nodes.of_op.get(maker.path) if maker is not None else None
        if maker is not None and node is not None and source is not None:
            index = maker.outputs.index(source)
            for choice, variable in zip(node.choices, self.takes[node.name], strict=True):
                yield variable, _part(self.nodes.layout(maker, choice, index, result=True))
            return
        yield from self._inside(one.op)

    def _inside(self, path: str) -> Iterator[tuple[int, float]]:
        """Of what is no tensor of the graph, that of its op's parts."""
        op, node = self.nodes.graph.by_path.get(path), self.nodes.of_op.get(path)
        cut = math.prod(self.time.cuts.get(path, {}).values())
        if op is not None and node is not None:
            for choice, variable in zip(node.choices, self.takes[node.name], strict=True):
                yield variable, 1 / (cut * math.prod(self.nodes.parts(op, choice).values()))


def _of(size: Bytes | float, values: np.ndarray) -> float:
    if isinstance(size, dict):
        return float(sum(held * values[variable] for variable, held in size.items()))
    return size


def _part(layout: Layout) -> float:
    return math.prod(layout.local_shape) / max(1, math.prod(layout.shape))
