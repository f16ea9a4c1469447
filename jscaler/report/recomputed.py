"""What is computed again for the backward pass, region by region, and what is kept instead."""

import math
from collections.abc import Sequence

from jscaler.errors import listing
from jscaler.ir import Graph, Op
from jscaler.ir.loop import chain_of
from jscaler.ir.op import RecomputeRegion
from jscaler.ir.walk import grouped
from jscaler.text.folding import folded


def recomputed_lines(graph: Graph) -> list[str]:
    """A line per group of like regions, layer numbers as ``*``: how many ops run once more, and which results are kept."""
    clones = grouped((op.again.remat[0], op) for op in graph.ops if op.again is not None)
    groups = grouped((folded(region.name), region) for region in clones)
    return [_line(graph, name, regions, clones) for name, regions in groups.items()]


def _line(graph: Graph, name: str, regions: Sequence[RecomputeRegion], clones: dict[RecomputeRegion, list[Op]]) -> str:
    times = sum(math.prod(graph.loops[n].length for n in chain_of(r.loop, graph.loops)) for r in regions)
    ops = [op for op in graph.ops if op.kind == "forward" and op.remat[:1] and op.remat[0] in regions]
    most = max(len(clones[region]) for region in regions)
    kept = list(dict.fromkeys(folded(op.path) for op in ops if op.kept))
    what = f"what enters it, and {listing(kept)}" if kept else "what enters it"
    return f"computed again in the backward pass: {name} ×{times}, {most} of {len(ops) // len(regions)} ops; kept: {what}"
