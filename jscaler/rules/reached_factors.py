"""How far a dim of an input reaches through the dataflow: the answer to ``graph.factor_of``."""

from collections.abc import Iterable, Iterator

from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.rule import SubDim
from jscaler.ir.walk import closure


def reached_factors(graph: Graph, tensor: PTensor, dim: int) -> dict[Op, str]:
    """For every op that dim ``dim`` of ``tensor`` reaches, forwards or backwards along the dataflow, its factor.

    A dim that an op refines is followed on its major sub-dim, where a contiguous part of the dim lies, or if that is
    blocked on the first that is not: of a flat (3 h k), which attention takes apart, on the heads. A minor sub-dim (of two
    views behind one another, the rows) is followed to where ops tell it apart. Of several factors the one that comes first
    in the rule is given.
    """
    by_op = all_reached_factors(graph, [(tensor, dim)])
    return {op: _first(graph, op, by_op[op]) for op in sorted(by_op, key=lambda op: graph.position[op.path])}


def all_reached_factors(graph: Graph, dims: Iterable[tuple[PTensor, int]]) -> dict[Op, set[str]]:
    """For every op that some of ``dims`` reach all the factors that they are there."""
    by_op: dict[Op, set[str]] = {}

    def onward(at: tuple[PTensor, SubDim]) -> Iterator[tuple[PTensor, SubDim]]:
        here, place = at
        producer = graph.producer.get(here)
        readers = graph.consumers.get(here, ())
        for op in (*readers, *((producer,) if producer else ())):
            rule, tensors = graph.rule(op), (*op.inputs, *op.outputs)
            for number in [i for i, tensor in enumerate(tensors) if tensor.name == here.name]:
                factor = rule.at(place._replace(tensor=number))
                if factor is not None and factor not in by_op.setdefault(op, set()):
                    by_op[op].add(factor)
                    yield from ((tensors[p.tensor], p._replace(tensor=0)) for p in rule.places[factor])
        for other, shift in graph.flow.linked.get(here, ()):  # in and around loops; the dim of iterations stays outside
            if place.dim + shift >= 0:
                yield other, place._replace(dim=place.dim + shift)

    for _ in closure([(tensor, SubDim(0, dim)) for tensor, dim in dims], onward):
        pass
    return {op: factors for op, factors in by_op.items() if factors}


def _first(graph: Graph, op: Op, names: set[str]) -> str:
    return next(name for name in graph.rule(op).factors if name in names)
