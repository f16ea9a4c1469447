"""Regions of recompute that a plan adds to those that there are: its own, a model's, or those of a plan inside.

layer            a    b    c    d          a region that reaches beyond the layer: b, and what stands behind it
computed again   a  |    | c    d          b is already; what the region makes of a may be read by d, so that stands apart
"""

from collections.abc import Iterable, Sequence

from jscaler.ir import Op, PTensor
from jscaler.ir.loop import chain_of, inside, made_by, reads_of
from jscaler.ir.op import RecomputeRegion
from jscaler.ir.walk import grouped
from jscaler.primitives import Planner


def recompute_rest(graph: Planner, ops: Sequence[Op], keep: Iterable[Op] = ()) -> None:
    """Compute ``ops`` again as one region; of others that reach beyond it, which are already, what these leave."""
    left = list(ops)
    while beyond := _reaching_beyond(graph, left):
        left = [op for op in left if beyond.isdisjoint(graph.regions[op.path])]
    cut = len(left) < len(ops) and len({op.loop for op in left}) == 1
    for row in rows_of(graph, left) if cut else [left]:
        if any(op.backward is not None for op in row):
            graph.recompute(row, keep=[op for op in keep if op in row])


def _reaching_beyond(graph: Planner, ops: Sequence[Op]) -> set[RecomputeRegion]:
    """The regions that hold some of ``ops``, and others too."""
    own = {op.path for op in ops}
    held = grouped((region, path) for path, regions in graph.regions.items() for region in regions)
    held = {region: set(paths) for region, paths in held.items()}
    return {region for region, paths in held.items() if paths & own and not paths <= own and not own <= paths}


def rows_of(graph: Planner, group: Sequence[Op]) -> list[list[Op]]:
    """``group``, of one loop, in rows such that what others make of one is read by later rows alone."""
    own = set(group)
    rows: dict[int, list[Op]] = {}
    mine: dict[PTensor, int] = {}  # what the group makes -> its row
    theirs: dict[PTensor, int] = {}  # what others make of that -> the first row that may read it
    for item in inside(graph.tree, chain_of(group[0].loop, graph.loops)):
        is_own = isinstance(item, Op) and item in own
        if not rows and not is_own:
            continue  # in front of all of it
        if sum(map(len, rows.values())) == len(own):
            break
        reads = list(reads_of(item))
        after = [theirs[t] for t in reads if t in theirs]
        if is_own:
            assert isinstance(item, Op)
            row = max([*after, *(mine[t] for t in reads if t in mine)], default=0)
            rows.setdefault(row, []).append(item)
            mine.update(dict.fromkeys(item.outputs, row))
        elif after := after + [mine[t] + 1 for t in reads if t in mine]:
            theirs.update(dict.fromkeys(made_by(item), max(after)))
    return [rows[row] for row in sorted(rows)]
