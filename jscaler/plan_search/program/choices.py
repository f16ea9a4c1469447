"""What may be chosen of each op: for each mesh axis one of its factors, or a copy.

A node is what chooses: a forward op, with the backward op that mirrors it, and clones of both; ops in the same place of
equal layers are one node. Joins of cotangents are nodes of their own, which may also hand on value shares.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jscaler.errors import PlanError
from jscaler.estimate.prices.folded import Folded
from jscaler.estimate.prices.in_time import InTime, source_of
from jscaler.ir import Graph, Op, PTensor, Rule
from jscaler.ir.kinds import tensor_kinds
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.materialize.placement import Placement, operand_layout, result_layout
from jscaler.rules.rule_book import RuleBook

SHARE = "+"  # in place of a factor: value shares of what a join adds up
ByAxis = tuple[str | None, ...]


class Legal(Protocol):
    """What a space allows."""

    def split(self, op: Op, axis: int, factor: str | None) -> bool:
        """Whether a mesh axis may split a factor, or copy."""
        ...

    def whole(self, op: Op, by_axis: ByAxis) -> bool:
        """Whether all axes together may split an op so."""
        ...


class Choice(NamedTuple):
    """A choice of a node.

    Attributes:
        by_axis: for each mesh axis a factor, `SHARE`, or None for a copy.
        factors: factor -> the axes that split it.
        shared: the axes along which value shares are handed on.
    """

    by_axis: ByAxis
    factors: Mapping[str, Axes]
    shared: Axes


@dataclass(eq=False)
class Node:
    """What chooses.

    Attributes:
        name: the path of its first op; of equal layers that of the one that stands for most.
        ops: forward ops, or joins, which choose alike.
        all: these, their backward ops and clones.
    """

    name: str
    ops: list[Op] = field(default_factory=list)
    all: list[Op] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    @property
    def op(self) -> Op:
        return self.ops[0]

    @property
    def is_join(self) -> bool:
        return self.op.kind == "backward"


class Nodes:
    """The nodes of a graph, and the layouts that their choices give what they read and make."""

    def __init__(self, graph: Graph, folded: Folded, mesh: tuple[int, ...], time: InTime, legal: Legal):
        assert isinstance(graph.rules, RuleBook)
        self.graph, self.folded, self.book, self.time = graph, folded, graph.rules, time
        self.mesh = DeviceMesh(tuple(range(math.prod(mesh))), tuple((f"x{i}", size) for i, size in enumerate(mesh)))
        self.shape = mesh
        self.followers = dict(_followers(graph))
        self.by_name: dict[str, Node] = {}
        self.of_op: dict[str, Node] = {}
        self._layouts: dict[tuple[str, ByAxis, int, bool], Layout] = {}
        taken_apart = {x.stack for loop in graph.loops.values() for x in loop.xs}
        for op in graph.ops:
            self._add(op)
        for node in self.by_name.values():
            node.choices = list(self._choices(node, legal, taken_apart))
            if not node.choices:
                raise PlanError(
                    f"'{node.name}' has no choice left on a mesh of {mesh}: no factor divides, and no copy may be"
                )

    def _add(self, op: Op) -> None:
        source = source_of(op)
        if source.path in self.followers or source.kind == "update" or op.body is None or source.anywhere:
            return
        name = self.folded.kind(source.path)
        node = self.by_name.get(name) or self.by_name.get(source.path)
        if node is None:
            node = self.by_name[name] = Node(name)
        if op is source:
            node.ops.append(op)
        node.all.append(op)
        self.of_op[op.path] = node

    def _choices(self, node: Node, legal: Legal, taken_apart: set[PTensor]) -> Iterator[Choice]:
        op, rule = node.op, self.book.rule(node.op)
        cut = {factor: n for one in node.ops for factor, n in self.time.cuts.get(one.path, {}).items()}
        stacked = [t for one in node.ops for t in one.outputs if t in taken_apart]
        layers = {f for dims, t in zip(rule.results, op.outputs, strict=True) if t in stacked for f in dims[:1] and dims[0]}
        slid = {name for name, _, _ in rule.halos}
        able = [f.name for f in rule.factors.values() if f.splittable and f.size > 1 and f.name not in slid | layers]
        options: list[list[str | None]] = []
        for number, size in enumerate(self.shape):
            fit = [f for f in able if rule.factors[f].size % (size * cut.get(f, 1)) == 0]
            own: list[str | None] = [f for f in (None, *fit) if legal.split(op, number, f)]
            if node.is_join and len(op.inputs) > 1:
                own.append(SHARE)
            options.append([None] if size == 1 else own)
        for by_axis in itertools.product(*options):
            factors: dict[str, Axes] = {}
            for axis, name in zip(self.mesh.names, by_axis, strict=True):
                if name is not None and name != SHARE:
                    factors[name] = (*factors.get(name, ()), axis)
            shared = tuple(axis for axis, name in zip(self.mesh.names, by_axis, strict=True) if name == SHARE)
            parts = {f: self.mesh.size(axes) * cut.get(f, 1) for f, axes in factors.items()}
            if any(rule.factors[f].size % n for f, n in parts.items()) or not legal.whole(op, by_axis):
                continue
            if shared and self.book.passes(op, ("add",) * len(op.inputs)) is None:
                continue
            yield Choice(by_axis, factors, shared)

    def layout(self, op: Op, choice: Choice, index: int, result: bool = False) -> Layout:
        """The layout in which ``op`` of a node reads its operand ``index``, or leaves its result."""
        key = op.path, choice.by_axis, index, result
        if key not in self._layouts:
            rule, placement = self.book.rule(op), self._placement(op, choice)
            if result:
                passed = {axis: self._passed(op) for axis in choice.shared}
                self._layouts[key] = result_layout(rule, placement, op, index, passed)
            else:
                self._layouts[key] = operand_layout(rule, placement, op, index)
        return self._layouts[key]

    def _passed(self, op: Op) -> tuple:
        found = self.book.passes(op, ("add",) * len(op.inputs))
        assert found is not None
        return found

    def _placement(self, op: Op, choice: Choice) -> Placement:
        shares = {axis: ("add",) * len(op.inputs) for axis in choice.shared}
        return Placement(self.mesh, self.factors(op, choice), shares=shares)  # type: ignore[arg-type]

    def factors(self, op: Op, choice: Choice) -> Mapping[str, Axes]:
        """The splits of one op of a node: a backward has those that it can have."""
        if op.forward is None:
            return choice.factors
        factors = self.book.rule(op).factors
        return {f: axes for f, axes in choice.factors.items() if f in factors and factors[f].kind != "blocked"}

    def parts(self, op: Op, choice: Choice) -> dict[str, int]:
        """Into how many parts each factor of an op is split."""
        return {f: self.mesh.size(axes) for f, axes in self.factors(op, choice).items()}


def _followers(graph: Graph) -> Iterator[tuple[str, PTensor]]:
    """Forward ops that make of one parameter alone something of the same dims (a cast): they lie as their readers want.

    Yields:
        The path of each, and what it reads.
    """
    known: set[PTensor] = {t for t, kind in tensor_kinds(graph).items() if kind == "parameter"}
    for loop in graph.loops.values():
        known |= {x.slice for x in loop.xs if x.stack in known}
    for op in graph.of_kind("forward"):
        large = [(t, dims) for t, dims in zip(op.inputs, graph.rule(op).operands, strict=True) if t.shape]
        if op.body is None or len(large) != 1 or len(op.outputs) != 1:
            continue
        (tensor, dims), (result,) = large[0], graph.rule(op).results
        if tensor in known and dims == result and op.outputs[0].shape == tensor.shape and _is_plain(graph.rule(op)):
            known.add(op.outputs[0])
            known |= {x.slice for loop in graph.loops.values() for x in loop.xs if x.stack is op.outputs[0]}
            yield op.path, tensor


def _is_plain(rule: Rule) -> bool:
    return all(f.kind == "parallel" for f in rule.factors.values())
