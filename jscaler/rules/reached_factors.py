"""How far a dim of an input reaches through the dataflow: the answer to ``graph.factor_of``."""

from collections.abc import Iterable, Iterator, Mapping

from jscaler.ir import Graph, Op, PTensor, Rule
from jscaler.ir.rule import SubDim
from jscaler.ir.walk import closure


def reached_factors(graph: Graph, tensor: PTensor, dim: int) -> dict[Op, str]:
    """For every op that dim ``dim`` of ``tensor`` reaches, forwards or backwards along the dataflow, its factor.

    A dim that an op refines is followed on its major sub-dim, where a contiguous part of the dim lies, or if that is
    blocked on the first that is not: of a flat (3 h k), which attention takes apart, on the heads. A minor sub-dim (of two
    views behind one another, the rows) is followed to where ops tell it apart. Behind gradients no dim is followed through
    an op that needs all of it: the norm of all gradients as one vector. The first factor in the rule is given where there
    are several.
    """
    by_op = all_reached_factors(graph, [(tensor, dim)])
    return {op: _first(graph, op, by_op[op]) for op in sorted(by_op, key=lambda op: graph.position[op.path])}


def all_reached_factors(
    graph: Graph, dims: Iterable[tuple[PTensor, int]], taken: Mapping[Op, Mapping[str, int]] | None = None
) -> dict[Op, set[str]]:
    """For every op that some of ``dims`` reach all the factors that they are there.

    Args:
        taken: by op and factor, the parts into which it is split already. A dim is followed on what they leave of it: the
            first sub-dim that can be split further.
    """
    by_op: dict[Op, set[str]] = {}
    ends = _behind_gradients(graph)

    def onward(at: tuple[PTensor, SubDim]) -> Iterator[tuple[PTensor, SubDim]]:
        here, place = at
        producer = graph.producer.get(here)
        readers = graph.consumers.get(here, ())
        for op in (*readers, *((producer,) if producer else ())):
            tensors = *op.inputs, *op.outputs
            for number in [i for i, tensor in enumerate(tensors) if tensor.name == here.name]:
                own = place._replace(tensor=number)
                rule = graph.rule(op)
                factor, places = (rule.at(own), rule.places) if taken is None else _left(rule, own, taken.get(op, {}))
                if factor is not None and factor not in by_op.setdefault(op, set()):
                    by_op[op].add(factor)
                    if op in ends and _beside_blocked(rule, factor):
                        continue
                    yield from ((tensors[p.tensor], p._replace(tensor=0)) for p in places.get(factor, ()))
        for other, shift in graph.flow.linked.get(here, ()):  # in and around loops; the dim of iterations stays outside
            if place.dim + shift >= 0:
                yield other, place._replace(dim=place.dim + shift)

    for _ in closure([(tensor, SubDim(0, dim)) for tensor, dim in dims], onward):
        pass
    return {op: factors for op, factors in by_op.items() if factors}


def _behind_gradients(graph: Graph) -> set[Op]:
    """The updates that read gradients, or what is made of them."""
    key = "behind gradients"
    if key not in graph.memo:
        made = closure((g for call in graph.calls for g in call.gradients), graph.flow.targets)
        graph.memo[key] = {op for t in made for op in graph.consumers.get(t, ()) if op.kind == "update"}
    return graph.memo[key]


def _beside_blocked(rule: Rule, factor: str) -> bool:
    """Whether some dim that ``factor`` is, or is a part of, is needed whole."""
    dims = (*rule.operands, *rule.results)
    names = {name for place in rule.places.get(factor, ()) for name in dims[place.tensor][place.dim]}
    return not all(rule.factors[name].splittable for name in names)


def _left(rule: Rule, place: SubDim, taken: Mapping[str, int]) -> tuple[str | None, Mapping[str, list[SubDim]]]:
    """The factor on which a dim is followed behind those that are ``taken``; and the dims that are followed on each."""
    places: dict[str, list[SubDim]] = {}
    for number, dims in enumerate((*rule.operands, *rule.results)):
        for dim, names in enumerate(dims):
            factors = (rule.factors[name] for name in names)
            left = next((f.name for f in factors if f.splittable and f.size > taken.get(f.name, 1)), None)
            if left is not None:
                places.setdefault(left, []).append(SubDim(number, dim))
    here = SubDim(place.tensor, place.dim)
    return next((name for name, own in places.items() if here in own), None), places


def _first(graph: Graph, op: Op, names: set[str]) -> str:
    return next(name for name in graph.rule(op).factors if name in names)
