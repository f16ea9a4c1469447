"""Time axes become loops: what runs part by part is written as a user would write the ``lax.scan`` by hand.

    for part i of n:   x' = part i of x ──► ops at part shapes ──► y' ──► stack ──► y        cut, and put together
                                                              └──► s' ──► + ───► carry ──► s  added up in place

The loops are the graph's own (`ir.Loop`): how their tensors lie on devices, their collectives, their lowering to
``lax.scan``, estimates and proofs are those of a stack of layers. Ops keep their paths and the names of their factors, so
that the plan's decisions in space hold for the parts.
"""

import dataclasses

from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph, Op
from jscaler.primitives import Decision, Plan, Trans
from jscaler.primitives.reopen import cut_op
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.part_loop import in_loops
from jscaler.schedule.time_axes import TimeAxes, time_axes
from jscaler.schedule.turns import in_turns
from jscaler.schedule.unrolled import unrolled


def timed(graph: Graph, plan: Plan, book: RuleBook, bodies: BodyTable) -> tuple[Graph, Plan]:
    """``graph``, whose backward ops have bodies, with the loops of the plan's time axes, and the plan in space.

    Raises:
        PlanError: an op that the plan splits in time cannot be.
        OrderError: cells cannot run in the order that the plan says.
    """
    axes = time_axes(graph, plan)
    opened = _sums_alone(graph, axes, book, bodies)
    graph, axes = (opened, time_axes(opened, plan)) if opened is not graph else (graph, axes)
    of_model = set(graph.loops)
    for number, name in enumerate(axes.names):
        if not all(map(axes.in_loops, axes.names[: number + 1])):  # a loop would run over the parts around it
            graph, axes = unrolled(graph, axes, number, book, bodies)
            continue
        around = graph.loops.keys() - of_model  # axes further out, in whose iterations this one stands
        graph = in_loops(graph, axes, name, book, bodies, around)
        graph, in_space = in_turns(graph, axes.plan, axes.turns, name, bodies)
        axes = dataclasses.replace(axes, plan=in_space)
    return graph, _of_parts(axes.plan, graph) if axes.names else axes.plan


def _sums_alone(graph: Graph, axes: TimeAxes, book: RuleBook, bodies: BodyTable) -> Graph:
    """``graph`` with backward ops cut where what they sum over parts is then cast, say: the sum runs part by part.

    So it does for parameters in 32 bits that ops of 16 bits read through a cast: their gradient is cast back once.
    """
    ops: list[Op] = []
    for op in graph.ops:
        summing = op.forward is not None and op.forward.path not in axes.plan.alone
        along = {cut.factor for cut in axes.cuts.get(op.path, {}).values()} if summing else set()
        held = [f for f in book.rule(op).factors.values() if f.name in along and f.kind == "blocked"] if along else []
        opened = held and all(f.reopens for f in held)
        ops += cut_op(op, tuple(f.name for f in held), book, bodies) if opened else (op,)
    return dataclasses.replace(graph, ops=tuple(ops)) if len(ops) > len(graph.ops) else graph


def _of_parts(plan: Plan, graph: Graph) -> Plan:
    """``plan`` for ops that run part by part: what it leaves whole of a factor may be a single row, which is none."""

    def left(decision: Decision) -> Decision:
        if not isinstance(decision, Trans) or decision.op not in graph.by_path:
            return decision
        known = graph.rule(graph[decision.op]).factors
        axes = tuple(
            dataclasses.replace(a, factor=None) if a.parts == 1 and a.factor not in known else a for a in decision.axes
        )
        return dataclasses.replace(decision, axes=axes) if axes != decision.axes else decision

    return dataclasses.replace(plan, decisions=tuple(map(left, plan.decisions)))
