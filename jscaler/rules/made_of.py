"""What a step makes of parameters alone: casts, slices and transposes of them, and the dim that a cut becomes there.

kernel f32 (8·d, f) ──► cast ──► bf16 (8·d, f) ──► contraction with activations
   cut on dim 0                 cut on dim 0         wants it whole
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jscaler.ir import Graph, Op, PTensor


@dataclass(frozen=True)
class MadeOf:
    """Tensors that are made of some inputs alone, element by element along one dim.

    Attributes:
        dims: tensor -> the input that it comes from, and the dim that the input's dim is there. The inputs are among them.
        factors: op path -> the input, and the factor that its dim is in the op.
    """

    dims: dict[PTensor, tuple[PTensor, int]] = field(default_factory=dict)
    factors: dict[str, tuple[PTensor, str]] = field(default_factory=dict)


def made_of(graph: Graph, leaves: Mapping[PTensor, int]) -> MadeOf:
    """What the ops outside of backward passes make of ``leaves`` alone, following the dims that are given.

    What is put together for all micro-batches lies whole, and what is made of that does not count.
    """
    found = MadeOf({t: (t, dim) for t, dim in leaves.items()})
    for tensor in leaves:
        _into_loops(graph, found, tensor)
    for op in graph.ops:
        large = [t for t in op.inputs if t.shape]
        if op.kind == "backward" or op.again or op.joins_shards or not large or not all(t in found.dims for t in large):
            continue
        leaf, dim = found.dims[large[0]]
        rule = graph.rule(op)
        names = rule.operands[op.inputs.index(large[0])][dim]
        if not names or rule.factors[names[0]].kind != "parallel" or not _wholly(op, found, names[0], graph):
            continue
        found.factors[op.path] = (leaf, names[0])
        for tensor, dims in zip(op.outputs, rule.results, strict=True):
            for place, carried in enumerate(dims):
                if carried[:1] == names[:1]:
                    found.dims[tensor] = (leaf, place)
                    _into_loops(graph, found, tensor)
    return found


def _wholly(op: Op, found: MadeOf, factor: str, graph: Graph) -> bool:
    """Whether all that ``op`` reads is cut along ``factor``."""
    operands = zip(op.inputs, graph.rule(op).operands, strict=True)
    return all(dims[found.dims[t][1]][:1] == (factor,) for t, dims in operands if t.shape)


def _into_loops(graph: Graph, found: MadeOf, tensor: PTensor) -> None:
    """A slice of a stack is what the stack is, a dim less."""
    leaf, dim = found.dims[tensor]
    for piece in graph.flow.targets(tensor, "slice") if dim > 0 else ():
        found.dims[piece] = (leaf, dim - 1)
        _into_loops(graph, found, piece)
