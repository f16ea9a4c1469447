"""Regions of ops are computed again: the region's backward ops read clones of its forward ops.

    forward    x ──► f ──► h ──► g ──► y            only x is kept
    backward   x ──► f' ─► h' ──────┐
                         dy ──► backward g ──► …    f': the clone of f; h': its result

Outside a loop, all that the clones and the backward ops read passes one fence (an ``optimization_barrier`` over inputs
and cotangents), so that nobody merges the clones with the forward ops, or runs them early. In the backward of a loop,
clones stand in another body than the forward ops, and read what is saved for each iteration: the region's inputs. A loop
of one iteration is none to XLA: its clones stand behind a fence as those outside do.

Where clones are to run *apart* from the backward ops, as a block of their own, only what the forward ops read passes the
fence: so they wait for no cotangent, and blocks are programs of their own, which nobody merges. Those of a loop's body
stand in a loop of their own in front of the backward's, whose iterations read what is saved for each.

A region is what the user checkpointed (``jax.checkpoint``, ``nn.remat``) or what a plan selects (``graph.recompute``). Its
results are saved for whoever else reads them; what it keeps (``op.kept``) is saved too, and then clones and backward ops
read that. Clones that nobody reads vanish. A region inside another is part of the outer one.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax import lax

from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph, Loop, Op, PTensor
from jscaler.ir.loop import chain_of
from jscaler.ir.op import RecomputeRegion

AGAIN = "@again"
Tensors = dict[PTensor, PTensor]


def recompute(graph: Graph, bodies: BodyTable, apart: bool = False) -> Graph:
    """``graph``, whose backward ops have bodies, with the clones that they need; these may run ``apart`` from them."""
    regions = dict.fromkeys(op.remat[0] for op in graph.ops if op.remat)
    if not regions:
        return graph
    for region in regions:
        graph = _expanded(graph, region, apart)
    graph = without_dead_clones(graph)
    return dataclasses.replace(graph, ops=tuple(with_fence_body(op, bodies) for op in graph.ops))


def with_fence_body(op: Op, bodies: BodyTable) -> Op:
    """``op`` with its body, if it is a fence."""
    if op.anywhere != "fence":
        return op
    body = bodies.traced(lambda *xs: list(lax.optimization_barrier(xs)), [t.aval for t in op.inputs], key="fence")
    return dataclasses.replace(op, body=body)


@dataclass(frozen=True)
class _Parts:
    """What a region is made of.

    Attributes:
        forward: its ops; the loops among them are ``inner``.
        first, last: between which of the graph's ops its backward stands.
        backward: the ops there that belong to it: backwards of its ops, and joins of what these make; with the loops below.
        depth: how many loops are around it.
    """

    forward: tuple[Op, ...]
    inner: tuple[str, ...]
    first: int
    last: int
    backward: tuple[Op, ...]
    below: tuple[str, ...]
    depth: int

    @property
    def kept(self) -> set[PTensor]:
        """What is saved; an op all of whose results are kept keeps the residuals of its backward too."""
        found = {t for op in self.forward for t in op.kept}
        for op in self.forward:
            results = [t for t in op.outputs if t.role != "residual"]
            if results and all(t in found for t in results):
                found.update(op.outputs)
        return found


def _parts(graph: Graph, region: RecomputeRegion) -> _Parts | None:
    """The parts of a region; None where no gradient flows through it."""
    forward = tuple(op for op in graph.ops if op.forward is None and op.remat[:1] == (region,))
    places = [i for i, op in enumerate(graph.ops) if op.forward is not None and op.forward.remat[:1] == (region,)]
    if not places:
        return None
    depth = len(chain_of(region.loop, graph.loops))
    first, last = _whole_loops(graph, places[0], places[-1] + 1, depth)
    inner = _loops_below(forward, depth, graph.loops)
    below = [n for n in _loops_below(graph.ops[first:last], depth, graph.loops) if graph.loops[n].forward in inner]
    made = {t for name in below for t in (*graph.loops[name].inner, *graph.loops[name].results)}
    backward: list[Op] = []
    for i, op in enumerate(graph.ops[first:last], first):
        joins = op.forward is None and op.again is None and op.anywhere != "fence" and any(t in made for t in op.inputs)
        if i in places or joins or any(name in below for name in chain_of(op.loop, graph.loops)):
            backward.append(op)
            made.update(op.outputs)
    return _Parts(forward, tuple(inner), first, last, tuple(backward), tuple(below), depth)


def _expanded(graph: Graph, region: RecomputeRegion, apart: bool) -> Graph:
    parts = _parts(graph, region)
    if parts is None:
        return graph
    names, loops, first = {name: name + AGAIN for name in parts.inner}, dict(graph.loops), parts.first
    if region.loop is not None:
        names[region.loop] = chain_of(graph.ops[first].loop, graph.loops)[parts.depth - 1]
    if apart and region.loop is not None and graph.loops[region.loop].parent is None:
        first = next(i for i, op in enumerate(graph.ops) if names[region.loop] in chain_of(op.loop, graph.loops))
        names[region.loop] = region.loop + AGAIN
        own = graph.loops[region.loop]
        loops[names[region.loop]] = Loop(names[region.loop], own.length, own.reverse, unroll=own.unroll, again=True)
    made = [t for op in parts.forward for t in op.outputs]
    made += [t for name in parts.inner for t in (*graph.loops[name].inner, *graph.loops[name].results)]
    again: Tensors = {t: PTensor(t.name + AGAIN, t.aval) for t in made}
    table = {t: new for t, new in again.items() if t not in parts.kept}
    fence: list[Op] = []
    if region.loop is None or _runs_once(graph, region.loop, names[region.loop]):
        within = names[region.loop] if region.loop is not None else None
        fence = [_fence(graph, region, parts, table, apart and within is None, within)]
        table |= dict(zip(fence[0].inputs, fence[0].outputs, strict=True))
    clones = [_clone(op, again, table, names) for op in parts.forward]
    loops |= {name: loop.renamed(table, table) for name in parts.below for loop in (graph.loops[name],)}
    loops |= {names[name]: _clone_loop(graph.loops[name], table, names) for name in parts.inner}
    own = {op.path for op in parts.backward}
    renamed = [op.renamed(table) if op.path in own else op for op in graph.ops[parts.first : parts.last]]
    ops = (*graph.ops[:first], *fence, *clones, *graph.ops[first : parts.first], *renamed, *graph.ops[parts.last :])
    return dataclasses.replace(graph, ops=ops, loops=loops)


def _runs_once(graph: Graph, loop: str, backward: str) -> bool:
    """Whether XLA sees a loop's body and its backward's as one piece of text: of one iteration it makes no loop. Not where
    the clones have a loop of their own, which is in another program."""
    return graph.loops[loop].length == 1 and backward != loop + AGAIN


def _fence(
    graph: Graph,
    region: RecomputeRegion,
    parts: _Parts,
    again: Mapping[PTensor, PTensor],
    apart: bool,
    loop: str | None,
) -> Op:
    """A fence of all that a region and its backward, in ``loop``, read from outside: inputs, what is kept, and cotangents.
    Where they run apart, of what the region reads."""
    between = graph.ops[parts.first : parts.last]
    there = [*parts.inner, *_loops_below(between, parts.depth, graph.loops)]
    inside = set(again) | {t for op in between for t in op.outputs}
    inside |= {t for name in there for t in (*graph.loops[name].inner, *graph.loops[name].results)}
    # what an inner loop makes is saved for each iteration, and read in another loop's: nobody could merge that
    inside |= {t for op in parts.forward if op.loop != region.loop for t in op.outputs}
    reads = [t for op in (*parts.forward, *(() if apart else parts.backward)) for t in op.inputs]
    for name in (*parts.inner, *(() if apart else parts.below)):
        reads += [*graph.loops[name].operands, *graph.loops[name].returned]
    outside = tuple(t for t in dict.fromkeys(reads) if t not in inside)
    fenced = tuple(PTensor(t.name + "@fence@" + region.name, t.aval, t.role) for t in outside)
    call, remat = parts.forward[0].call, (region,) if apart else ()
    return Op(region.name + "@fence", "backward", outside, fenced, call=call, remat=remat, loop=loop, anywhere="fence")


def _whole_loops(graph: Graph, first: int, last: int, depth: int) -> tuple[int, int]:
    """``first:last`` widened to all ops of the loops, deeper than ``depth``, that it begins or ends in."""

    def outermost(index: int) -> tuple[str, ...]:
        return chain_of(graph.ops[index].loop, graph.loops)[: depth + 1]

    while first and len(outermost(first)) > depth and outermost(first - 1) == outermost(first):
        first -= 1
    while last < len(graph.ops) and len(outermost(last - 1)) > depth and outermost(last) == outermost(last - 1):
        last += 1
    return first, last


def _loops_below(ops: Sequence[Op], depth: int, loops: Mapping[str, Loop]) -> list[str]:
    """The loops around ``ops`` that are deeper than ``depth``."""
    return list(dict.fromkeys(name for op in ops for name in chain_of(op.loop, loops)[depth:]))


def _clone(op: Op, again: Tensors, table: Mapping[PTensor, PTensor], names: Mapping[str, str]) -> Op:
    return dataclasses.replace(
        op,
        path=op.path + AGAIN,
        kind="backward",
        inputs=tuple(table.get(t, t) for t in op.inputs),
        outputs=tuple(again[t] for t in op.outputs),
        loop=names[op.loop] if op.loop is not None else None,
        remat=(),
        kept=(),
        backward=None,
        again=op,
    )


def _clone_loop(loop: Loop, table: Mapping[PTensor, PTensor], names: Mapping[str, str]) -> Loop:
    parent = names.get(loop.parent, loop.parent) if loop.parent is not None else None
    return dataclasses.replace(loop.mapped(lambda t: table.get(t, t)), name=names[loop.name], parent=parent, again=True)


def without_dead_clones(graph: Graph) -> Graph:
    """``graph`` without clones that nobody reads, nor fences of what nobody reads.

    A cloned loop may be left without ops, for the slices of its stacks, which a backward loop reads.
    """
    ops, loops = list(graph.ops), dict(graph.loops)
    while True:
        uses = Counter(t for op in ops for t in op.inputs)
        uses.update(graph.outputs)
        for loop in loops.values():
            uses.update((*loop.operands, *loop.returned))
        kept = _alive(ops, loops, uses)
        there = {name for op in kept for name in chain_of(op.loop, loops)}
        trimmed = {n: _trimmed(loop, uses) if loop.again else loop for n, loop in loops.items()}
        there |= {name for n in trimmed if any(uses[t] for t in trimmed[n].inner) for name in chain_of(n, loops)}
        trimmed = {n: loop for n, loop in trimmed.items() if n in there}
        if len(kept) == len(ops) and trimmed == loops:
            return dataclasses.replace(graph, ops=tuple(ops), loops=loops)
        ops, loops = kept, trimmed


def _alive(ops: Sequence[Op], loops: Mapping[str, Loop], uses: Counter[PTensor]) -> list[Op]:
    """The ops without clones whose results are not in ``uses``, from which is taken what those read."""
    kept: list[Op] = []
    # what a loop hands through (a carry that stays as it is) may be read where no op in it is: then one stays
    anchors: dict[str, Op] = {}
    for op in ops:
        for name in chain_of(op.loop, loops):
            anchors.setdefault(name, op)
    for op in reversed(ops):
        around = chain_of(op.loop, loops)
        if op.anywhere == "fence":
            pairs = [(a, b) for a, b in zip(op.inputs, op.outputs, strict=True) if uses[b]]
            op = dataclasses.replace(op, inputs=tuple(a for a, _ in pairs), outputs=tuple(b for _, b in pairs))
            kept += [op] if pairs else []
            continue
        needed = any(anchors.get(name) is op and any(uses[t] for t in loops[name].results) for name in around)
        if op.again is None or any(uses[t] for t in op.outputs) or needed:
            kept.append(op)
            for name in around:
                anchors.pop(name, None)
        else:
            uses.subtract(op.inputs)
    return kept[::-1]


def _trimmed(loop: Loop, uses: Counter[PTensor]) -> Loop:
    """A cloned loop without carries and stacks that nobody reads."""
    carries = tuple(c for c in loop.carries if uses[c.final] or uses[c.inside] > (c.out == c.inside))
    ys = tuple(y for y in loop.ys if uses[y.stack])
    return dataclasses.replace(loop, carries=carries, xs=tuple(x for x in loop.xs if uses[x.slice]), ys=ys)
