"""Micro-batches that run in several loops: what one loop hands to the next is held for all of them.

one loop       for each micro-batch: forward ──► backward            one micro-batch's activations live at a time
loops apart    for each: forward ──► all activations ──► for each: backward     who stands between needs sums over all
"""

import math
from collections.abc import Mapping

from jscaler.errors import LEAST
from jscaler.ir import Graph, Loop, Op, PTensor
from jscaler.ir.between_loops import between_loops, is_of_the_step
from jscaler.ir.loop import chain_of
from jscaler.ir.walk import closure
from jscaler.lower.step_plan import StepPlan
from jscaler.plans.accumulate import MICROBATCH
from jscaler.text.units import readable_bytes


def loops_apart(step: StepPlan) -> str:
    """A sentence on how many loops micro-batches run in, why, what is held between these, and which stages wait.

    Empty where no stage waits and less is held than a thousandth of what the step is given.
    """
    graph = step.graph
    loops = _loops(graph)
    if len(loops) < 2:
        return ""
    held = _held(graph, loops)
    staged = step.plan.table is not None and len(step.completed.groups) > 1
    waiting = between_loops(graph, loops, differentiated=True) if staged else None
    if waiting is None and held <= LEAST * sum(t.nbytes for t in graph.inputs):
        return ""
    why = waiting or between_loops(graph, loops)
    ordered = "one" if step.spanning is not None else "none"
    waits = f", and stages wait for each other: the schedule orders {ordered} of these loops"
    return (
        f"{'memory' if waiting is None else 'parallelism'} is lost: micro-batches run in {len(loops)} loops, one behind "
        f"the other{f', since {why}' if why else ''}: {readable_bytes(held)} more are held in all than in one loop"
        f"{'' if waiting is None else waits}"
    )


def between(step: StepPlan) -> tuple[str, ...] | None:
    """The ops between loops over micro-batches: who needs all, and who makes it. None where there is one loop."""
    loops = _loops(step.graph)
    if len(loops) < 2:
        return None
    why = between_loops(step.graph, loops)
    return why.ops if why is not None else ()


def _loops(graph: Graph) -> dict[str, Loop]:
    return {name: loop for name, loop in graph.loops.items() if loop.time == MICROBATCH}


def _held(graph: Graph, loops: Mapping[str, Loop]) -> int:
    """The bytes of activations that loops hand to others, or that are made on the way, without those of one part.

    Cotangents between loops are dropped one by one, and are not counted.
    """
    loop_of = {op.path: name for op in graph.ops for name in chain_of(op.loop, graph.loops) if name in loops}
    takers: dict[PTensor, set[str]] = {}  # of what has rows: a loop cuts it into parts, or takes it part by part
    for op in graph.ops:
        if op.path in loop_of and not is_of_the_step(op):
            for tensor in op.inputs:
                takers.setdefault(tensor, set()).add(loop_of[op.path])
    for name, loop in loops.items():
        for x in loop.xs:
            takers.setdefault(x.stack, set()).add(name)

    def onward(tensor: PTensor) -> list[PTensor]:
        between = (op for op in graph.consumers.get(tensor, ()) if op.path not in loop_of)
        return [*graph.flow.targets(tensor), *(t for op in between for t in op.outputs)]

    held: dict[PTensor, int] = {}
    for name, loop in loops.items():
        times = math.prod(graph.loops[outer].length for outer in chain_of(loop.parent, graph.loops))
        for y in (y for y in loop.ys if _is_forward(graph.flow.maker(y.slice))):
            handed_on = [t for t in closure([y.stack], onward) if takers.get(t, set()) - {name}]
            made = [t for t in handed_on if _is_forward(graph.producer.get(t)) and is_of_the_step(graph.producer[t])]
            for tensor in ([y.stack] if handed_on else []) + made:
                held[tensor] = times * tensor.nbytes * (loop.length - 1) // loop.length
    return sum(held.values())


def _is_forward(maker: Op | None) -> bool:
    return maker is not None and maker.kind == "forward"
