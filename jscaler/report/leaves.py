"""How every leaf of the step's arguments lies, who decided that, and what the runner-up would have cost."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jscaler.clusters import CostModel
from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import TensorKind, tensor_kinds
from jscaler.ir.loop import chain_of
from jscaler.materialize import Completed, Layout, find_adapter
from jscaler.materialize.placement import RunnerUp
from jscaler.primitives import Plan, Store
from jscaler.text.folding import folded


@dataclass(frozen=True)
class LeafRow:
    """Leaves of one device group that are alike but for layer numbers.

    Attributes:
        kind: parameter, optimizer or input.
        name: their path, layer numbers as ``*``.
        count: how many they are.
        shape, dtype: of each.
        nbytes: of all of them, whole.
        layout: how each lies, in R V D text.
        nbytes_per_device: of all of them, on the device that holds most.
        replicated: whether every device holds all of it.
        decided: who decided, and the op for whose sake.
        runner_up: the layout that other readers would have, or a whole copy, and what it costs more; negative where it
            costs less, for a leaf lies as its first reader wants it, whatever that costs.
        devices: of the group that holds them.
    """

    kind: TensorKind
    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    layout: str
    nbytes_per_device: int
    replicated: bool
    decided: str
    runner_up: RunnerUp | None = None
    devices: tuple[int, ...] = ()


def local_bytes(tensor: PTensor, layout: Layout) -> int:
    """Bytes of the largest part of ``tensor`` on any device."""
    return math.prod(layout.local_shape) * tensor.itemsize


def leaf_rows(graph: Graph, plan: Plan, completed: Completed, cost: CostModel) -> tuple[LeafRow, ...]:
    """One row per group of like leaves: parameters, the optimizer's, inputs; in the order of the arguments."""
    said = {leaf: "policy: stored in parts" for leaf, shard in plan.shards.items() if shard.stored}
    said |= {d.leaf: "stored so by the plan" for d in plan.decisions if isinstance(d, Store)}
    kinds = tensor_kinds(graph)
    made_by = _updates(graph)
    wants = _wanted(graph, completed)
    rows: dict[tuple[object, ...], LeafRow] = {}
    for index, tensor in enumerate(graph.inputs):
        layout = completed.inputs[tensor]
        decided = said.get(tensor.name) or _decided(graph, completed, tensor, made_by.get(index), wants.get(tensor, ()))
        runner_up = _runner_up(completed, tensor, made_by.get(index), wants.get(tensor, ()), cost)
        row = LeafRow(
            kinds[tensor],
            folded(tensor.name),
            1,
            tensor.shape,
            str(tensor.dtype),
            tensor.nbytes,
            layout.counts,
            local_bytes(tensor, layout),
            not any(layout.cuts),
            folded(decided),
            runner_up,
            layout.mesh.devices,
        )
        key = (row.kind, row.name, row.shape, row.dtype, row.layout, row.decided, row.runner_up, row.devices)
        rows[key] = together(row.name, [rows[key], row]) if key in rows else row
    order: Sequence[TensorKind] = ("parameter", "optimizer", "input")
    return tuple(sorted(rows.values(), key=lambda row: order.index(row.kind)))


def together(name: str, rows: Sequence[LeafRow]) -> LeafRow:
    """One row, under ``name``, for rows that differ in their names alone."""
    count = sum(row.count for row in rows)
    whole, part = sum(row.nbytes for row in rows), sum(row.nbytes_per_device for row in rows)
    return dataclasses.replace(rows[0], name=name, count=count, nbytes=whole, nbytes_per_device=part)


@dataclass(frozen=True)
class _Wanted:
    """A reader of a leaf, and the layout in which it reads it; ``op`` is the reader, or one in the loop that reads it."""

    op: str
    layout: Layout


