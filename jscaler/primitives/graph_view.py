"""``GraphView``: what can be read of a graph, by name; a policy's planner is one, whatever graph it has got to."""

from collections.abc import Iterable, Mapping
from typing import Any

from jscaler.ir import GradientCall, Graph, Loop, Op, PTensor, Rule
from jscaler.ir.loop import Item
from jscaler.ir.op import OpKind
from jscaler.ir.overview import Overview, Shown


class GraphView(Shown):
    """Reads like ``graph``, which may be replaced; each name means what it does on `Graph`."""

    graph: Graph

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.graph.ops

    @property
    def inputs(self) -> tuple[PTensor, ...]:
        return self.graph.inputs

    @property
    def constants(self) -> tuple[tuple[PTensor, Any], ...]:
        return self.graph.constants

    @property
    def outputs(self) -> tuple[PTensor, ...]:
        return self.graph.outputs

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.graph.output_names

    @property
    def next_version(self) -> Mapping[int, int]:
        return self.graph.next_version

    @property
    def calls(self) -> tuple[GradientCall, ...]:
        return self.graph.calls

    @property
    def loops(self) -> Mapping[str, Loop]:
        return self.graph.loops

    @property
    def by_path(self) -> Mapping[str, Op]:
        return self.graph.by_path

    @property
    def position(self) -> Mapping[str, int]:
        return self.graph.position

    @property
    def tree(self) -> tuple[Item, ...]:
        return self.graph.tree

    @property
    def linked(self) -> Mapping[PTensor, tuple[tuple[PTensor, int], ...]]:
        return self.graph.linked

    @property
    def producer(self) -> Mapping[PTensor, Op]:
        return self.graph.producer

    @property
    def consumers(self) -> Mapping[PTensor, tuple[Op, ...]]:
        return self.graph.consumers

    def of_kind(self, kind: OpKind) -> tuple[Op, ...]:
        return self.graph.of_kind(kind)

    def forward(self) -> tuple[Op, ...]:
        return self.graph.forward()

    def backward(self) -> tuple[Op, ...]:
        return self.graph.backward()

    def update(self) -> tuple[Op, ...]:
        return self.graph.update()

    def select(self, pattern: str, kind: OpKind | None = "forward") -> tuple[Op, ...]:
        return self.graph.select(pattern, kind)

    def input(self, path: str) -> PTensor:
        return self.graph.input(path)

    def select_inputs(self, pattern: str) -> tuple[PTensor, ...]:
        return self.graph.select_inputs(pattern)

    def rule(self, op: Op) -> Rule:
        return self.graph.rule(op)

    def factor_of(self, path: str, dim: int) -> Mapping[Op, str]:
        return self.graph.factor_of(path, dim)

    def factors_text(self, op: Op, factors: Iterable[str] | None = None) -> str:
        return self.graph.factors_text(op, factors)

    def require_gradient(self) -> None:
        self.graph.require_gradient()

    def __getitem__(self, path: str) -> Op:
        return self.graph[path]

    def overview(self) -> Overview:
        return self.graph.overview()

    def __str__(self) -> str:
        return str(self.graph)
