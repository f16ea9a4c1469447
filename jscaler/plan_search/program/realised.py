"""A solution as a policy: the three primitives on the ops of a whole graph."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from jscaler.estimate.prices.folded import Folded
from jscaler.ir import Op
from jscaler.ir.loop import made_by, reads_of
from jscaler.ir.walk import between
from jscaler.plan_search.program.choices import ByAxis
from jscaler.plan_search.program.leaves import State
from jscaler.primitives import Algorithm, Planner, Replicate, Split
from jscaler.primitives.planner import Policy


def policy_of(
    folded: Folded, mesh: tuple[int, ...], choices: Mapping[str, ByAxis], states: Mapping[str, State],
    again: Set[str], inside: Set[str], in_parts: bool, orders: Sequence[tuple[str, str]] = (),
) -> Policy:  # fmt: skip
    """A policy that decides what was found, by what stands for an op or a parameter.

    Args:
        in_parts: whether it runs on one micro-batch after another.
        orders: pairs of ops, of which the first runs in front of the second.
    """

    def found(graph: Planner, devices: np.ndarray) -> None:
        grid = devices.reshape(mesh)
        for leaf in graph.inputs:
            state = states.get(folded.kind(leaf.name))
            if state is not None and state.dim is not None:
                _shard(graph, leaf.name, state, grid, len(leaf.shape), in_parts)
        for op in graph.ops:
            by_axis = choices.get(folded.kind(op.path)) if op.kind == "forward" else None
            if by_axis is not None:
                _place(graph, op, by_axis, grid)
        kinds = {op: folded.kind(op.path) for op in graph.forward()}
        beside = [op for op, kind in kinds.items() if kind in inside]
        for region in _regions(graph, [op for op, kind in kinds.items() if kind in again], beside):
            graph.recompute(region, keep=[op for op in region if kinds[op] not in again])
        for before, after in orders:
            graph.op_order(before, after)

    return found


def _place(graph: Planner, op: Op, by_axis: ByAxis, grid: np.ndarray) -> None:
    algorithms: list[Algorithm] = [
        Split(factor, size) if factor is not None else Replicate(size)
        for factor, size in zip(by_axis, grid.shape, strict=True)
    ]
    graph.op_assign(graph.op_trans(op, *algorithms), grid)


def _shard(graph: Planner, leaf: str, state: State, grid: np.ndarray, rank: int, in_parts: bool) -> None:
    """Over the axes that replicate it."""
    assert state.dim is not None
    names = [name for name, _ in state.layout.mesh.axes]
    free = [i for i, name in enumerate(names) if name in state.layout.free]
    rest = [i for i in range(len(names)) if i not in free]
    parts = math.prod(grid.shape[i] for i in free)
    devices = grid.transpose(free + rest).reshape(parts, -1)
    dim = state.dim + rank - len(state.layout.shape)  # behind the dim of layers
    often = state.zero > 1 if in_parts else None
    graph.shard(leaf, dim, devices, stored=state.zero == 3, each_time=often)


def _regions(graph: Planner, again: Sequence[Op], inside: Sequence[Op]) -> list[list[Op]]:
    """What runs again with those whose backwards read it, and what stands between; what hangs together is one region.

    Args:
        inside: ops of which no more is made again than what they hold inside.
    """

    def with_readers(op: Op) -> set[Op]:
        readers = {r for t in op.outputs for r in graph.consumers.get(t, ()) if r.kind == "forward" and r.loop == op.loop}
        return {op, *(r for r in readers if r.backward is not None)}

    def beside(group: set[Op]) -> list[Op]:
        first = next(iter(group))
        return [op for op in graph.forward() if op.loop == first.loop and op.call == first.call]

    groups, before = _joined([*map(with_readers, again), *({op} for op in inside)]), -1
    while len(groups) != before:  # what stands between may be of another region
        before = len(groups)
        groups = _joined([group | {*between(beside(group), group, reads_of, made_by)} for group in groups])
    return [[op for op in beside(group) if op in group] for group in groups]


def _joined(sets: Iterable[set[Op]]) -> list[set[Op]]:
    """Those that have some in common as one."""
    found: list[set[Op]] = []
    for own in sets:
        near = [group for group in found if group & own]
        found = [group for group in found if group not in near] + [own.union(*near)]
    return found
