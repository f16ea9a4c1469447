"""The cores of attention in a graph: what lies between a product of two activations and the next, with a softmax in it."""

from collections.abc import Iterable, Sequence
from typing import Any

from jscaler.errors import PlanError
from jscaler.ir import Op
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.loop import chain_of, made_by, reads_of
from jscaler.ir.walk import closure, dependents
from jscaler.lax_primitives import contracts
from jscaler.primitives import Planner

Ops = tuple[Op, ...]


def find_cores(graph: Planner, on: Sequence[str] | None = None) -> tuple[Ops, ...]:
    """The ops of each core, from the product of queries and keys to the product with the values.

    Args:
        on: paths or shell patterns of ops that are cores instead, those of one module and one loop together.

    Raises:
        UnknownNameError: no op is called so.
        PlanError: there is no core.
    """
    if on is not None:
        groups: dict[Any, list[Op]] = {}
        for op in dict.fromkeys(op for pattern in on for op in graph.select(pattern)):
            groups.setdefault((op.call, op.loop, op.path.rpartition("/")[0]), []).append(op)
        return tuple(map(tuple, groups.values()))
    cores = cores_of(graph)
    if not cores:
        raise PlanError(
            "no softmax between two products of activations is in the graph: a fused attention (a kernel, a user's op) "
            "keeps none of its inside; for another core, name its ops (on=...)"
        )
    return cores


def cores_of(graph: Planner, every: bool = False) -> tuple[Ops, ...]:
    """The ops of each core that the dataflow shows; of a training step those with a gradient, or ``every``."""
    every = every or not graph.calls

    def found() -> tuple[Ops, ...]:
        finder = _Finder(graph)
        softmaxes = [op for op in graph.forward() if _normalises(op) and (every or op.backward is not None)]
        return tuple(dict.fromkeys(core for op in softmaxes for core in finder.around(op)))

    return graph.graph.once(("cores", every), found)


class _Finder:
    def __init__(self, graph: Planner):
        self.graph = graph
        kinds = tensor_kinds(graph.graph)
        self.weights = {t for t, kind in kinds.items() if kind == "parameter"}
        loops = dict(graph.loops)
        for op in graph.forward():
            for name in chain_of(op.loop, graph.loops):  # whose stacks an op in front may have taken apart
                if loop := loops.pop(name, None):
                    self.weights |= {x.slice for x in loop.xs if x.stack in self.weights}
            large = [t for t in op.inputs if t.shape]
            if large and all(t in self.weights for t in large):
                self.weights.update(op.outputs)

    def around(self, softmax: Op) -> list[Ops]:
        """The core that ``softmax`` is in; none if no products of activations are on both sides."""
        graph, same = self.graph, (softmax.call, softmax.loop)

        def beside(ops: Iterable[Op | None]) -> list[Op]:
            return [op for op in ops if op is not None and op.kind == "forward" and (op.call, op.loop) == same]

        def readers(op: Op) -> list[Op]:
            return [] if holds_contraction(op) else beside(r for t in op.outputs for r in graph.consumers.get(t, ()))

        def makers(op: Op) -> list[Op]:
            return [] if holds_contraction(op) and op is not softmax else beside(map(graph.producer.get, op.inputs))

        # both up to the first contractions
        below, above = (self._in_order(closure([softmax], onward)) for onward in (readers, makers))
        mixes = [op for op in below if self._mixes(op)]
        scores = [op for op in above if self._mixes(op) and op is not softmax]
        if not mixes or not scores:
            return []
        own = {*dependents(below[::-1], mixes, made_by, reads_of), *dependents(above, scores, reads_of, made_by)}
        return [tuple(self._in_order(own))]

    def _in_order(self, ops: Iterable[Op]) -> list[Op]:
        return sorted(ops, key=lambda op: self.graph.position[op.path])

    def _mixes(self, op: Op) -> bool:
        """Whether it is a product of activations; not of an activation and a kernel."""
        return holds_contraction(op) and not any(t in self.weights for t in op.inputs if t.shape)


def holds_contraction(op: Op) -> bool:
    """Whether a contraction is in it."""
    return op.body is not None and contracts(op.body.jaxpr.eqns)


def _normalises(op: Op) -> bool:
    """Whether it has what a softmax is made of: exponentials, their sum, and a quotient."""
    names = {e.primitive.name for e in op.body.jaxpr.eqns} if op.body is not None else set()
    return {"exp", "reduce_sum", "div"} <= names
