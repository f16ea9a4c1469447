"""``Owners``: what the parts of a planned step are of, in the step as it was captured.

A backward op, a clone and a piece are of their forward op; an update and the sums of a gradient of their parameter, and so
are an optimizer's moments. What the plan has added besides is of nothing (``ADDED``).
"""

from collections.abc import Iterable

from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.kinds import gradient_parts, origins
from jscaler.ir.name import general
from jscaler.ir.walk import closure
from jscaler.lower.step_plan import StepPlan
from jscaler.primitives.plan import Fuse

ADDED = "what the plan adds: slices and sums of parts, fences"


class Owners:
    """The owners of a captured step: its forward ops, its leaves, and what updates of no one leaf.

    Args:
        fused: what plans fuse: each is one owner, under a plan that does not, too.

    Attributes:
        leaves: those that are owners: all but an optimizer's of a parameter.
    """

    def __init__(self, captured: Graph, fused: Iterable[Fuse]):
        self._fused = {path: one.path for one in fused for path in one.ops}
        self._fused |= {path: path for path in self._fused.values()}
        self._of = _of_captured(captured)
        made = {i: captured.producer.get(captured.outputs[o]) for o, i in captured.next_version.items()}
        versions = {i: self._of[op.path] for i, op in made.items() if op is not None}
        names = {leaf.name for leaf in captured.inputs}
        found = {leaf.name: versions.get(i, "") for i, leaf in enumerate(captured.inputs)}
        self._of_leaf = {name: owner if owner in names else name for name, owner in found.items()}
        self.leaves = frozenset(self._of_leaf.values())

    def of_ops(self, step: StepPlan) -> dict[str, str]:
        """Path of each op of a planned step -> its owner."""
        parameters = _parameter_of(step.graph)
        whole = {general(piece): general(path) for path, pieces in step.pieces.items() for piece in pieces}
        found = {}
        for op in step.graph.ops:
            first = op
            while (before := first.again or first.forward) is not None:
                first = before
            path = general(first.path)
            path = self._of.get(whole.get(path, path)) or self._fused.get(path) or _parameter(op.outputs, parameters)
            found[op.path] = self._fused.get(path, path) or ADDED
        return found

    def of_tensors(self, step: StepPlan) -> dict[str, str]:
        """Name of each tensor that an op makes, or that a loop leaves of it -> its owner."""
        of, graph = self.of_ops(step), step.graph
        found: dict[str, str] = {t: of[op.path] for op in graph.ops for t in op.outputs}
        left = [t for loop in graph.loops.values() for t in loop.results]
        for tensor in left:
            behind = closure([tensor], lambda t: graph.flow.sources(t, "exit", "stack"))
            found[tensor] = next((found[t] for t in behind if t in found), ADDED)
        return found

    def of_leaf(self, step: StepPlan, leaf: PTensor) -> str:
        """Of an input of a planned step: the parameter, or itself."""
        name = leaf_name(step, leaf)
        return self._of_leaf.get(name, name)


def leaf_name(step: StepPlan, leaf: PTensor) -> str:
    """What an input of a planned step is called in the captured one: all parts and copies alike."""
    return general(step.graph.copy_of.get(leaf, leaf).name)


def _of_captured(graph: Graph) -> dict[str, str]:
    """Path of each op of a captured step -> its owner."""
    parameters = _parameter_of(graph)
    found: dict[str, str] = {}
    for op in graph.ops:
        if op.kind == "update" and (known := _parameter(op.inputs, parameters)):
            parameters.update((t, known) for t in op.outputs if t.shape)
            found[op.path] = known
        elif op.kind == "forward" or op.forward is not None:
            found[op.path] = op.path if op.forward is None else op.forward.path
    leaves = frozenset(parameters.values())
    for op in reversed(graph.ops):
        if op.path not in found:
            near = [found[path] for path in _around(graph, op) if path in found]
            known = _parameter(op.outputs, parameters) if op.kind == "backward" else _one(leaves & {*near}, len({*near}))
            found[op.path] = known or (near[0] if near and op.kind == "backward" else op.path)
    return found


def _around(graph: Graph, op: Op) -> list[str]:
    """The ops that read what one makes, also through loops; then those that make what a backward op reads."""
    made = [other for t in op.outputs for other in (t, *graph.flow.neighbours(t))]
    found = [reader.path for t in made for reader in graph.consumers.get(t, ())]
    return found + [graph.producer[t].path for t in op.inputs if t in graph.producer and op.kind == "backward"]


def _parameter(tensors: Iterable[PTensor], parameters: dict[PTensor, str]) -> str:
    """The one that all of ``tensors`` that are of a parameter are of."""
    found = {parameters[t] for t in tensors if t in parameters}
    return _one(found, len(found))


def _one(found: Iterable[str], count: int) -> str:
    return next(iter(found), "") if count == 1 else ""


def _parameter_of(graph: Graph) -> dict[PTensor, str]:
    """Parameters and their gradients, the parts of these too -> the parameter's name."""
    inputs = frozenset(graph.inputs)
    found: dict[PTensor, str] = {}
    for call in graph.calls:
        for tensor, gradient in zip(call.wrt, call.gradients, strict=True):
            leaves = sorted({tensor} & inputs or origins(graph, tensor) & inputs)
            if len(leaves) != 1 or gradient in inputs:
                continue
            name = general(graph.copy_of.get(leaves[0], leaves[0]).name)
            found.update(dict.fromkeys((tensor, leaves[0]), name))
            parts = closure([gradient], lambda t: [part for part in gradient_parts(graph, t) if part not in inputs])
            found.update(dict.fromkeys(parts, name))
    return found
