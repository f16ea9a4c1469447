"""``GraphView``: what can be read of a graph, by name; a policy's planner is one, whatever graph it has got to."""

from collections.abc import Mapping
from typing import Any

from jscaler.ir import GradientCall, Graph, Loop, Op, PTensor, Rule
from jscaler.ir.loop import Item
from jscaler.ir.op import OpKind
from jscaler.ir.overview import Overview, Shown


class GraphView(Shown):
    """Reads like ``graph``, which may be replaced; each name means what it does on `Graph`.

    Example:
        >>> graph["mlp/dot"] is graph.by_path["mlp/dot"] is graph.ops[graph.position["mlp/dot"]]
        True
        >>> [t.shape for t in graph.select_inputs("state/params")] == [t.shape for t in graph.inputs[5:10]]
        True
    """

    graph: Graph

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, in an order in which they can run."""
        return self.graph.ops

    @property
    def inputs(self) -> tuple[PTensor, ...]:
        """The leaves of the step's arguments, called by argument and path: ``state/params/up``."""
        return self.graph.inputs

    @property
    def constants(self) -> tuple[tuple[PTensor, Any], ...]:
        """Arrays that the step closes over, each with its value."""
        return self.graph.constants

    @property
    def outputs(self) -> tuple[PTensor, ...]:
        """The leaves of the step's result."""
        return self.graph.outputs

    @property
    def output_names(self) -> tuple[str, ...]:
        """The paths of the outputs in the tree of the result."""
        return self.graph.output_names

    @property
    def next_version(self) -> Mapping[int, int]:
        """Number of an output -> number of the input whose next version it is: state, and what becomes of it."""
        return self.graph.next_version

    @property
    def calls(self) -> tuple[GradientCall, ...]:
        """The step's calls of `jscaler.value_and_grad`."""
        return self.graph.calls

    @property
    def loops(self) -> Mapping[str, Loop]:
        """Name -> loop; the ops of its body stand among the ops once."""
        return self.graph.loops

    @property
    def by_path(self) -> Mapping[str, Op]:
        """Path -> op."""
        return self.graph.by_path

    @property
    def position(self) -> Mapping[str, int]:
        """Path -> the place of the op in the order of the program."""
        return self.graph.position

    @property
    def tree(self) -> tuple[Item, ...]:
        """Ops and loops in order, where the ops of a loop stand in it."""
        return self.graph.tree

    @property
    def linked(self) -> Mapping[PTensor, tuple[tuple[PTensor, int], ...]]:
        """Tensor -> tensors with the same dims before, in and after loops, and by how many places the dims are shifted."""
        return self.graph.flow.linked

    @property
    def producer(self) -> Mapping[PTensor, Op]:
        """Tensor -> the op that makes it; inputs and constants have none."""
        return self.graph.producer

    @property
    def consumers(self) -> Mapping[PTensor, tuple[Op, ...]]:
        """Tensor -> the ops that read it, in order."""
        return self.graph.consumers

    def of_kind(self, kind: OpKind) -> tuple[Op, ...]:
        """The ops of one kind, in order.

        Args:
            kind: ``"forward"``, ``"backward"`` or ``"update"``.
        """
        return self.graph.of_kind(kind)

    def forward(self) -> tuple[Op, ...]:
        """The forward ops, in order."""
        return self.graph.forward()

    def backward(self) -> tuple[Op, ...]:
        """The backward ops, in order: handles, whose programs are made when the policy is done.

        Raises:
            CaptureError: the step takes no gradient that jscaler sees.
        """
        return self.graph.backward()

    def update(self) -> tuple[Op, ...]:
        """What the step does with gradients, in order: clipping, optimizer, metrics."""
        return self.graph.update()

    def select(self, pattern: str, kind: OpKind | None = "forward") -> tuple[Op, ...]:
        """The ops whose path matches a shell pattern.

        Args:
            pattern: such as ``"block_*/mlp/*"``.
            kind: which kind of ops; None for all.

        Raises:
            UnknownNameError: no op matches.
        """
        return self.graph.select(pattern, kind)

    def input(self, path: str) -> PTensor:
        """One leaf of the step's arguments.

        Args:
            path: such as ``"state/params/up"``.

        Raises:
            UnknownNameError: there is no such leaf.
        """
        return self.graph.input(path)

    def select_inputs(self, pattern: str) -> tuple[PTensor, ...]:
        """Leaves of the step's arguments; none if nothing is called so.

        Args:
            pattern: a path, what leaves lie below (``"state/params"``), or a shell pattern.
        """
        return self.graph.select_inputs(pattern)

    def rule(self, op: Op) -> Rule:
        """The factors of an op: which dims of its tensors are one index, and what splitting it means.

        Args:
            op: an op of this graph.
        """
        return self.graph.rule(op)

    def factor_of(self, path: PTensor | str, dim: int) -> Mapping[Op, str]:
        """Follow a dim of a tensor through the dataflow: for every op that it reaches, the factor that it is there.

        Args:
            path: of an input, or a tensor of the graph.
            dim: which dim of it.

        Returns:
            Op -> name of a factor, of the first where there are several (queries and keys of a self-attention).

        Raises:
            UnknownNameError: there is no such input.
        """
        return self.graph.factor_of(path, dim)

    def factor_names(self, op: Op) -> Mapping[str, str]:
        """What the factors of an op are: by factor the dim of the argument, else of the parameter, that it comes from.

        Args:
            op: an op of this graph.

        Example:
            >>> print(graph.factor_names(graph["mlp/dot"]))
            {'a': 'tokens[0]', 'b': 'tokens[1]', 'c': 'words[1]', 'd': 'up[1]'}
        """
        return self.graph.factor_names(op)

    def require_gradient(self) -> None:
        """Do nothing, if the step takes a gradient that plans can see.

        Raises:
            CaptureError: it takes none, and what to write.
        """
        self.graph.require_gradient()

    def __getitem__(self, path: str) -> Op:
        return self.graph[path]

    def overview(self) -> Overview:
        return self.graph.overview()

    def __str__(self) -> str:
        return str(self.graph)
