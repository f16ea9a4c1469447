"""A leaf of the state as several, each with a range of its dim 0: what a stage has of a stack of layers.

::

    kernel [12, …] ──► loop over 12 layers          kernel[0:4] ─► …    kernel[4:8] ─► …    kernel[8:12] ─► …
    gradient, moments [12, …] ──► update      ═►    update[0:4]         update[4:8]         update[8:12]
    kernel' [12, …]                                 kernel'[0:4]        kernel'[4:8]        kernel'[8:12]

Every op outside of loops that carries the dim from one tensor to another is done part by part: the update, casts, and what
the optimizer's state is made of. What they sum over it (a norm) is added up. An op that needs the whole dim reads the parts
one behind the other. The step's caller sees the whole leaf, which `runtime.executable` takes apart without a copy.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

from jscaler.capture.bodies import BodyTable
from jscaler.capture.differentiated import differentiated
from jscaler.errors import PlanError
from jscaler.ir import GradientCall, Graph, Op, PTensor
from jscaler.ir.loop import chain_of, flat, reads_of
from jscaler.ir.mask import Combiner
from jscaler.ir.name import range_mark
from jscaler.ir.op import JOINED, RANGES
from jscaler.rules.part_forms import CellParts, Ranged, Summed, cell_parts
from jscaler.rules.rule_book import RuleBook


def leaves_in(graph: Graph, stacks: Iterable[PTensor], sizes: Sequence[int], bodies: BodyTable) -> tuple[str, ...]:
    """The leaves of the state that lie in parts of ``sizes``, if ``stacks`` do; in the order of the step's inputs.

    Not those that a stack is a reshape of, whose dim 0 is another; nor those whose update needs all layers.
    """
    found = _Parts(graph, tuple(sizes), bodies, stacks=stacks)
    lie = (t for t in graph.inputs if t in found.forms and not found.needs_all_layers(t))
    return tuple(t.name for t in lie if t.shape[:1] == (sum(sizes),))


def with_leaf_parts(graph: Graph, leaves: Sequence[str], sizes: Sequence[int], bodies: BodyTable) -> Graph:
    """``graph`` with parts of ``sizes`` in the place of ``leaves``, and its gradient calls differentiated again.

    Raises:
        UnknownNameError: no such input.
        PlanError: the sizes are not those of the ranges of their dim 0.
    """
    tensors = [graph.input(name) for name in leaves]
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != sum(sizes) or min(sizes) < 1:
            raise PlanError(
                f"'{tensor.name}' is {list(tensor.shape)} and cannot lie in parts of {list(sizes)} layers, "
                f"{sum(sizes)} in all, along its dim 0; give sizes of one or more that add up to it"
            )
    return _Parts(graph, tuple(sizes), bodies, leaves=tensors).graph_in_parts()


class _Parts:
    """What of a graph is done part by part, if ``leaves`` lie so, and what ``stacks`` are made of.

    Attributes:
        forms: how tensors lie in parts that are made, or stored, so.
        cells: the parts of ops.
        taken: tensors that are made whole, and taken apart for their readers.
    """

    def __init__(
        self, graph: Graph, sizes: tuple[int, ...], bodies: BodyTable, leaves: Iterable[PTensor] = (),
        stacks: Iterable[PTensor] = (),
    ):  # fmt: skip
        assert isinstance(graph.rules, RuleBook)
        self.graph, self.sizes, self.bodies, self.book = graph, sizes, bodies, graph.rules
        self.marks = [range_mark(own) for own in itertools.pairwise(itertools.accumulate(sizes, initial=0))]
        self.forms: dict[PTensor, Ranged] = {}
        self.cells: dict[str, CellParts | None] = {}
        self.taken: dict[PTensor, Ranged] = {}
        outputs = graph.next_version.items()
        self.version = {graph.inputs[i]: graph.outputs[o] for o, i in outputs}
        self.before: dict[PTensor, list[PTensor]] = {}
        for leaf, output in self.version.items():
            self.before.setdefault(output, []).append(leaf)
        pairs = [pair for call in graph.calls for pair in zip(call.wrt, call.gradients, strict=True)]
        self.partners: dict[PTensor, list[PTensor]] = {}
        for parameter, gradient in pairs:
            self.partners.setdefault(parameter, []).append(gradient)
            self.partners.setdefault(gradient, []).append(parameter)
        self.todo: list[PTensor] = []
        for leaf in leaves:
            self._lies(leaf, Ranged(0, 1, sizes, 1))
        for stack in stacks:
            self._need(stack, Ranged(0, 1, sizes, 1))
        while self.todo:
            self._spread(self.todo.pop())

    # -- what lies in parts

    def _need(self, tensor: PTensor, form: Ranged) -> None:
        """``tensor`` is read, or wanted, in parts: it is made so, if it can be."""
        if tensor in self.forms or tensor in self.taken:
            return
        maker = self.graph.producer.get(tensor)
        is_state = tensor in self.version or tensor in self.partners or tensor in self.graph.inputs
        if is_state and (maker is None or maker.kind == "backward"):
            self._lies(tensor, form)
        elif maker is None or self._cell(maker, tensor, form) is None or tensor not in self.forms:
            self.taken[tensor] = form

    def needs_all_layers(self, leaf: PTensor) -> bool:
        """Whether an update makes the next version of ``leaf`` as a whole. (A forward loop over ranges leaves parts.)"""
        after = self.version.get(leaf)
        maker = self.graph.producer.get(after) if after is not None else None
        return after in self.taken and maker is not None and maker.kind == "update"

    def _lies(self, tensor: PTensor, form: Ranged) -> None:
        if tensor not in self.forms:
            self.forms[tensor] = form
            self.todo.append(tensor)

    def _spread(self, tensor: PTensor) -> None:
        """What follows from ``tensor`` in parts."""
        form = self.forms[tensor]
        for op in self.graph.consumers.get(tensor, ()):
            self._cell(op, tensor, form)
        others = [*self.before.get(tensor, ()), *self.partners.get(tensor, ())]
        others += [self.version[tensor]] if tensor in self.version else []
        for other in others:
            self._need(other, form)

    def _cell(self, op: Op, tensor: PTensor, form: Ranged) -> CellParts | None:
        """The parts of an op that reads or makes ``tensor`` in parts; None where it needs the whole."""
        if op.path not in self.cells:
            self.cells[op.path] = self._cells_of(op, tensor, form)
            found = self.cells[op.path]
            if found is not None:
                for other, own in zip(op.inputs, found.inputs, strict=True):
                    if isinstance(own, Ranged):
                        self._need(other, own)
                for other, own in zip(op.outputs, found.outputs, strict=True):
                    if isinstance(own, Ranged):
                        self._lies(other, own)
        return self.cells[op.path]

    def _cells_of(self, op: Op, tensor: PTensor, form: Ranged) -> CellParts | None:
        if op.kind == "backward" or op.loop is not None or op.body is None or op.body.jaxpr.effects:
            return None
        rule = self.book.rule(op)
        tensors = [*zip(op.inputs, rule.operands, strict=True), *zip(op.outputs, rule.results, strict=True)]
        name = next((dims[0][0] for t, dims in tensors if t == tensor and dims and dims[0]), None)
        found = cell_parts(op, name, self.sizes, self.book, self.bodies) if name is not None else None
        if found is None:
            return None
        ends = list(zip((*op.inputs, *op.outputs), (*found.inputs, *found.outputs), strict=True))
        for t, own in ends:
            in_front = isinstance(own, Ranged) and own.dim == 0 and own.outer == 1
            joined = isinstance(own, Summed) and t in op.outputs
            if not (in_front or joined or own is None) or (t in self.forms and own != self.forms[t]):
                return None
        return found if (tensor, form) in ends else None

    # -- the graph

    def graph_in_parts(self) -> Graph:
        """Rewrite it: parts of ops in the place of ops, and what joins and takes apart where that has to be."""
        graph, self.ops, self.whole = self.graph, list[Op](), dict[PTensor, PTensor]()
        self.known: dict[PTensor, tuple[PTensor, ...]] = {}
        starts: dict[int, int] = {}  # of gradient calls, where their backward belongs
        for tensor in (t for t in graph.inputs if t in self.taken):
            self._take_apart(tensor, graph.consumers.get(tensor, graph.ops)[0])
        for item in graph.tree:
            inside = list(flat([item]))
            if inside[0].kind == "backward" and inside[0].call is not None:
                starts.setdefault(inside[0].call, len(self.ops))
                continue
            cell = self.cells.get(inside[0].path) if item is inside[0] else None
            if cell is not None:
                self._write(inside[0], cell)
            else:
                for tensor in dict.fromkeys(reads_of(item)):
                    self._make_whole(tensor, inside[0])
                self.ops += [op.renamed(self.whole) for op in inside]
            made = item.outputs if isinstance(item, Op) else item.loop.results
            for tensor in (t for t in made if t in self.taken):
                self._take_apart(tensor, inside[0])
        made = self._with_ends({n for op in self.ops for n in chain_of(op.loop, graph.loops)})
        for call, start in sorted(starts.items(), key=lambda pair: -pair[1]):
            made = differentiated(made, call, self.bodies, start)
        return made

    def parts(self, tensor: PTensor) -> tuple[PTensor, ...]:
        """The parts of a tensor, in order."""
        if tensor not in self.known:
            form = self.forms.get(tensor) or self.taken[tensor]
            avals = (tensor.aval.update(shape=form.shape(tensor.shape, i)) for i in range(len(self.sizes)))
            pairs = zip(self.marks, avals, strict=True)
            self.known[tensor] = tuple(PTensor(tensor.name + mark, aval, tensor.role) for mark, aval in pairs)
        return self.known[tensor]

    def _write(self, op: Op, cell: CellParts) -> None:
        joins: list[Op] = []
        summands: dict[PTensor, list[PTensor]] = {}
        combiners: dict[PTensor, Combiner] = {}
        for number, mark in enumerate(self.marks):
            inputs = tuple(
                self.parts(t)[number] if isinstance(own, Ranged) else t
                for t, own in zip(op.inputs, cell.inputs, strict=True)
            )
            outputs = []
            for tensor, own in zip(op.outputs, cell.outputs, strict=True):
                first = own is None and number == 0  # it is the same for all
                outputs.append(
                    self.parts(tensor)[number] if isinstance(own, Ranged)
                    else tensor if first
                    else dataclasses.replace(tensor, name=tensor.name + ("@each" if tensor in self.taken else "") + mark)
                )  # fmt: skip
                if isinstance(own, Summed):
                    summands.setdefault(tensor, []).append(outputs[-1])
                    combiners[tensor] = own.combiner
            body, named = cell.of(number)
            self.ops.append(
                dataclasses.replace(op, path=op.path + mark, inputs=inputs, outputs=tuple(outputs), body=body, named=named,
                                    backward=None, kept=())
            )  # fmt: skip
        for tensor, found in summands.items():
            body = self.bodies.join(tensor.aval, len(found), combiners[tensor])
            path = tensor.name + JOINED
            joins.append(Op(path, op.kind, tuple(found), (tensor,), body, op.source_info, op.call, ranges="joined"))
        self.ops += joins

    def _make_whole(self, tensor: PTensor, reader: Op) -> None:
        if tensor not in self.forms or tensor in self.whole:
            return
        parts = self.parts(tensor)
        body = self.bodies.concatenated([t.aval for t in parts])
        # the gradient of what is joined is called as that of the leaf was
        name = tensor.name + (JOINED if any(tensor in call.gradients for call in self.graph.calls) else "")
        self.whole[tensor] = PTensor(name, tensor.aval)
        whole = (self.whole[tensor],)
        path = tensor.name + JOINED
        self.ops.append(Op(path, reader.kind, parts, whole, body, reader.source_info, reader.call, ranges="joined"))

    def _take_apart(self, tensor: PTensor, like: Op) -> None:
        form = self.taken[tensor]
        count = len(self.sizes)
        body = self.bodies.traced(lambda x: [form.take(x, i) for i in range(count)], [tensor.aval])
        parts = tuple(dataclasses.replace(t, role="activation") for t in self.parts(tensor))
        path = tensor.name + RANGES
        self.ops.append(Op(path, like.kind, (tensor,), parts, body, like.source_info, like.call, ranges="apart"))

    def _with_ends(self, loops: Set[str]) -> Graph:
        """The graph of the parts' inputs, outputs and gradients, still without a backward pass."""
        graph = self.graph
        place: dict[PTensor, int] = {}
        inputs: list[PTensor] = []
        for tensor in graph.inputs:
            place[tensor] = len(inputs)
            inputs += self.parts(tensor) if tensor in self.forms else (tensor,)
        outputs: list[PTensor] = []
        names: list[str] = []
        versions: dict[int, int] = {}
        for number, tensor in enumerate(graph.outputs):
            leaf = self._leaf(number, graph.next_version)
            in_parts = leaf in self.forms
            if not in_parts and self.ops:
                self._make_whole(tensor, self.ops[-1])
            own = self.parts(tensor) if in_parts else (self.whole.get(tensor, tensor),)
            if leaf is not None:
                versions.update({len(outputs) + i: place[leaf] + i for i in range(len(own))})
            names += [graph.output_names[number] + mark for mark in (self.marks if in_parts else ("",))]
            outputs += own
        calls = tuple(GradientCall(c.loss, self._expanded(c.wrt), self._expanded(c.gradients)) for c in graph.calls)
        return dataclasses.replace(
            graph, ops=tuple(self.ops), inputs=tuple(inputs), outputs=tuple(outputs), output_names=tuple(names),
            loops={n: loop.renamed(self.whole, {}) for n, loop in graph.loops.items() if n in loops},
            next_version=versions, calls=calls, leaf_parts=self._counts(graph.inputs, graph.leaf_parts),
            result_parts=self._counts(graph.outputs, graph.result_parts, graph.next_version),
        )  # fmt: skip

    def _counts(
        self, ends: Sequence[PTensor], before: tuple[int, ...], versions: Mapping[int, int] | None = None
    ) -> tuple[int, ...]:
        """How many inputs, or outputs, each leaf is now, which was so many of ``ends`` before."""
        found, start = [], 0
        for count in before or (1,) * len(ends):
            own = range(start, start + count)
            leaves = [ends[i] if versions is None else self._leaf(i, versions) for i in own]
            found.append(sum(len(self.sizes) if leaf in self.forms else 1 for leaf in leaves))
            start += count
        return tuple(found)

    def _leaf(self, output: int, versions: Mapping[int, int]) -> PTensor | None:
        return self.graph.inputs[versions[output]] if output in versions else None

    def _expanded(self, tensors: Iterable[PTensor]) -> tuple[PTensor, ...]:
        return tuple(part for t in tensors for part in (self.parts(t) if t in self.forms else (t,)))
