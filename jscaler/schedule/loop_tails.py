"""Loops whose last ops stand in a loop of their own, behind them.

A backward loop over layers may end in ops that need a whole sum over rows and that no iteration waits for: the cast of a
gradient to the fewer bits of its parameter. Micro-batches have a share of the sum each, so the first loop runs for every
one of them, and the second once, on what they add up to::

    loop:  dx = …;  s = Σ rows …;  dw = cast s    ──►    loop:        dx = …;  s = Σ rows …, stacked
                                                         loop/tail:   dw = cast s, of the stack of s
"""

import dataclasses
import itertools
from collections.abc import Mapping, Set

from jscaler.ir import Graph, Op, PTensor, Stacked
from jscaler.ir.loop import chain_of


def with_tails(graph: Graph, late: Mapping[str, Set[str]]) -> Graph:
    """``graph``, in which loops behind its own have their last items.

    Args:
        late: loop -> the names of the items. Nothing else in the loop reads what they make, and they read nothing of other
            loops' iterations.
    """
    for name, items in late.items():
        graph = _with_tail(graph, name, items)
    return graph


def _with_tail(graph: Graph, name: str, late: Set[str]) -> Graph:
    loop = graph.loops[name]
    names = (name + f"/tail{number or ''}" for number in itertools.count())  # a loop within may have got one before
    tail = next(n for n in names if n not in graph.loops)

    def is_late(op: Op) -> bool:
        return not late.isdisjoint((op.path, *chain_of(op.loop, graph.loops)))

    inside = [op for op in graph.ops if name in chain_of(op.loop, graph.loops)]
    behind = [op for op in inside if is_late(op)]
    moved = {n for op in behind for n in chain_of(op.loop, graph.loops) if not late.isdisjoint(chain_of(n, graph.loops))}
    made = {t for op in behind for t in op.outputs} | {t for n in moved for t in graph.loops[n].results}
    carries = [c for c in loop.carries if c.out in made]
    own = {c.inside for c in carries}
    reads = dict.fromkeys(t for op in behind for t in op.inputs)
    reads |= dict.fromkeys(t for n in moved for t in graph.loops[n].operands)
    handed = [t for t in reads if graph.homes.get(t) == name and t not in made | own]
    slices = {t: PTensor(t.name + "@" + tail, t.aval, t.role) for t in handed}
    stacks = {x.slice: x.stack for x in loop.xs}
    summed = [Stacked(_stack(t, loop.length, tail), t) for t in handed if t not in stacks]
    stacks |= {y.slice: y.stack for y in summed}
    kept_ys = [y for y in loop.ys if y.slice not in made]
    first = dataclasses.replace(loop, carries=tuple(c for c in loop.carries if c not in carries), ys=(*kept_ys, *summed))
    last = dataclasses.replace(
        loop,
        name=tail,
        carries=tuple(carries),
        xs=tuple(Stacked(stacks[t], piece) for t, piece in slices.items()),
        ys=tuple(y for y in loop.ys if y.slice in made),
    )
    loops = {**graph.loops, name: first, tail: last}
    for n in moved:
        inner = graph.loops[n].renamed(slices, slices)
        loops[n] = dataclasses.replace(inner, parent=tail) if inner.parent == name else inner
    written = [dataclasses.replace(op.renamed(slices), loop=tail if op.loop == name else op.loop) for op in behind]
    end = graph.position[inside[-1].path] + 1
    before = (op for op in graph.ops[:end] if not is_late(op))
    return dataclasses.replace(graph, ops=(*before, *written, *graph.ops[end:]), loops=loops)


def _stack(tensor: PTensor, length: int, tail: str) -> PTensor:
    aval = tensor.aval.update(shape=(length, *tensor.shape), weak_type=False)
    return PTensor(tensor.name + "@" + tail + ":stack", aval, tensor.role)
