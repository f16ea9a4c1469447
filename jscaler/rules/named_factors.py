"""What factors are: the dim of the step's argument that they come from (``tokens[0]``), or of the parameter
(``up.kernel[1]``).

Dims of tensors and factors of ops that carry each other are one set, found in one walk over the graph; its name is that of
an argument that is no state if there is one, else of a parameter, and of several of the one that is read first.
"""

from collections.abc import Iterator, Mapping, Sequence

from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.name import without
from jscaler.ir.walk import Sets
from jscaler.text.folding import folded

Place = tuple[str, str | int]  # an op and its factor, or a tensor and its dim
KINDS = ("input", "parameter", "optimizer")


def named_factors(graph: Graph) -> Mapping[str, Mapping[str, str]]:
    """By op path and factor; what reaches no argument is left out."""
    sets: Sets[Place] = Sets()
    factors: dict[str, list[str]] = {}
    for op in graph.ops:
        rule = graph.rule(op) if op.body is not None else None  # asked of a handle, its rule might trace its body
        tensors = (*op.inputs, *op.outputs)
        for (number, dim), factor in rule.followed.items() if rule is not None else ():
            sets.join(("op " + op.path, factor), (tensors[number].name, dim))
        factors[op.path] = list(rule.factors) if rule is not None else []
    for one, other, shift in _alike(graph):
        for dim in range(max(0, -shift), len(one.shape)):
            sets.join((one.name, dim), (other.name, dim + shift))
    names = _names(graph, sets)
    found = {path: _of_op(path, own, sets, names) for path, own in factors.items()}
    handles = {op.path: found[op.forward.path] for op in graph.ops if op.body is None and op.forward is not None}
    return found | handles


def _of_op(path: str, factors: Sequence[str], sets: Sets[Place], names: Mapping[Place, str]) -> dict[str, str]:
    roots = {factor: sets.root(("op " + path, factor)) for factor in factors}
    return {factor: names[root] for factor, root in roots.items() if root in names}


def _alike(graph: Graph) -> Iterator[tuple[PTensor, PTensor, int]]:
    """Tensors of the same dims, and how far these shift: in loops and around them; tensors and their gradients."""
    for tensor, others in graph.flow.linked.items():
        yield from ((tensor, other, shift) for other, shift in others)
    pairs = [pair for call in graph.calls for pair in zip(call.wrt, call.gradients, strict=True)]
    for op in graph.ops:
        if op.body is None and op.forward is not None:
            pairs += [(op.forward.outputs[index], cotangent) for index, cotangent in op.cotangents]
            pairs += [(op.forward.inputs[i], own) for i, own in zip(op.gradients, op.outputs, strict=True)]
    yield from ((one, gradient, 0) for one, gradient in pairs if one.shape == gradient.shape)


def _names(graph: Graph, sets: Sets[Place]) -> dict[Place, str]:
    """By the root of a set, its name."""
    kinds, position, short = tensor_kinds(graph), graph.position, _short_names(graph)

    def rank(tensor: PTensor) -> tuple[int, int]:
        around = (tensor, *graph.flow.neighbours(tensor))
        readers = [position[op.path] for t in around for op in graph.consumers.get(t, ())[:1]]
        return KINDS.index(kinds[tensor]), min(readers, default=len(position))

    names: dict[Place, str] = {}
    for tensor in sorted(graph.inputs, key=rank):
        for dim in range(len(tensor.shape)):
            names.setdefault(sets.root((tensor.name, dim)), f"{short[tensor]}[{dim}]")
    return names


def _short_names(graph: Graph) -> dict[PTensor, str]:
    """The last parts of each input's path, as few as no other input of its kind has, layer numbers left out of account."""
    kinds = tensor_kinds(graph)
    paths = {t: folded(without(t.name, "layers")).split("/") for t in graph.inputs}
    ends: dict[tuple[str, str], set[str]] = {}
    for tensor, words in paths.items():
        for count in range(1, len(words) + 1):
            ends.setdefault((kinds[tensor], "/".join(words[-count:])), set()).add("/".join(words))

    def short(tensor: PTensor, words: list[str]) -> str:
        ways = ("/".join(words[-count:]) for count in range(1, len(words) + 1))
        found = next((way for way in ways if len(ends[kinds[tensor], way]) == 1 and way != "*"), "/".join(words))
        return found.replace("/", ".")

    return {tensor: short(tensor, words) for tensor, words in paths.items()}
