"""Experts' kernels, found by the dataflow: each slice of theirs works on tokens that were sent to it.

    tokens [g, s, d] ──► dispatch: sum over s, or rows picked ──► [e, …, d] ──► kernel [e, d, f] ──► [e, …, f] ──► …

The number of experts is a dim of both operands of a kernel's product and of its result, and the tokens come from an op that
takes rows by it: a product of activations, or a look-up. Heads of attention, or blocks of a kernel, have no such op.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jscaler.errors import PlanError
from jscaler.ir import Op, PTensor
from jscaler.ir.walk import closure
from jscaler.plans.attention import holds_contraction
from jscaler.plans.column_row_pairs import products_of, weights_of
from jscaler.primitives import Planner


@dataclass(frozen=True)
class ExpertKernel:
    """A kernel of experts: the dim that counts them, and that of their hidden units."""

    tensor: PTensor
    expert: int
    hidden: int


@dataclass(frozen=True)
class _Slices(ExpertKernel):
    """A kernel of whose slices each has activations of its own in ``op``; ``sent``: which it got from a dispatch."""

    op: Op
    sent: bool


def find_experts(graph: Planner, remedy: str) -> list[ExpertKernel]:
    """The kernels of all experts that make hidden units, in the order of the inputs: the first, gates beside them.

    Raises:
        PlanError: there are none.
    """
    weights = weights_of(graph)
    kernels = [t for t in graph.inputs if t in weights and len(t.shape) > 2]
    every = [found for t in kernels for found in _slices(graph, t, weights)]
    own = {op for kernel in every if kernel.sent for op in graph.factor_of(kernel.tensor.name, kernel.expert)}
    found: list[ExpertKernel] = [kernel for kernel in every if own.issuperset(_forward(graph, kernel))]
    if not found:
        names = ", ".join(map(str, kernels)) or "none"
        raise PlanError(
            "no kernel has experts, a dim of its own and of tokens that were sent to each (by a product, or as rows that "
            f"are looked up): {remedy}; kernels of three dims and more: {names}"
        )
    return found


def _forward(graph: Planner, kernel: ExpertKernel) -> list[Op]:
    """Where hidden units are, or those of a last kernel: everywhere."""
    return [op for op in graph.factor_of(kernel.tensor.name, kernel.hidden) if op.kind == "forward"]


def _slices(graph: Planner, kernel: PTensor, weights: set[PTensor]) -> Iterator[_Slices]:
    """``kernel`` at its first product with activations that have a dim in common with it, and with the result."""
    for op in (graph.by_path[path] for path in products_of(graph, kernel, weights)):
        common = _common(graph, op, weights)
        if not common:
            continue
        factors = [graph.factor_of(kernel.name, d).get(op, "") for d in range(len(kernel.shape))]
        left = [d for d, own in enumerate(factors) if _is_left(graph, op, own)]
        expert, hidden = [d for d in left if factors[d] in common], [d for d in left if factors[d] not in common]
        if expert and hidden:
            name = factors[expert[0]]
            sent = _takes_rows(graph, op, name, op.outputs, weights)
            sent = sent or any(_was_sent(graph, *place, weights) for place in common[name])
            yield _Slices(kernel, expert[0], hidden[-1], op, sent)
            return


def _common(graph: Planner, op: Op, weights: set[PTensor]) -> dict[str, list[tuple[PTensor, int]]]:
    """Factors that activations have in common with a kernel of three dims and more and a result, and their dims there."""
    operands = list(zip(op.inputs, graph.rule(op).operands, strict=True))
    of_kernels = {n for t, dims in operands if t in weights and len(dims) > 2 for names in dims for n in names}
    found: dict[str, list[tuple[PTensor, int]]] = {}
    for tensor, dims in operands:
        for dim, names in enumerate(dims if tensor not in weights else ()):
            if names and names[0] in of_kernels and _is_left(graph, op, names[0]):
                found.setdefault(names[0], []).append((tensor, dim))
    return found


def _is_left(graph: Planner, op: Op, name: str) -> bool:
    """Whether the factor is one of a result, and may be split, maybe behind a cut."""
    rule = graph.rule(op)
    return any(name in names for dims in rule.results for names in dims) and rule.factors[name].splittable


def _was_sent(graph: Planner, tensor: PTensor, dim: int, weights: set[PTensor]) -> bool:
    """Whether an op that takes rows has left ``dim`` of ``tensor``, or of what it was made of element by element."""

    def made_of(place: tuple[PTensor, int]) -> list[tuple[PTensor, int]]:
        op = graph.producer.get(place[0])
        if op is None or holds_contraction(op) or _picks(op):
            return []
        name = _name(graph, op, *place)
        operands = zip(op.inputs, graph.rule(op).operands, strict=True)
        return [(t, d) for t, dims in operands for d, names in enumerate(dims) if name and name in names]

    made = ((graph.producer.get(t), t, d) for t, d in closure([(tensor, dim)], made_of))
    return any(op is not None and _takes_rows(graph, op, _name(graph, op, t, d), [t], weights) for op, t, d in made)


def _takes_rows(graph: Planner, op: Op, name: str, made: Sequence[PTensor], weights: set[PTensor]) -> bool:
    """Whether ``op`` makes its results ``made`` of rows of something without the factor ``name``: by a product of
    activations, or by a look-up, whatever is done to these rows in it."""
    if not (_picks(op) or (holds_contraction(op) and not any(t in weights for t in op.inputs if t.shape))):
        return False
    rule = graph.rule(op)
    operands = [(t, {n for names in dims for n in names}) for t, dims in zip(op.inputs, rule.operands, strict=True)]
    kept = {n for t, dims in zip(op.outputs, rule.results, strict=True) if t in made for names in dims for n in names}
    kept = kept.union(*(own for t, own in operands if t in weights))
    return any(name not in own and not own <= kept for t, own in operands if t not in weights)


def _name(graph: Planner, op: Op, tensor: PTensor, dim: int) -> str:
    """The factor of ``op`` that ``dim`` of its result is; empty where it has none."""
    return next(iter(graph.rule(op).results[op.outputs.index(tensor)][dim]), "")


def _picks(op: Op) -> bool:
    """Whether rows are looked up in it, or put where whole numbers say."""
    names = {e.primitive.name for e in op.body.jaxpr.eqns} if op.body is not None else set()
    return any(name.startswith(("gather", "scatter")) for name in names)
