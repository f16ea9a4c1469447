"""A graph with other ops, loops and leaves than were captured, as decisions say: they come first in a plan."""

from collections.abc import Iterable

from jscaler.capture.bodies import BodyTable
from jscaler.capture.fuse import fuse
from jscaler.capture.loop_ranges import with_ranges
from jscaler.ir import Graph
from jscaler.primitives.leaf_parts import with_leaf_parts
from jscaler.primitives.plan import Decision, Fuse, LeafParts, LoopRanges


def restructured(graph: Graph, decisions: Iterable[Decision], bodies: BodyTable) -> Graph:
    """``graph`` with the ops fused that ``decisions`` fuse, and loops and leaves in the ranges that they say.

    What a policy has made of a graph is not made again where its plan is carried out.
    """
    for decision in decisions:
        if isinstance(decision, (Fuse, LoopRanges, LeafParts)):
            key, memo = ("restructured", decision), graph.memo
            if key not in memo:
                memo[key] = _carried_out(graph, decision, bodies)
            graph = memo[key]
    return graph


def _carried_out(graph: Graph, decision: Fuse | LoopRanges | LeafParts, bodies: BodyTable) -> Graph:
    if isinstance(decision, Fuse):
        return fuse(graph, decision.ops, decision.path, bodies)
    if isinstance(decision, LoopRanges):
        return with_ranges(graph, decision.loop, decision.sizes, bodies)
    return with_leaf_parts(graph, decision.leaves, decision.sizes, bodies)
