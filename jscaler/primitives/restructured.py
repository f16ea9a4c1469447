"""A graph with other ops, loops and leaves than were captured, as decisions say: they come first in a plan."""

from collections.abc import Iterable

from jscaler.capture.bodies import BodyTable
from jscaler.capture.fuse import fuse
from jscaler.capture.loop_ranges import with_ranges
from jscaler.ir import Graph
from jscaler.primitives.leaf_parts import with_leaf_parts
from jscaler.primitives.plan import Decision, Fuse, LeafParts, LoopRanges


def restructured(graph: Graph, decisions: Iterable[Decision], bodies: BodyTable) -> Graph:
    """``graph`` with the ops fused that ``decisions`` fuse, and loops and leaves in the ranges that they say."""
    for decision in decisions:
        if isinstance(decision, Fuse):
            graph = fuse(graph, decision.ops, decision.path, bodies)
        elif isinstance(decision, LoopRanges):
            graph = with_ranges(graph, decision.loop, decision.sizes, bodies)
        elif isinstance(decision, LeafParts):
            graph = with_leaf_parts(graph, decision.leaves, decision.sizes, bodies)
    return graph
