"""What a tensor is to a training step: a parameter, its gradient, optimizer state, an input, or an activation."""

from collections.abc import Mapping
from typing import Literal

from jscaler.ir.graph import Graph
from jscaler.ir.tensor import PTensor

TensorKind = Literal["parameter", "gradient", "optimizer", "input", "activation"]


def tensor_kinds(graph: Graph) -> Mapping[PTensor, TensorKind]:
    """The kind of every input, constant and gradient of ``graph``; a tensor that is not listed is an activation.

    A parameter is an input leaf that a gradient is taken with respect to, also through a cast (master weights). All other
    state that the step updates is the optimizer's, batch statistics and step counters included; the rest of the inputs
    (a batch, a key) and constants are inputs.
    """
    inputs = frozenset(graph.inputs)
    kinds: dict[PTensor, TensorKind] = dict.fromkeys((*graph.inputs, *(c for c, _ in graph.constants)), "input")
    kinds.update({graph.inputs[i]: "optimizer" for i in graph.next_version.values()})
    for call in graph.calls:
        for tensor in call.wrt:
            kinds.update(dict.fromkeys(origins(graph, tensor) & inputs, "parameter"))
        kinds.update(dict.fromkeys((g for g in call.gradients if g not in inputs), "gradient"))
    return kinds


def origins(graph: Graph, tensor: PTensor) -> frozenset[PTensor]:
    """The tensor, or what ops without a contraction (casts, scalings) made it from: tensors of its shape."""
    found, todo = set[PTensor](), [tensor]
    while todo:
        one = todo.pop()
        if one in found:
            continue
        found.add(one)
        maker = graph.producer.get(one)
        todo += [t for t in (maker.inputs if maker else ()) if t.shape == one.shape]
    return frozenset(found)
