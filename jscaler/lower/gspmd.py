"""The same split through GSPMD: the step for ``jax.jit`` with a sharding constraint on every op output.

The plan writes this out itself, so that a comparison is between explicit collectives and XLA's partitioner, and not
between two hands. Gradients are ``jax.value_and_grad`` of the constrained forward program; constraints transpose to
constraints on the cotangents.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jscaler.capture.jaxprs import evaluate
from jscaler.ir import Graph, Nest, Op, PTensor, nested
from jscaler.ir.loop import Item, reads_of
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import Layout
from jscaler.materialize.layout import without_values

Values = dict[Any, Any]  # by tensor; and by tensor and spec, where ops read it otherwise than it lies
KEPT = "kept"  # what a region saves though it is computed again


@dataclass(frozen=True)
class Constraints:
    """What GSPMD is told of a plan, beside the shardings of inputs and outputs.

    Attributes:
        lies: how forward ops and updates leave their results, and how gradients come to their readers if the plan shards
            them.
        read: op and tensor -> how the op reads a tensor that lies otherwise.
        refetched: what is made whole again for the backward pass, and not kept: ops that read it are checkpointed.
    """

    lies: Mapping[PTensor, PartitionSpec] = field(default_factory=dict)
    read: Mapping[tuple[str, PTensor], PartitionSpec] = field(default_factory=dict)
    refetched: Set[PTensor] = frozenset()


def constraints(step: StepPlan) -> Constraints:
    """Those of a step on one device group. What no PartitionSpec says has none: value shares, cuts inside a dim."""
    (mesh,), known, sharded = step.completed.groups, step.layouts, step.completed.gradients
    ops = [op for op in step.source.ops if op.kind != "backward"]
    lies = {t: known[t] for op in ops for t in op.outputs if t in known}
    lies |= {t: without_values(sharded[t]) for call in step.source.calls for t in call.gradients if t in sharded}
    read = {
        (op.path, t): layout
        for op in ops
        if op.path in step.completed.ops
        for t, layout in zip(op.inputs, step.completed.ops[op.path].inputs, strict=False)
        if known.get(t, layout) != layout
    }

    def specs(layouts: Mapping[Any, Layout]) -> dict[Any, PartitionSpec]:
        found = {key: layout.partition_spec() for key, layout in layouts.items() if layout.mesh == mesh}
        return {key: spec for key, spec in found.items() if spec is not None}

    return Constraints(specs(lies), specs(read), step.refetched)


def constrained_step(graph: Graph, told: Constraints, mesh: Mesh | AbstractMesh) -> Callable[..., list[Any]]:
    """``graph``, the step as the policy saw it, as a function of whole leaves to whole leaves, constrained as ``told``."""
    evaluator = _Evaluator(graph, told, mesh)

    def step(*leaves: Any) -> list[Any]:
        values: Values = dict(zip(graph.inputs, leaves, strict=True))
        values.update(graph.constants)
        differentiated: set[int] = set()
        for item in graph.tree:
            call = item.call if isinstance(item, Op) else next(item.ops()).call
            if call is None:
                evaluator.run_all([item], values)
            elif call not in differentiated:
                differentiated.add(call)
                evaluator.differentiate(call, values)
        return [values[t] for t in graph.outputs]

    return step


class _Evaluator:
    def __init__(self, graph: Graph, told: Constraints, mesh: Mesh | AbstractMesh):
        self.graph = graph
        self.told = told
        self.mesh = mesh

    def run(self, op: Op, values: Values) -> None:
        body = op.primal or op.body  # the gradient here is JAX's own, which saves its residuals itself
        assert body is not None

        wanted = [self.told.read.get((op.path, t)) for t in op.inputs]
        if op.kind == "forward" and any(t in self.told.refetched for t in op.inputs):

            def fetch_and_run(*args: Any) -> list[Any]:
                return evaluate(body.jaxpr, list(map(self.constrained, args, wanted)))

            results = jax.checkpoint(fetch_and_run)(*(values[t] for t in op.inputs))
        else:
            results = evaluate(body.jaxpr, [self.read(t, s, values) for t, s in zip(op.inputs, wanted, strict=True)])
        for tensor, value in zip(op.outputs, results, strict=False):
            made = self.constrained(value, self.told.lies.get(tensor))
            values[tensor] = checkpoint_name(made, KEPT) if tensor in op.kept else made

    def read(self, tensor: PTensor, spec: PartitionSpec | None, values: Values) -> Any:
        """A tensor as ops read it: those that read it alike share one value."""
        if spec is None:
            return values[tensor]
        if (tensor, spec) not in values:
            values[tensor, spec] = self.constrained(values[tensor], spec)
        return values[tensor, spec]

    def constrained(self, value: Any, spec: PartitionSpec | None) -> Any:
        """``value`` constrained to ``spec``, if there is one."""
        if spec is None or not self.mesh.axis_names:
            return value
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def differentiate(self, index: int, values: Values) -> None:
        """Run one gradient call: all its forward ops, and JAX's gradient of them."""
        call = self.graph.calls[index]
        forward = nested([op for op in self.graph.ops if op.call == index and op.kind == "forward"], self.graph.loops)

        def loss(wrt: list[Any]) -> tuple[Any, list[Any]]:
            inner = {**_tensors(values), **dict(zip(call.wrt, wrt, strict=True))}
            self.run_all(forward, inner)
            return inner[call.loss], [inner[t] for t in made]

        produced = [t for item in forward for t in _results(item)]
        made = [t for t in produced if t in self.read_outside(index)]
        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)([values[t] for t in call.wrt])
        values.update(zip(made, results, strict=True))
        for tensor, gradient in zip(call.gradients, gradients, strict=True):
            values[tensor] = self.constrained(gradient, self.told.lies.get(tensor))

    def read_outside(self, index: int) -> set[PTensor]:
        """What a gradient call hands out besides its gradients."""
        found = set(self.graph.outputs)
        for op in self.graph.ops:
            if op.call != index:
                found.update(op.inputs)
        for loop in self.graph.loops.values():
            found.update((*loop.operands, *loop.returned))
        return found

    def run_all(self, items: Sequence[Item], values: Values) -> None:
        """Run ops and loops; what is in one checkpointed region, checkpointed."""
        for region, group in itertools.groupby(items, key=_region):
            if region is None:
                self._run_plainly(list(group), values)
            else:
                self._checkpointed(list(group), values)

    def _run_plainly(self, items: Sequence[Item], values: Values) -> None:
        for item in items:
            if isinstance(item, Op):
                self.run(item, values)
            else:
                self._repeat(item, values)

    def _checkpointed(self, items: Sequence[Item], values: Values) -> None:
        made = [t for item in items for t in _results(item)]
        reads = [t for item in items for t in reads_of(item)]
        outside = [t for t in dict.fromkeys(reads) if t in values]

        def region(args: list[Any]) -> list[Any]:
            inner = {**_tensors(values), **dict(zip(outside, args, strict=True))}
            self._run_plainly(items, inner)
            return [inner[t] for t in made]

        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        values.update(zip(made, jax.checkpoint(region, policy=policy)([values[t] for t in outside]), strict=True))

    def _repeat(self, nest: Nest, values: Values) -> None:
        loop = nest.loop
        ys = [y for y in loop.ys if not y.saved]  # JAX saves for itself what its backward needs

        def body(carries: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = {**values, **dict(zip((x.slice for x in loop.xs), slices, strict=True))}
            inner.update(zip((c.inside for c in loop.carries), carries, strict=True))
            self.run_all(nest.items, inner)
            return [inner[c.out] for c in loop.carries], [inner[y.slice] for y in ys]

        inits, stacks = [values[c.init] for c in loop.carries], [values[x.stack] for x in loop.xs]
        finals, made = lax.scan(body, inits, stacks, length=loop.length, reverse=loop.reverse, unroll=loop.unroll)
        values.update(zip((*(c.final for c in loop.carries), *(y.stack for y in ys)), (*finals, *made), strict=True))


def _tensors(values: Values) -> Values:
    """Values without those as ops read them, which are made again where the tensors themselves are replaced."""
    return {t: value for t, value in values.items() if isinstance(t, PTensor)}


def _results(item: Item) -> list[PTensor]:
    """What an op or a loop leaves, without what it only saves for our own backward."""
    if isinstance(item, Op):
        return list(item.outputs)
    saved = {y.stack for y in item.loop.ys if y.saved}
    return [t for t in item.loop.results if t not in saved]


def _region(item: Item) -> Any:
    """The checkpointed region that an item belongs to; one inside another is part of it."""
    op = item if isinstance(item, Op) else next(item.ops())
    regions = [r for r in op.remat if r.loop == (op.loop if isinstance(item, Op) else item.loop.parent)]
    return regions[0] if regions else None
