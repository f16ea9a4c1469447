"""Parameters that are whole only while they are used: a backward op reads a fenced copy, which is put together again.

    forward    part ──► whole ──► f ──► y
    backward   part ─┐
                     ├─ fence ──► part' ──► whole' ──► backward of f
               dy  ──┘                                 the whole is not kept from the forward until here

The fence (an ``optimization_barrier`` over the part and the cotangent) makes the part a new value, so that nobody merges
the two wholes, and none that is made before the cotangent is there. In a loop over micro-batches the fences stand in its
body, and its forward ops read copies from behind a fence too: with the iteration's number, so that no whole is made in
front of the loop and kept. Loops over layers need none: what their backward reads of a stack of parameters is another slice
of it. A loop over parts of a layer's backward has one fence in front. (Rajbhandari et al., ZeRO, 2020, section 5.3; Zhao et
al., PyTorch FSDP, 2023.)
"""

import dataclasses
from collections.abc import Set

from jscaler.capture.accumulating import accumulating_loops
from jscaler.capture.bodies import BodyTable
from jscaler.capture.recompute import with_fence_body
from jscaler.ir import Graph, Loop, Op, PTensor
from jscaler.ir.loop import chain_of
from jscaler.ir.name import turn_mark

REFETCHED = "@refetched"


def refetched(graph: Graph, tensors: Set[PTensor], bodies: BodyTable) -> Graph:
    """``graph``, whose backward ops outside of loops over layers read ``tensors`` through a fence each."""
    if not tensors:
        return graph
    accumulating = accumulating_loops(graph)
    groups = _groups(graph, accumulating)
    loops = dict(graph.loops)
    fences: dict[str, Op] = {}
    tables: dict[str, dict[PTensor, PTensor]] = {}
    for path, ops in groups.items():
        own = _loops_of(graph, path)
        made = {t for name in own for t in (*graph.loops[name].inner, *graph.loops[name].results)}
        made |= {t for op in ops for t in op.outputs}
        reads = dict.fromkeys(t for op in ops for t in op.inputs if t not in made)
        reads.update(dict.fromkeys(t for name in own for t in graph.loops[name].operands if t not in made))
        wanted = [t for t in reads if t in tensors]
        if not wanted:
            continue
        cotangents = [t for t in reads if t.role == "gradient"] if own else [t for _, t in ops[0].cotangents if t in reads]
        table = {t: PTensor(t.name + REFETCHED + "@" + path, t.aval, t.role) for t in dict.fromkeys((*wanted, *cotangents))}
        place = graph.loops[path].parent if own else ops[0].loop
        more = {"call": ops[0].call, "loop": place, "turn": ops[0].turn}
        fence = Op(path + "@refetch", "backward", tuple(table), tuple(table.values()), **more)
        fences[ops[0].path] = with_fence_body(dataclasses.replace(fence, anywhere="fence"), bodies)
        tables.update((op.path, table) for op in ops)
        loops.update({name: loops[name].renamed(table, {}) for name in own})
    found: list[Op] = []
    for op in graph.ops:
        found += [fences[op.path]] if op.path in fences else []
        found.append(op.renamed(tables.get(op.path, {})))
    made = dataclasses.replace(graph, ops=tuple(found), loops=loops)
    for name in sorted(accumulating):
        for turn in range(graph.loops[name].turns):
            made = _fetched_inside(made, graph.loops[name], turn, tensors, bodies)
    return made


def _fetched_inside(graph: Graph, loop: Loop, turn: int, tensors: Set[PTensor], bodies: BodyTable) -> Graph:
    """``graph``, whose forward ops in ``loop`` at ``turn`` read ``tensors`` from outside through one fence in front."""
    if not loop.xs:
        return graph
    inside = {name for name in graph.loops if loop.name in chain_of(name, graph.loops)}
    places = [i for i, op in enumerate(graph.ops) if op.loop in inside and op.turn == turn]
    own = {t for name in inside for t in graph.loops[name].inner} | {t for i in places for t in graph.ops[i].outputs}
    forward = {i for i in places if graph.ops[i].kind != "backward"}
    wanted = dict.fromkeys(t for i in sorted(forward) for t in graph.ops[i].inputs if t in tensors and t not in own)
    if not wanted:
        return graph
    number = min((x.slice for x in loop.xs[turn :: loop.turns]), key=lambda t: t.nbytes)  # or what else is of a part
    mark = turn_mark(turn)
    table = {t: PTensor(t.name + "@fetched@" + loop.name + mark, t.aval, t.role) for t in wanted}
    outputs = (*table.values(), PTensor(number.name + "@fetched", number.aval, number.role))
    path = loop.name + "@fetch" + mark
    fence = Op(path, "forward", (*table, number), outputs, loop=loop.name, anywhere="fence", turn=turn)
    ops = [op.renamed(table) if i in forward else op for i, op in enumerate(graph.ops)]
    return dataclasses.replace(graph, ops=(*ops[: places[0]], with_fence_body(fence, bodies), *ops[places[0] :]))


def _groups(graph: Graph, accumulating: Set[str]) -> dict[str, list[Op]]:
    """Backward ops that fetch together: the pieces of one, by its forward; those of a loop over parts, by its name."""
    found: dict[str, list[Op]] = {}
    forward: set[str] = set()
    for op in graph.ops:
        inside = [name for name in chain_of(op.loop, graph.loops) if name not in accumulating]
        if not inside and op.forward is not None:
            found.setdefault(op.forward.path, []).append(op)
        elif inside and all(graph.loops[name].time for name in inside):
            found.setdefault(inside[0], []).append(op)
            forward |= {inside[0]} if op.kind != "backward" else set()
    return {name: ops for name, ops in found.items() if name not in forward}


def _loops_of(graph: Graph, name: str) -> list[str]:
    """The loop that is called so, if one is, and those in it."""
    return [loop for loop in graph.loops if name in chain_of(loop, graph.loops)]
