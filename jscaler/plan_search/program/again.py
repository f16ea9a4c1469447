"""What is computed again in the backward pass: what a backward reads is saved, or its maker runs again, and then what that
reads is saved or made again. (Jain et al., Checkmate, MLSys 2020.)

A node may run again whose results are read beside it alone: in the same iteration of a loop, the same layer. So regions
stay within a layer.
"""

from collections.abc import Callable, Mapping

from jscaler.estimate.prices.in_time import source_of
from jscaler.ir import Op, PTensor
from jscaler.ir.walk import grouped
from jscaler.materialize.layout import Layout
from jscaler.plan_search.program.choices import Node, Nodes
from jscaler.plan_search.program.flows import Edge, Flows
from jscaler.plan_search.program.linear import Linear, Solution
from jscaler.plan_search.program.seconds import Seconds

Made = tuple[str, int]  # a node, and the index of a result
INSIDE = -1  # in place of an index: what an op holds inside and its backward reads


class Again:
    """The variables of what runs again, and of what is saved.

    Attributes:
        runs: name of a node that may run again -> whether it does.
        regions: name of a node that holds something inside for its backward -> whether it is in a region, in which that is
            worked out again from what it reads.
        saved: a result that a backward needs, and that may be made again -> whether it is saved.
    """

    def __init__(
        self, nodes: Nodes, flows: Flows, seconds: Seconds, linear: Linear, takes: dict[str, list[int]],
        may: Callable[[Op], bool],
    ):  # fmt: skip
        self.nodes, self.flows, self.seconds, self.linear, self.takes = nodes, flows, seconds, linear, takes
        self.runs: dict[str, int] = {}
        self.saved: dict[Made, int] = {}
        self._unless: dict[tuple[Made, float, str], int] = {}
        self.forward: dict[Made, list[Op]] = {}
        self.backward: dict[Made, list[Op]] = {}
        self._find_readers()
        for node in nodes.by_name.values():
            if may(node.op) and self._may(node):
                self.runs[node.name] = self._run(node)
        self.regions = {name: self._region(nodes.by_name[name]) for name in self._holding()}
        for made, backward in self.backward.items():
            if made[0] in self.runs or (not backward and self._names(made)):
                self.saved[made] = self._save(made, bool(backward))

    def made_again(self, solution: Solution) -> list[str]:
        """The nodes that run again."""
        return [name for name, variable in self.runs.items() if solution.takes(variable)]

    def in_regions(self, solution: Solution) -> list[str]:
        """The nodes of which no more than what they hold inside is made again."""
        found = (name for name, variable in self.regions.items() if solution.takes(variable))
        return [name for name in found if not solution.takes(self.runs[name])]

    def add_edge(self, edge: Edge, flows: Mapping[tuple[Layout, Layout], int]) -> None:
        """What is brought for the backward, or to a node that runs again, is brought again if it is not saved."""
        made = edge.node.name, edge.index
        if made not in self.saved or edge.maker.kind != "forward":
            return
        costs = {variable: self.linear.costs[variable] for variable in flows.values() if self.linear.costs[variable]}
        most = max(costs.values(), default=0.0)
        brought = {variable: -cost / most for variable, cost in costs.items()}
        names = [name for name in dict.fromkeys(read.node.name for read in edge.reads) if name in self.runs]
        readers = [{}] if self.backward[made] else [{self.runs[name]: -1.0} for name in names]
        for reader in readers if most else ():
            repeated = self.linear.variable(most)
            self.linear.row({repeated: 1.0, self.saved[made]: 1.0, **reader, **brought}, least=-1.0 if reader else 0.0)

    def _find_readers(self) -> None:
        """Of each result who reads it, forward and backward, but for what a loop carries."""
        self._elsewhere: set[Made] = set()
        graph = self.nodes.graph
        kept = set(graph.outputs) | {t for loop in graph.loops.values() for c in loop.carries for t in (c.init, c.out)}
        for op in graph.ops:
            for index, tensor in enumerate(op.outputs if op.kind == "forward" and op.path in self.nodes.of_op else ()):
                made = self.nodes.of_op[op.path].name, index
                self.forward.setdefault(made, [])
                self.backward.setdefault(made, [])
                if tensor in kept:
                    self._elsewhere.add(made)
        for op in graph.ops:
            if op.kind == "update":
                continue
            for tensor in op.inputs:
                source = self.flows.source(tensor)
                maker = graph.producer.get(source.tensor)
                if maker is None or maker.path not in self.nodes.of_op or maker.kind != "forward":
                    continue
                made = self.nodes.of_op[maker.path].name, maker.outputs.index(source.tensor)
                forward = source_of(op)
                is_beside = forward.loop == maker.loop and not source.carried and self._layer(forward) == self._layer(maker)
                if not is_beside or op.again is not None:
                    self._elsewhere.add(made)
                (self.forward if op.kind == "forward" else self.backward)[made].append(op)

    def _layer(self, op: Op) -> str:
        """Which of equal layers that are written out an op is of."""
        folded = self.nodes.folded
        if op.path in folded.counts:
            return "between"
        return "an end" if op.path in folded.alike else ""

    def _may(self, node: Node) -> bool:
        """Whether a node may run again: gradients flow through it, and it is nobody's region yet."""
        op = node.op
        able = op.kind == "forward" and op.backward is not None and not op.remat
        return able and all((node.name, index) not in self._elsewhere for index in range(len(op.outputs)))

    def _run(self, node: Node) -> int:
        """Whether a node runs again, which costs what its choice does."""
        runs = self.linear.variable(whole=True)
        each = {}
        for choice, variable in zip(node.choices, self.takes[node.name], strict=True):
            cost = sum(self.seconds.without_saving(op, self.nodes.parts(op, choice)) for op in node.ops)
            own = self.linear.variable(cost)
            self.linear.row({own: 1.0, variable: -1.0}, most=0.0)
            each[own] = 1.0
        self.linear.row({**each, runs: -1.0}, 0.0, 0.0)
        return runs

    def _holding(self) -> list[str]:
        """The nodes that hold something inside from their forward to their backward."""
        program, tensors = self.seconds.program, {t.name for op in self.nodes.graph.ops for t in op.outputs}
        crossing = (one for one in program.buffers if one.first < program.front <= one.last and not one.in_loop)
        inside = (self.nodes.of_op.get(one.op) for one in crossing if one.tensor not in tensors)
        return [node.name for node in dict.fromkeys(inside) if node is not None and node.name in self.runs]

    def _region(self, node: Node) -> int:
        """Whether a node is in a region: it is, if something that it reads is made again."""
        region, runs = self.linear.variable(whole=True), self.runs[node.name]
        self.saved[node.name, INSIDE] = saved = self.linear.variable()
        self.linear.row({saved: 1.0, region: 1.0}, least=1.0)
        for made, readers in self.forward.items():
            if made[0] in self.runs and any(self.nodes.of_op.get(op.path) is node for op in readers):
                self.linear.row({region: 1.0, self.runs[made[0]]: -1.0}, least=0.0)
        for choice, variable in zip(node.choices, self.takes[node.name], strict=True):
            paid = self.linear.variable(sum(self.seconds.inside(op, self.nodes.parts(op, choice)) for op in node.ops))
            self.linear.row({paid: 1.0, region: -1.0, runs: 1.0, variable: -1.0}, least=-1.0)
        return region

    def _save(self, made: Made, needed: bool) -> int:
        """Whether a result is saved: if it is needed, and not made again."""
        saved = self.linear.variable()
        maker = {self.runs[made[0]]: 1.0} if made[0] in self.runs else {}
        if needed:
            self.linear.row({saved: 1.0, **maker}, least=1.0)
        for name in self._names(made):
            if name != made[0]:
                self.linear.row({saved: 1.0, **maker, self.runs[name]: -1.0}, least=0.0)
        return saved

    def _names(self, made: Made) -> list[str]:
        """The nodes that read a result in the forward pass, and may run again."""
        readers = (self.nodes.of_op[op.path].name for op in self.forward[made] if op.path in self.nodes.of_op)
        return [name for name in dict.fromkeys(readers) if name in self.runs]

    def unless_saved(self, made: Made, parts: Mapping[int, float], stack: str, slice: PTensor | None) -> dict[int, float]:
        """By new variables the part of a result that is not held where it is not saved, of each choice of how it lies.

        Args:
            parts: by variable of a choice the part that a device has.
            stack: the name of what a loop saves; "" outside of loops.
            slice: the result, as its op makes it.
        """
        found = {}
        for part, variables in grouped((part, variable) for variable, part in parts.items()).items():
            key = made, part, stack
            if key not in self._unless:
                rebate = self.linear.variable(
                    -self.seconds.saving(stack, slice, part) if stack and slice is not None else 0.0
                )
                self.linear.row({rebate: 1.0, **dict.fromkeys(variables, -1.0)}, most=0.0)
                self.linear.row({rebate: 1.0, self.saved[made]: 1.0}, most=1.0)
                self._unless[key] = rebate
            found[self._unless[key]] = part
        return found
