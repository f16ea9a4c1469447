"""The obvious meaning of a graph: its ops, one after another, on whole tensors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate
from jscaler.capture.recompute import recompute
from jscaler.capture.residuals import with_backward_bodies
from jscaler.capture.saved import thread_saved
from jscaler.ir import Graph, Nest, PTensor


def graph_of(step: Callable[..., Any], *args: Any) -> Graph:
    return jscaler.parallelize("single", devices=1)(step).graph(*args)


def interpret(graph: Graph, leaves: Any) -> list[Any]:
    """The graph's outputs. An op that reads what no earlier op wrote is an error: the order is wrong."""
    bodies = BodyTable()
    return interpret_ops(thread_saved(recompute(with_backward_bodies(graph, bodies), bodies)), leaves)


def interpret_ops(graph: Graph, leaves: Any) -> list[Any]:
    """The outputs of a graph all of whose ops have bodies, such as passes leave."""
    own = [t for t in graph.inputs if t not in graph.copy_of]
    values: dict[PTensor, Any] = dict(zip(own, leaves, strict=True))
    values |= {copy: values[t] for copy, t in graph.copy_of.items()} | dict(graph.constants)
    _run(graph.tree, values)
    return [values[t] for t in graph.outputs if t not in graph.copy_of]


def _run(items: Any, values: dict[PTensor, Any]) -> None:
    for item in items:
        if isinstance(item, Nest):
            _run_loop(item, values)
            continue
        op = item
        assert op.body is not None, f"{op.path} has no body"
        for tensor in op.inputs:
            assert tensor in values, f"{op.path} reads {tensor}, which nothing before it writes"
        results = evaluate(op.body.jaxpr, [values[t] for t in op.inputs])
        for tensor, value in zip(op.outputs, map(jnp.asarray, results), strict=True):
            assert tensor not in values, f"{op.path} writes {tensor} a second time"
            assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype), f"{op.path} writes {value.aval} to {tensor}"
            values[tensor] = value


def _run_loop(nest: Nest, values: dict[PTensor, Any]) -> None:
    """Iteration after iteration, written out."""
    loop = nest.loop
    carried = [values[c.init] for c in loop.carries]
    written: list[Any] = [[None] * loop.length for _ in loop.ys]
    for index in reversed(range(loop.length)) if loop.reverse else range(loop.length):
        inner = {**values, **{x.slice: values[x.stack][index] for x in loop.xs}}
        inner |= {c.inside: value for c, value in zip(loop.carries, carried, strict=True)}
        _run(nest.items, inner)
        carried = [inner[c.out] for c in loop.carries]
        for y, slices in zip(loop.ys, written, strict=True):
            slices[index] = inner[y.slice]
    values |= {c.final: value for c, value in zip(loop.carries, carried, strict=True)}
    values |= {y.stack: jnp.stack(slices) for y, slices in zip(loop.ys, written, strict=True)}


def check_graph(step: Callable[..., Any], *args: Any, tolerance: float = 2e-5) -> Graph:
    """Assert that the captured graph of ``step`` computes what ``jax.jit(step)`` does; returns the graph."""
    graph = graph_of(step, *args)
    expected, tree = jax.tree.flatten(jax.jit(step)(*args))
    assert tree.num_leaves == len(graph.outputs)
    found = jax.jit(functools.partial(interpret, graph))(jax.tree.leaves(args))
    for name, a, b in zip(graph.output_names, found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)
    return graph
