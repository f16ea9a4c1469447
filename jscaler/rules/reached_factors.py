"""How far a dim of an input reaches through the dataflow: the answer to ``graph.factor_of``."""

from collections.abc import Iterable, Iterator, Mapping

from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.walk import closure

_End = tuple[Op, int, tuple[str, ...]]  # an op, which of its tensors it is, and the names of all of them


def reached_factors(graph: Graph, tensor: PTensor, dim: int) -> dict[Op, str]:
    """For every op that dim ``dim`` of ``tensor`` reaches, forwards or backwards along the dataflow, its factor.

    A dim that an op refines is followed on its major sub-dim, where a contiguous part of the dim lies, or if that is
    blocked on the first that is not: of a flat (3 h k), which attention takes apart, on the heads. Of several factors
    the one that comes first in the rule is given.
    """
    by_op = all_reached_factors(graph, [(tensor, dim)])
    return {op: _first(graph, op, by_op[op]) for op in sorted(by_op, key=lambda op: graph.position[op.path])}


def all_reached_factors(graph: Graph, dims: Iterable[tuple[PTensor, int]]) -> dict[Op, set[str]]:
    """For every op that some of ``dims`` reach all the factors that they are there."""
    by_op: dict[Op, set[str]] = {}
    ends, linked = _ends(graph)

    def onward(at: tuple[str, int]) -> Iterator[tuple[str, int]]:
        here, place = at
        for op, number, names in ends.get(here, ()):
            rule = graph.rule(op)
            factor = rule.followed.get((number, place))
            if factor is not None and factor not in by_op.setdefault(op, set()):
                by_op[op].add(factor)
                yield from [(names[i], dim) for i, dim in rule.places[factor]]
        for other, shift in linked.get(here, ()):  # into loops and out of them; the dim of iterations stays outside
            if place + shift >= 0:
                yield other, place + shift

    for _ in closure([(tensor.name, dim) for tensor, dim in dims], onward):
        pass
    return {op: factors for op, factors in by_op.items() if factors}


def _ends(graph: Graph) -> tuple[Mapping[str, list[_End]], Mapping[str, list[tuple[str, int]]]]:
    """By the name of a tensor, which is looked up all the time: where ops read or make it, and `Graph.linked`."""
    key, memo = "ends by name", graph.memo
    if key not in memo:
        ends: dict[str, list[_End]] = {}
        for op in graph.ops:
            names = tuple(tensor.name for tensor in (*op.inputs, *op.outputs))
            for number, name in enumerate(names):
                ends.setdefault(name, []).append((op, number, names))
        linked = {t.name: [(other.name, shift) for other, shift in others] for t, others in graph.linked.items()}
        memo[key] = ends, linked
    found: tuple[Mapping[str, list[_End]], Mapping[str, list[tuple[str, int]]]] = memo[key]
    return found


def _first(graph: Graph, op: Op, names: set[str]) -> str:
    return next(name for name in graph.rule(op).factors if name in names)
