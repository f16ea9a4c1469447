"""The skeleton of a plan: where its ops and tensors lie in space, and what is moved between them. What it says of time and
of stages is no part of it, so that plans that differ in these alone share one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.jaxprs import trace_flat
from jscaler.clusters import Cluster
from jscaler.clusters.transition_kinds import sends
from jscaler.estimate.live import LiveTensors
from jscaler.ir import Graph, Op, PTensor
from jscaler.lower.blocks import make_programs
from jscaler.lower.program import Adapt, Compute, Extend, walk
from jscaler.materialize import Layout
from jscaler.materialize.edges import halo_cost
from jscaler.materialize.transitions import price_of
from jscaler.primitives import Plan
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule import ordered_ops
from jscaler.stages import Captured, LaidOut, lay_out


@dataclass(frozen=True)
class Moved:
    """What is moved in front of an op.

    Attributes:
        tensor: its name.
        reader: path of the op, or of the one that was cut into it; "" of what is moved for the results.
        maker: path of the op that makes the tensor, as that of the reader.
        times: how often loops over layers move it.
        itemsize: bytes of an element on its way: a parameter that its reader casts travels as the cast.
        kind: ``gradient`` of a parameter, ``fetched``: a parameter, or what is made of parameters alone; or ``""``.
    """

    tensor: str
    maker: str
    reader: str
    task: Adapt | Extend
    times: int
    itemsize: int
    kind: str

    @property
    def is_whole(self) -> bool:
        """Whether it ends whole on each device, its shares added."""
        return isinstance(self.task, Adapt) and self.task.adapter.adds and not any(self.task.adapter.target.cuts)

    @property
    def copied(self) -> int:
        """Bytes of the copy of a tensor that a device gathers for its reader; 0 where nothing grows."""
        if isinstance(self.task, Extend) or self.task.adapter.adds:
            return 0
        before, after = (math.prod(layout.local_shape) for layout in (self.task.adapter.source, self.task.adapter.target))
        return after * self.itemsize if after > before else 0

    def seconds(self, share: int, cluster: Cluster) -> float:
        """Of moving one of ``share`` parts once."""
        itemsize: Any = self.itemsize / share
        if isinstance(self.task, Extend):
            return halo_cost(self.task.layout, self.task.edges, itemsize, cluster)
        return sum(price_of(at, step, itemsize, cluster) for at, step in self.task.adapter.walk if sends(step.kind))


@dataclass(frozen=True)
class Skeleton:
    """How a plan lies in space.

    Attributes:
        parts: path of an op -> into how many parts each of its factors is split.
        local: name of a tensor -> the part of it that a device holds.
        unsharded: the same of what ops make, as they make it: gradients are not yet scattered to the shards of parameters.
        sharded: the same of gradients, behind that.
        moved: in the order of the program.
        arguments: name of an argument -> its bytes on a device.
    """

    parts: Mapping[str, Mapping[str, int]]
    local: Mapping[str, float]
    unsharded: Mapping[str, float]
    sharded: Mapping[str, float]
    moved: tuple[Moved, ...]
    arguments: Mapping[str, int]

    @staticmethod
    def of(captured: Captured, plan: Plan, cluster: Cluster) -> "Skeleton":
        """Of a plan that says nothing of time, and has all ops on one device group."""
        laid = lay_out(captured, plan, cluster)
        graph, completed = laid.placed.graph, laid.completed
        local, made = _local(laid)
        inputs = {t.name: math.prod(layout.local_shape) * t.itemsize for t, layout in completed.inputs.items()}
        parts = {path: dict(one.placement.parts) for path, one in completed.ops.items()}
        for path, pieces in laid.planned.pieces.items():
            parts[path] = {factor: n for piece in pieces for factor, n in parts.get(piece, {}).items()}
        sharded = {tensor.name: _part(layout) for tensor, layout in completed.gradients.items()}
        for loop in graph.loops.values():  # a layer's as that of the stack
            sharded.update({y.slice.name: sharded[y.stack.name] for y in loop.ys if y.stack.name in sharded})
        return Skeleton(parts, local, made, sharded, tuple(_moved(graph, laid, captured.rules, plan, cluster)), inputs)


class _WithoutBodies:
    """A rule book for who reads no bodies: cutting them to the shapes of parts takes longest."""

    def __init__(self, book: RuleBook):
        self.bodies, self.memo, self._empty = book.bodies, book.memo, trace_flat(list, [])

    def local(self, *of: Any) -> tuple[core.Jaxpr, tuple[str, ...]]:
        return self._empty, ()


def _moved(graph: Graph, laid: LaidOut, book: RuleBook, plan: Plan, cluster: Cluster) -> list[Moved]:
    bodies: Any = _WithoutBodies(book)
    order = ordered_ops(graph, ())
    (program,) = make_programs(graph, order, laid.completed, bodies, {}, cluster, plan.reduce_dtype).programs
    gradients = {t for t, kind in LiveTensors(graph).kinds.items() if kind == "gradient"}
    cut = {piece: path for path, pieces in laid.planned.pieces.items() for piece in pieces}
    found: list[Moved] = []
    waiting: list[tuple[Adapt | Extend, int]] = []
    for task, times in walk(program.tasks):
        if isinstance(task, Compute):
            found += [_of_task(one, n, task.op, gradients, graph, cut) for one, n in waiting]
            waiting = []
        else:
            waiting.append((task, times))
    return found + [_of_task(one, n, None, gradients, graph, cut) for one, n in waiting]


def _of_task(
    task: Adapt | Extend,
    times: int,
    reader: Op | None,
    gradients: set[PTensor],
    graph: Graph,
    cut: Mapping[str, str],
) -> Moved:
    tensor, path = task.tensor, reader.path if reader is not None else ""
    itemsize = tensor.itemsize
    if isinstance(task, Adapt) and task.reduce_dtype is not None and task.adapter.adds:
        itemsize = jnp.dtype(task.reduce_dtype).itemsize
    whole = isinstance(task, Adapt) and not task.adapter.adds
    if whole and reader is not None:
        itemsize = as_cast(tensor, reader)
    kind = "gradient" if tensor in gradients else "fetched" if whole and graph.producer.get(tensor) is None else ""
    maker = graph.producer.get(tensor)
    made = maker.path if maker is not None else ""
    return Moved(tensor.name, cut.get(made, made), cut.get(path, path), task, times, itemsize, kind)


def as_cast(tensor: PTensor, reader: Op) -> int:
    """Bytes of an element of ``tensor`` as ``reader`` uses it."""
    if reader.body is None or tensor not in reader.inputs:
        return tensor.itemsize
    jaxpr = reader.body.jaxpr
    var = jaxpr.invars[reader.inputs.index(tensor)]
    uses = [eqn for eqn in jaxpr.eqns if var in eqn.invars]
    if not uses or any(eqn.primitive.name != "convert_element_type" for eqn in uses):
        return tensor.itemsize
    casts: Sequence[Any] = [eqn.outvars[0].aval for eqn in uses]
    return min(tensor.itemsize, max(aval.dtype.itemsize for aval in casts))


def _local(laid: LaidOut) -> tuple[dict[str, float], dict[str, float]]:
    """By name of a tensor the part of it that a device holds; and, of what ops make, as they make it."""
    graph, completed = laid.placed.graph, laid.completed
    made = {
        tensor.name: _part(layout)
        for op in graph.ops
        for tensor, layout in zip(op.outputs, completed.ops[op.path].outputs, strict=True)
    }
    local = dict(made)
    for loop in graph.loops.values():
        made.update({y.stack.name: made[y.slice.name] for y in loop.ys if y.slice.name in made})
        own = completed.loops[loop.name]
        for carry, layout in zip(loop.carries, own.carries, strict=True):
            local.update(dict.fromkeys((carry.inside.name, carry.final.name), _part(layout)))
        for x, layout in zip(loop.xs, own.xs, strict=True):
            local.update(dict.fromkeys((x.slice.name, x.stack.name), _part(layout)))
        local.update({y.stack.name: _part(layout) for y, layout in zip(loop.ys, own.ys, strict=True)})
    local.update({tensor.name: _part(layout) for tensor, layout in completed.inputs.items()})
    return local, made


def _part(layout: Layout) -> float:
    return math.prod(layout.local_shape) / max(1, math.prod(layout.shape))
