"""A region that is computed again lies on one device group, in one stage: what it has on another is a region of its own.

forward    group 0   x ──► f ──► h ┐                  h crosses, and group 1 keeps it
           group 1                 └──► g ──► y
backward   group 1   h ──► g' ─► …                    else group 0 would make h once more, and it would cross again
"""

import dataclasses

from jscaler.ir import Graph, Op
from jscaler.ir.name import group_mark
from jscaler.ir.op import RecomputeRegion
from jscaler.primitives import Plan
from jscaler.primitives.recompute_regions import with_ops
from jscaler.schedule.turns import Devices, stages_by_op

Stage = tuple[Devices, int | None]  # where, at each turn, and its number


def regions_by_stage(graph: Graph, plan: Plan) -> Graph:
    """``graph`` with regions of recompute cut between the stages, and the groups, on which ``plan`` places their ops."""
    where = stages_by_op(graph, plan)
    names: dict[tuple[RecomputeRegion, Stage | None], RecomputeRegion] = {}
    first: dict[RecomputeRegion, Stage | None] = {}
    changed: dict[str, Op] = {}
    for op in (op for op in graph.ops if op.kind == "forward" and where):
        known = where.get(op.path)
        for region in op.remat[:1]:
            if known != first.setdefault(region, known):
                name = region.name + group_mark([len(names) + 1])
                own = names.setdefault((region, known), dataclasses.replace(region, name=name))
                changed[op.path] = dataclasses.replace(op, remat=(own, *op.remat[1:]))
    return with_ops(graph, changed) if changed else graph
