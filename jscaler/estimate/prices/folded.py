"""A graph in which one layer stands for many equal ones that are written out one after another.

::

    e  0  1  2  3 … 22  23  n        layers in the order of the program
    e  0  1              23  n       1 stands for 1 to 22: it reads what 0 makes, and 23 reads what it makes

The first and the last layer stay, whose neighbours are others. What all layers feed (a norm of all gradients) reads the
one in the place of each. A stack of layers, which is a loop, is as short as it is.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jscaler.ir import Body, Graph, Op, PTensor
from jscaler.ir.graph import GradientCall
from jscaler.ir.name import without
from jscaler.ir.walk import closure, grouped
from jscaler.plans.layers import find_layers
from jscaler.primitives import Planner
from jscaler.stages import Captured

FEWEST = 5  # layers that are folded: three stay


@dataclass(frozen=True)
class Folded:
    """A graph whose equal layers are folded.

    Attributes:
        graph: the short one.
        stands_for: path of an op, or name of an input, of a layer that is gone -> the one that stands for it.
        counts: path of an op, or name of an input -> how many it stands for, itself included; others stand for themselves.
        runs: the same -> the number of its run of layers.
        alike: path of an op, or name of an input, of the first or the last layer -> its like in the one between them.
    """

    graph: Graph
    stands_for: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """What stands in this graph for an op or an input, by its name: those of a layer, or of a range of a stack."""
        base = without(name, "layers")
        return self.stands_for.get(base, base)

    def kind(self, name: str) -> str:
        """What stands for all layers of a run: an op or an input of the one between the first and the last."""
        name = self.of(name)
        return self.alike.get(name, name)

    def count(self, op: Op) -> int:
        """For how many an op stands, or its forward, or what it computes again."""
        return self.counts.get(self._counted(op), 1)

    def reads(self, reader: Op, maker: Op | None) -> int:
        """How often one reads what another makes: each layer what the one before makes, other ops what all layers make."""
        before: Op | None = reader
        while before is not None and before.path not in self.counts and before.path not in self.alike:
            before = before.again or before.forward
        here = self.count(reader)
        return here if before is not None or maker is None else max(here, self.count(maker))

    def run(self, op: Op) -> int | None:
        """The number of the run of layers for which an op stands; None where it stands for itself."""
        return self.runs.get(self._counted(op))

    def _counted(self, op: Op) -> str:
        before: Op | None = op
        while before is not None and before.path not in self.counts:
            before = before.again or before.forward
        return op.path if before is None else before.path


def folded(captured: Captured) -> Folded:
    """A graph with its runs of equal layers folded, as far as their dataflow is that of a chain."""
    graph = captured.graph
    short = Folded(graph)
    if graph.leaf_parts or graph.result_parts:
        return short
    for number, run in enumerate(_runs(captured)):
        every = (_Layers(short.graph, rows) for rows in (run, run[:-1]))  # what stands behind the last may make it another
        layers = next((one for one in every if one.are_equal()), None)
        made = layers.folded() if layers is not None else None
        if made is not None:
            runs = {**short.runs, **dict.fromkeys(made.counts, number)}
            stands_for, counts = {**short.stands_for, **made.stands_for}, {**short.counts, **made.counts}
            short = Folded(made.graph, stands_for, counts, runs, {**short.alike, **made.alike})
    return short


def _runs(captured: Captured) -> list[list[list[str]]]:
    """Runs of layers that are written out and have equal ops: for each layer the paths of its forward ops."""
    planner = Planner(captured.graph, 1, captured.bodies)
    found: list[tuple[tuple[Body | None, ...], list[list[str]]]] = []
    for layer in find_layers(planner, needed=False):
        bodies = tuple(op.body for op in layer)
        if any(op.loop is not None for op in layer):
            continue
        if not found or found[-1][0] != bodies:
            found.append((bodies, []))
        found[-1][1].append([op.path for op in layer])
    return [rows for _, rows in found if len(rows) >= FEWEST]


Root = tuple[object, ...]  # what in a layer something comes from: equal of what corresponds


class _Layers:
    """A run of layers: all that belongs to each, and what corresponds to what."""

    def __init__(self, graph: Graph, run: Sequence[Sequence[str]]):
        self.graph, self.count = graph, len(run)
        self.forward = {path: (number, place) for number, row in enumerate(run) for place, path in enumerate(row)}
        self.of_op: dict[str, int] = {}
        self.of_leaf: dict[PTensor, int] = {}
        self.root: dict[str, Root] = {}  # of ops and of leaves
        self.key: dict[str, Root] = {}
        self._leaves_of_layers()
        self._seen: Counter[Root] = Counter()
        wanted = {t: (op.forward, i) for op in graph.ops if op.forward is not None for i, t in op.cotangents}
        gradients = {g: w for call in graph.calls for g, w in zip(call.gradients, call.wrt, strict=True)}
        for op in graph.ops:
            found = self._placed(op, wanted, gradients)
            if found is not None:
                self._note(op, *found)
        self.ops = {
            number: sorted(own, key=lambda op: str(self.key[op.path]))
            for number, own in grouped((number, graph.by_path[path]) for path, number in self.of_op.items()).items()
        }
        self.maker = {t: (op, i) for own in self.ops.values() for op in own for i, t in enumerate(op.outputs)}
        self.ordinal = {op.path: place for own in self.ops.values() for place, op in enumerate(own)}

    def _leaves_of_layers(self) -> None:
        """Inputs that the forward ops of one layer read, and no others."""
        inputs = frozenset(self.graph.inputs)
        readers: dict[PTensor, list[Root | None]] = {}
        for op in self.graph.of_kind("forward"):
            for i, tensor in enumerate(op.inputs):
                if tensor in inputs:
                    readers.setdefault(tensor, []).append((*self.forward[op.path], i) if op.path in self.forward else None)
        for leaf, places in readers.items():
            known = [place for place in places if place is not None]
            if len(known) == len(places) and len({place[0] for place in known}) == 1:
                number, *where = known[0]
                assert isinstance(number, int)
                self.of_leaf[leaf], self.root[leaf.name] = number, ("leaf", *where)

    def _placed(
        self, op: Op, wanted: Mapping[PTensor, tuple[Op, int]], gradients: Mapping[PTensor, PTensor]
    ) -> tuple[int, Root] | None:
        """Of which layer an op is, and what in it it comes from."""
        if op.path in self.forward:
            return self.forward[op.path][0], ("forward", self.forward[op.path][1])
        if op.forward is not None:
            found = self.forward.get(op.forward.path)
            return None if found is None else (found[0], ("backward", found[1]))
        if op.kind == "backward":  # a join: of what is it that it makes the cotangent?
            for tensor in op.outputs:
                if tensor in wanted and wanted[tensor][0].path in self.forward:
                    number, place = self.forward[wanted[tensor][0].path]
                    return number, ("join", place, wanted[tensor][1])
                leaf = gradients.get(tensor)
                if leaf is not None and leaf in self.of_leaf:
                    return self.of_leaf[leaf], ("join", *self.root[leaf.name])
            return None
        if op.kind != "update" or op.loop is not None:
            return None
        arrays = [t for t in op.inputs if t.shape]
        makers = [self.graph.producer[t].path for t in arrays if t in self.graph.producer]
        known = [path for path in makers if path in self.of_op] + [t.name for t in arrays if t in self.of_leaf]
        layers = {self.of_op[path] for path in makers if path in self.of_op}
        layers |= {self.of_leaf[t] for t in arrays if t in self.of_leaf}
        if len(layers) != 1 or any(path not in self.of_op for path in makers):
            return None
        return layers.pop(), min((self.root[name] for name in known), key=str)

    def _note(self, op: Op, number: int, root: Root) -> None:
        self.of_op[op.path], self.root[op.path] = number, root
        self.key[op.path] = (op.kind, *root, f"{self._seen[number, op.kind, root]:04}")
        self._seen[number, op.kind, root] += 1
        if op.kind == "update":
            inputs = frozenset(t for t in op.inputs if t.shape and t not in self.graph.producer)
            for leaf in inputs - self.of_leaf.keys():
                self.of_leaf[leaf], self.root[leaf.name] = number, ("state", *self.key[op.path])

    def are_equal(self) -> bool:
        """Whether all layers but the first hold the same, in one order."""
        if self.count < FEWEST:
            return False
        alike = [
            [(op.kind, op.body, op.gradients, bool(op.remat)) for op in self.ops.get(n, ())] for n in range(self.count)
        ]
        return all(own == alike[1] for own in alike[2:])

    def folded(self) -> Folded | None:
        """The graph with the second layer in the place of all but the first and the last; None where it cannot be."""
        first, last = 1, self.count - 1
        gone = range(2, last)
        stands_for: dict[str, str] = {}
        for number in gone:
            for op in self.ops[number]:
                stands_for[op.path] = self.ops[first][self.ordinal[op.path]].path
        leaves = self._leaves()
        if leaves is None:
            return None
        for leaf, number in self.of_leaf.items():
            if number in gone:
                if leaf not in leaves:
                    return None
                stands_for[leaf.name] = leaves[leaf].name
        ops: dict[str, Op] = {}
        for op in self.graph.ops:
            number = self.of_op.get(op.path)
            if number in gone:
                continue
            inputs = [self._instead(op, t, number, gone, leaves) for t in op.inputs]
            if any(t is None for t in inputs):
                return None
            renamed = {t: made for t, made in zip(op.inputs, inputs, strict=True) if made is not None and made is not t}
            if renamed or op.forward is not None:
                forward = ops.get(op.forward.path) if op.forward is not None else None
                cotangents = tuple((i, renamed.get(t, t)) for i, t in op.cotangents)
                op = dataclasses.replace(
                    op, inputs=tuple(renamed.get(t, t) for t in op.inputs), cotangents=cotangents, forward=forward
                )
            ops[op.path] = op
        alike = self._alike({op.path for op in ops.values()})
        return Folded(self._graph(ops, leaves, gone), stands_for, self._counts(first, last), alike=alike)

    def _alike(self, kept: Set[str]) -> dict[str, str]:
        """What in the first and the last layer has its like in the second."""
        places = {op.path: (number, self.key[op.path]) for number, own in self.ops.items() for op in own if op.path in kept}
        places |= {leaf.name: (number, self.root[leaf.name]) for leaf, number in self.of_leaf.items()}
        second = {place: name for name, (number, place) in places.items() if number == 1}
        ends = {name: place for name, (number, place) in places.items() if number in (0, self.count - 1)}
        return {name: second[place] for name, place in ends.items() if place in second}

    def _leaves(self) -> dict[PTensor, PTensor] | None:
        """Input of a layer that goes -> the input that the second layer reads in its place."""
        place: dict[int, dict[PTensor, tuple[int, int]]] = {}
        for number, own in self.ops.items():
            table = place.setdefault(number, {})
            for op in own:
                for i, t in enumerate(op.inputs):
                    if self.of_leaf.get(t) == number:
                        table.setdefault(t, (self.ordinal[op.path], i))
        at = {where: leaf for leaf, where in place.get(1, {}).items()}
        found: dict[PTensor, PTensor] = {}
        for number in range(2, self.count - 1):
            for leaf, where in place.get(number, {}).items():
                if where not in at or at[where].shape != leaf.shape:
                    return None
                found[leaf] = at[where]
        return found

    def _instead(
        self, op: Op, tensor: PTensor, number: int | None, gone: range, leaves: Mapping[PTensor, PTensor]
    ) -> PTensor | None:
        """What ``op`` reads in place of ``tensor``; None where that is of a layer that it should not read."""
        if tensor in leaves:
            return None if number is not None else leaves[tensor]
        made = self.maker.get(tensor)
        if made is None or self.of_op[made[0].path] not in gone:
            return tensor
        layer = self.of_op[made[0].path]
        if number is None:
            return self._like(made, 1) if op.kind != "forward" else None
        if layer == number + 1:
            return self._like(made, self.count - 1)
        return self._like(made, 1) if layer == number - 1 else None

    def _like(self, made: tuple[Op, int], number: int) -> PTensor:
        op, index = made
        return self.ops[number][self.ordinal[op.path]].outputs[index]

    def _counts(self, first: int, last: int) -> dict[str, int]:
        many = last - first
        found = {op.path: many for op in self.ops[first]}
        return found | {leaf.name: many for leaf, number in self.of_leaf.items() if number == first}

    def _graph(self, ops: Mapping[str, Op], leaves: Mapping[PTensor, PTensor], gone: range) -> Graph:
        graph = self.graph
        lost = {t for number in gone for op in self.ops[number] for t in op.outputs} | {*leaves}
        inputs = [t for t in graph.inputs if t not in leaves]
        kept = [i for i, t in enumerate(graph.outputs) if t not in lost]
        outputs = [graph.outputs[i] for i in kept]
        place = {t: i for i, t in enumerate(inputs)}
        number = {i: n for n, i in enumerate(kept)}
        versions = {number[o]: place[graph.inputs[i]] for o, i in graph.next_version.items() if o in number}
        calls = []
        for call in graph.calls:
            pairs = [(w, g) for w, g in zip(call.wrt, call.gradients, strict=True) if w not in leaves and g not in lost]
            calls.append(GradientCall(call.loss, tuple(w for w, _ in pairs), tuple(g for _, g in pairs)))
        names = tuple(graph.output_names[i] for i in kept)
        short = dataclasses.replace(
            graph, ops=tuple(ops.values()), inputs=tuple(inputs), outputs=tuple(outputs), output_names=names,
            next_version=versions, calls=tuple(calls),
        )  # fmt: skip
        return _live(short)


def _live(graph: Graph) -> Graph:
    """``graph`` without the ops that nobody reads: those that made keys for layers that are gone."""
    ends = [graph.producer[t] for t in graph.outputs if t in graph.producer]
    ends += [op for op in graph.ops if op.loop is not None or op.kind == "backward"]

    def read(op: Op) -> Iterator[Op]:
        return (graph.producer[t] for t in op.inputs if t in graph.producer)

    needed = {op.path for op in closure(ends, read)}
    return dataclasses.replace(graph, ops=tuple(op for op in graph.ops if op.path in needed))
