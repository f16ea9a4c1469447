"""Ops of an update that hold a shard up: cut at their reductions, they work on the part of a gradient too.

    gradient (d, f), d in parts ──► squares ──► means over d: vectors, summed ──► outer product ──► (d, f), d in parts

So factored moments (Shazeer and Stern, Adafactor, 2018) and norms per row or column bring vectors together, not gradients.
"""

from collections.abc import Mapping

from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.kinds import origins
from jscaler.primitives.plan import Plan
from jscaler.rules.rule_book import RuleBook


def held_up(graph: Graph, plan: Plan, book: RuleBook) -> Mapping[str, tuple[str, ...]]:
    """Op path -> the blocked factors to open, of every op of the update that a shard of ``plan`` reaches and it blocks.

    All of an op that can be opened is, so that whatever cuts its inputs may stay.
    """
    found: dict[str, tuple[str, ...]] = {}
    reached = _gradients(graph, plan)
    for op in graph.ops if reached else ():
        names = _factors(op, reached, book) if op.kind == "update" and op.body is not None else set()
        if not names:
            continue
        rule = book.rule(op)
        if any(rule.factors[name].reopens for name in names):
            found[op.path] = tuple(name for name, factor in rule.factors.items() if factor.reopens)
        for tensor, dims in zip(op.outputs, rule.results, strict=True):
            reached.setdefault(tensor, set()).update(d for d, own in enumerate(dims) if names & set(own[:1]))
    return found


def _gradients(graph: Graph, plan: Plan) -> dict[PTensor, set[int]]:
    """The gradients of sharded parameters, with the dims that may be cut: any, where some of their devices hold copies."""
    dims = {
        graph.input(leaf): {shard.dim} if shard.parts == len(shard.devices) else set(range(len(graph.input(leaf).shape)))
        for leaf, shard in plan.shards.items()
    }
    pairs = [pair for call in graph.calls if dims for pair in zip(call.wrt, call.gradients, strict=True)]
    found = ((gradient, dims.keys() & origins(graph, wrt)) for wrt, gradient in pairs)
    return {gradient: set[int]().union(*(dims[leaf] for leaf in leaves)) for gradient, leaves in found if leaves}


def _factors(op: Op, reached: Mapping[PTensor, set[int]], book: RuleBook) -> set[str]:
    """The factors that dims in ``reached`` are in ``op``."""
    places = [(i, d) for i, tensor in enumerate(op.inputs) for d in reached.get(tensor, ())]
    operands = book.rule(op).operands if places else ()
    return {name for i, d in places for name in operands[i][d][:1]}