def _wanted(graph: Graph, completed: Completed) -> Mapping[PTensor, Sequence[_Wanted]]:
    """Per tensor who reads it and how, in the order of the program."""
    table: dict[PTensor, list[tuple[int, _Wanted]]] = {}
    for number, op in enumerate(graph.ops):
        for tensor, layout in zip(op.inputs, completed.ops[op.path].inputs, strict=True):
            table.setdefault(tensor, []).append((number, _Wanted(op.path, layout)))
    for tensor, inside, layout in _into_loops(graph, completed):
        number, first = min(table.get(inside, [(len(graph.ops), _Wanted("", layout))]), key=lambda entry: entry[0])
        table.setdefault(tensor, []).append((number, _Wanted(first.op, layout)))
    return {t: [wanted for _, wanted in sorted(found, key=lambda entry: entry[0])] for t, found in table.items()}


def _into_loops(graph: Graph, completed: Completed) -> Iterator[tuple[PTensor, PTensor, Layout]]:
    """What loops take: the tensor outside and inside, and how it is taken; inner loops first."""
    for name in sorted(graph.loops, key=lambda name: -len(chain_of(name, graph.loops))):
        loop, laid = graph.loops[name], completed.loops[name]
        for carry, layout in zip(loop.carries, laid.carries, strict=True):
            yield carry.init, carry.inside, layout
        for x, layout in zip(loop.xs, laid.xs, strict=True):
            yield x.stack, x.slice, layout.stacked(loop.length)


def _decided(
    graph: Graph, completed: Completed, tensor: PTensor, update: tuple[str, int] | None, readers: Sequence[_Wanted]
) -> str:
    """Who wanted the leaf's layout: the first reader that has it so.

    Args:
        update: op and output that make the next version.
    """
    layout = completed.inputs[tensor]
    named = [reader for reader in readers if reader.op]
    for reader in named:
        if reader.layout == layout:
            op = graph[reader.op]
            who = "its update" if update is not None and op.path == update[0] else op.path
            return f"{completed.ops[op.path].placement.origin}: as {who} reads it"
    if not named:
        return "whole: no op reads it"
    if any(layout.cuts) and any(storable(reader.layout) for reader in named):
        return "stored so by the plan"
    lies = "in parts of another dim" if any(layout.cuts) else "whole"
    return f"{lies}: no array can lie as {named[0].op} reads it"


def _updates(graph: Graph) -> dict[int, tuple[str, int]]:
    """Input -> path and output index of the op that makes its next version."""
    made = {i: graph.outputs[o] for o, i in graph.next_version.items()}
    makers = {i: (graph.producer[t], t) for i, t in made.items() if t in graph.producer}
    return {i: (op.path, op.outputs.index(t)) for i, (op, t) in makers.items()}


def _runner_up(
    completed: Completed, tensor: PTensor, update: tuple[str, int] | None, readers: Sequence[_Wanted], cost: CostModel
) -> RunnerUp | None:
    """The cheapest other layout among those that readers want, and a whole copy.

    Args:
        update: op and output that make the next version.
    """
    layout = completed.inputs[tensor]
    wanted = list(dict.fromkeys(reader.layout for reader in readers if reader.layout.mesh == layout.mesh))
    whole = Layout.replicated(layout.mesh, tensor.shape)
    others = [x for x in dict.fromkeys([*wanted, whole]) if x != layout and storable(x)]
    if not others or not layout.mesh.axes or not wanted:
        return None
    made = [completed.ops[update[0]].outputs[update[1]]] if update is not None else []
    made = [x for x in made if x.mesh == layout.mesh]

    def price(stored: Layout) -> float:
        ways = [*((stored, x) for x in wanted), *((x, stored) for x in made)]
        return sum(find_adapter(a, b, tensor.itemsize, cost).cost for a, b in ways)

    prices = [price(x) for x in others]
    best = prices.index(min(prices))
    return RunnerUp(others[best].counts, "", prices[best] - price(layout))


def storable(layout: Layout) -> bool:
    """Whether a jax.Array can lie so."""
    return layout.even and layout.partition_spec() is not None
