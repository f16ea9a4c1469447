"""What a tensor is to a training step: a parameter, its gradient, optimizer state, an input, or an activation."""

from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp

from jscaler.ir.graph import Graph
from jscaler.ir.tensor import PTensor
from jscaler.ir.walk import closure

TensorKind = Literal["parameter", "gradient", "optimizer", "input", "activation"]


def tensor_kinds(graph: Graph) -> Mapping[PTensor, TensorKind]:
    """The kind of every input, constant and gradient of ``graph``; a tensor that is not listed is an activation.

    A parameter is an input leaf that a gradient is taken with respect to, also through a cast (master weights), or state of
    floating-point numbers that a loss reads and the step returns as it came (a frozen layer). All other state is the
    optimizer's, batch statistics and step counters included; the rest of the inputs (a batch, a key) and constants are
    inputs.
    """
    if "tensor kinds" not in graph.memo:
        graph.memo["tensor kinds"] = _kinds(graph)
    return graph.memo["tensor kinds"]


def _kinds(graph: Graph) -> dict[PTensor, TensorKind]:
    inputs = frozenset(graph.inputs)
    kinds: dict[PTensor, TensorKind] = dict.fromkeys((*graph.inputs, *(c for c, _ in graph.constants)), "input")
    kinds.update({graph.inputs[i]: "optimizer" for i in graph.next_version.values()})
    for call in graph.calls:
        for tensor in call.wrt:
            kinds.update(dict.fromkeys(origins(graph, _one_row(graph, tensor)) & inputs, "parameter"))
        kinds.update(dict.fromkeys((g for g in call.gradients if g not in inputs), "gradient"))
    kinds.update(dict.fromkeys(_frozen(graph), "parameter"))
    return kinds


def learned(graph: Graph) -> frozenset[PTensor]:
    """Parameters, and arrays of state in floating point: moments, statistics.

    Keys, counters and scalars of the state are none. What is made of them and of data costs little, and is made wherever it
    is needed.
    """
    state = (graph.inputs[i] for i in graph.next_version.values())
    arrays = (t for t in state if t.shape and jnp.issubdtype(t.dtype, jnp.inexact))
    return frozenset((*arrays, *(t for call in graph.calls for t in call.wrt)))


def _frozen(graph: Graph) -> list[PTensor]:
    """State that is read by a loss and never changed."""
    kept = [graph.inputs[i] for o, i in graph.next_version.items() if graph.outputs[o] is graph.inputs[i]]
    floating = [t for t in kept if t.shape and jnp.issubdtype(t.dtype, jnp.inexact)]
    return [t for t in floating if read_by_a_loss(graph, t)] if graph.calls else []


def read_by_a_loss(graph: Graph, tensor: PTensor) -> bool:
    """Whether a forward op reads ``tensor``, or what a loop takes of it."""
    return any(op.kind == "forward" for t in (tensor, *graph.flow.neighbours(tensor)) for op in graph.consumers.get(t, ()))


def gradient_parts(graph: Graph, gradient: PTensor) -> list[PTensor]:
    """What a join adds up to a gradient, and what loops hand on of it: gradients, too."""
    maker = graph.producer.get(gradient)
    is_sum = maker is not None and maker.kind == "backward" and maker.forward is None
    parts = [t for t in maker.inputs if t.role == "gradient"] if maker is not None and is_sum else []
    return [*parts, *graph.flow.neighbours(gradient)]


def _one_row(graph: Graph, tensor: PTensor) -> PTensor:
    """What is repeated in ``tensor`` for each row of a ``jax.vmap`` over a gradient; else the tensor itself."""
    maker = graph.producer.get(tensor)
    large = [t for t in (maker.inputs if maker else ()) if t.shape]
    return _one_row(graph, large[0]) if len(large) == 1 and large[0].shape == tensor.shape[1:] else tensor


def origins(graph: Graph, tensor: PTensor) -> frozenset[PTensor]:
    """The tensor, or what ops without a contraction (casts, scalings) made it from: tensors of its shape."""

    def sources(made: PTensor) -> list[PTensor]:
        maker = graph.producer.get(made)
        return [t for t in (maker.inputs if maker else ()) if t.shape == made.shape]

    return frozenset(closure([tensor], sources))
