"""Stored parameters that are put together once for all micro-batches, in front of their loop, and whole until it ends.

    part ──► whole ──► for each micro-batch:  forward, backward ──► gradients are scattered as they are made
                                                                    update of the part

Sends less than `capture.refetch`, which puts them together in every iteration and lets them go, and holds more. The whole
is a tensor of its own: what the loop makes of it (casts, slices of a stack) does not lie in parts, as that of a stored
parameter does. What stands in front of the loop (the cast of a master) does, and is put together behind it. (Rajbhandari et
al., ZeRO, 2020, stage 2, with parameters that lie in parts; FSDP's ``SHARD_GRAD_OP``.)
"""

import dataclasses
from collections.abc import Set

from jax import lax

from jscaler.capture.accumulating import accumulating_loops
from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.loop import chain_of


def fetched_once(graph: Graph, tensors: Set[PTensor], bodies: BodyTable) -> Graph:
    """``graph``, whose loops over micro-batches read ``tensors`` through ops in front of them that put them together."""
    accumulating = accumulating_loops(graph)
    inside = {name for name in graph.loops if not accumulating.isdisjoint(chain_of(name, graph.loops))}
    places = [i for i, op in enumerate(graph.ops) if op.loop in inside]
    reads = [t for i in places for t in graph.ops[i].inputs] + [t for name in inside for t in graph.loops[name].operands]
    wanted = [t for t in dict.fromkeys(reads) if t in tensors and graph.homes.get(t) is None]
    if not wanted:
        return graph
    table = {t: PTensor(t.name + "@whole", t.aval, t.role) for t in wanted}
    loops = {name: loop.renamed(table, {}) if name in inside else loop for name, loop in graph.loops.items()}
    ops = [op.renamed(table) if op.loop in inside else op for op in graph.ops]
    whole = [_whole(t, made, bodies) for t, made in table.items()]
    return dataclasses.replace(graph, ops=(*ops[: places[0]], *whole, *ops[places[0] :]), loops=loops)


def _whole(tensor: PTensor, made: PTensor, bodies: BodyTable) -> Op:
    body = bodies.traced(lambda x: [lax.optimization_barrier(x)], [tensor.aval], key="fence")
    return Op(tensor.name + "@gather", "forward", (tensor,), (made,), body, joins_shards=True)
