"""The same split through GSPMD: the step for ``jax.jit`` with a sharding constraint on every op output.

The plan writes this out itself, so that a comparison is between explicit collectives and XLA's partitioner, and not
between two hands. Gradients are ``jax.value_and_grad`` of the constrained forward program; constraints transpose to
constraints on the cotangents.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jscaler.capture.jaxprs import evaluate
from jscaler.ir import Graph, Op, PTensor
from jscaler.materialize import Layout

Values = dict[PTensor, Any]


def constrained_step(graph: Graph, layouts: Mapping[PTensor, Layout], mesh: Mesh) -> Callable[..., list[Any]]:
    """A function of whole leaves to whole leaves, with ``with_sharding_constraint`` wherever the plan fixes a layout.

    Args:
        graph: the step as the policy saw it.
        layouts: how the ops leave their results.
    """
    evaluator = _Evaluator(graph, layouts, mesh)

    def step(*leaves: Any) -> list[Any]:
        values: Values = dict(zip(graph.inputs, leaves, strict=True))
        values.update(graph.constants)
        differentiated: set[int] = set()
        for op in graph.ops:
            if op.call is None:
                evaluator.run(op, values)
            elif op.call not in differentiated:
                differentiated.add(op.call)
                evaluator.differentiate(op.call, values)
        return [values[t] for t in graph.outputs]

    return step


class _Evaluator:
    def __init__(self, graph: Graph, layouts: Mapping[PTensor, Layout], mesh: Mesh):
        self.graph = graph
        self.layouts = layouts
        self.mesh = mesh

    def run(self, op: Op, values: Values) -> None:
        body = op.primal or op.body  # the gradient here is JAX's own, which saves its residuals itself
        assert body is not None
        results = evaluate(body.jaxpr, [values[t] for t in op.inputs])
        for tensor, value in zip(op.outputs, results, strict=False):
            layout = self.layouts.get(tensor)
            spec = layout.partition_spec() if layout is not None and self.mesh.axis_names else None
            if spec is not None:
                value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))
            values[tensor] = value

    def differentiate(self, index: int, values: Values) -> None:
        """Run one gradient call: all its forward ops, and JAX's gradient of them."""
        call = self.graph.calls[index]
        forward = [op for op in self.graph.ops if op.call == index and op.kind == "forward"]

        def loss(wrt: list[Any]) -> tuple[Any, list[Any]]:
            inner = {**values, **dict(zip(call.wrt, wrt, strict=True))}
            for op in forward:
                self.run(op, inner)
            return inner[call.loss], [inner[t] for t in made]

        made = [t for op in forward for t in op.outputs]
        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)([values[t] for t in call.wrt])
        values.update(zip(made, results, strict=True))
        values.update(zip(call.gradients, gradients, strict=True))
