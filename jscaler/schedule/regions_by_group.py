"""A region that is computed again lies on one device group: what it has on another is a region of its own.

forward    group 0   x ──► f ──► h ┐                  h crosses, and group 1 keeps it
           group 1                 └──► g ──► y
backward   group 1   h ──► g' ─► …                    else group 0 would make h once more, and it would cross again
"""

import dataclasses

from jscaler.ir import Graph, Op
from jscaler.ir.op import RecomputeRegion
from jscaler.primitives import Plan
from jscaler.primitives.recompute_regions import with_ops
from jscaler.schedule.turns import Devices, devices_by_op


def regions_by_group(graph: Graph, plan: Plan) -> Graph:
    """``graph`` with the regions of recompute whose ops ``plan`` places on several groups cut between these."""
    where = devices_by_op(graph, plan)
    names: dict[tuple[RecomputeRegion, Devices | None], RecomputeRegion] = {}
    first: dict[RecomputeRegion, Devices | None] = {}
    changed: dict[str, Op] = {}
    for op in (op for op in graph.ops if op.kind == "forward" and where):
        known = where.get(op.path)
        for region in op.remat[:1]:
            if known != first.setdefault(region, known):
                name = f"{region.name}@{len(names) + 1}"
                own = names.setdefault((region, known), dataclasses.replace(region, name=name))
                changed[op.path] = dataclasses.replace(op, remat=(own, *op.remat[1:]))
    return with_ops(graph, changed) if changed else graph
