"""The stages of ops that the plan does not place: those of the ops around them.

plan                stage 0            stage 1
forward             f ────────────────► g ──► loss
backward      f' ◄────────────────────── g'             that of the op whose backward, or second run, it is
no decision    └► + (a sum of gradients)                that of what it reads on its group, or else of who reads it
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from jscaler.ir import Graph, Op
from jscaler.ir.loop import chain_of
from jscaler.ir.walk import grouped
from jscaler.materialize.mesh import DeviceMesh

StageBy = Literal["plan", "operands", "readers"]


def stages_by_neighbours(
    graph: Graph, groups: Mapping[str, DeviceMesh], given: Mapping[str, int]
) -> dict[str, tuple[int, StageBy]]:
    """The stages of ops that have none ``given``, and a neighbour on their group; and which neighbour.

    An op of a loop over layers goes with those of it that have a stage, as a counter does: the loop is of one block. Any
    other goes with the last that it reads, else with the first that reads it, of the iteration that it is in.
    """
    found, by = dict(given), dict[str, StageBy]()
    outermost = {op.path: chain_of(op.loop, graph.loops)[:1] for op in graph.ops}

    def settle(op: Op, neighbours: Iterable[Op], why: StageBy) -> None:
        here = groups[op.path], outermost[op.path]
        near = (other.path for other in neighbours if (groups[other.path], outermost[other.path]) == here)
        stage = next((found[path] for path in near if path in found), None)
        if stage is not None:
            found[op.path], by[op.path] = stage, why

    def left(ops: Iterable[Op]) -> Iterator[Op]:
        return (op for op in ops if op.path not in found)

    position, around = graph.position, {op.path: chain_of(op.loop, graph.loops)[:2] for op in graph.ops}
    of_loop = grouped((around[op.path], op) for op in graph.ops if op.path in given)
    for op in left(graph.ops):
        if len(around[op.path]) == 2:
            settle(op, of_loop.get(around[op.path], ()), "plan")
    for op in left(graph.ops):
        makers = [maker for maker in map(graph.flow.maker, op.inputs) if maker is not None]
        settle(op, sorted(makers, key=lambda maker: position[maker.path], reverse=True), "operands")
    for op in left(reversed(graph.ops)):
        settle(op, (reader for t in op.outputs for reader in graph.flow.readers(t)), "readers")
    return {path: (found[path], why) for path, why in by.items()}
