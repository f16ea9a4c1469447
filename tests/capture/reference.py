"""The obvious meaning of a graph: its ops, one after another, on whole tensors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate
from jscaler.capture.residuals import with_backward_bodies
from jscaler.ir import Graph, PTensor


def graph_of(step: Callable[..., Any], *args: Any) -> Graph:
    return jscaler.parallelize("single", devices=1)(step).graph(*args)


def interpret(graph: Graph, leaves: Any) -> list[Any]:
    """The graph's outputs. An op that reads what no earlier op wrote is an error: the order is wrong."""
    values: dict[PTensor, Any] = dict(zip(graph.inputs, leaves, strict=True))
    values |= dict(graph.constants)
    for op in with_backward_bodies(graph, BodyTable()).ops:
        assert op.body is not None, f"{op.path} has no body"
        for tensor in op.inputs:
            assert tensor in values, f"{op.path} reads {tensor}, which nothing before it writes"
        results = evaluate(op.body.jaxpr, [values[t] for t in op.inputs])
        for tensor, value in zip(op.outputs, map(jnp.asarray, results), strict=True):
            assert tensor not in values, f"{op.path} writes {tensor} a second time"
            assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype), f"{op.path} writes {value.aval} to {tensor}"
            values[tensor] = value
    return [values[t] for t in graph.outputs]


def check_graph(step: Callable[..., Any], *args: Any, tolerance: float = 2e-5) -> Graph:
    """Assert that the captured graph of ``step`` computes what ``jax.jit(step)`` does; returns the graph."""
    graph = graph_of(step, *args)
    expected, tree = jax.tree.flatten(jax.jit(step)(*args))
    assert tree.num_leaves == len(graph.outputs)
    found = interpret(graph, jax.tree.leaves(args))
    for name, a, b in zip(graph.output_names, found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)
    return graph
