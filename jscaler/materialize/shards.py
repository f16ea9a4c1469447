"""Where state lies that a plan shards: a layout that readers want, with one more cut.

layout that the readers want     R2 V1 D(4,1)      tensor parallelism cuts dim 0 in four
as a shard over the two rows     R1 V1 D(8,1)      the same dim, cut further
a gradient, as it is made        R1 V2 D(4,1)      value shares of the rows: one reduce-scatter away
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from jscaler.capture.accumulating import accumulating_loops
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.kinds import origins
from jscaler.materialize.layout import Layout, without_values
from jscaler.materialize.mesh import Axes, DeviceMesh, OnMesh, PlacedGrid
from jscaler.primitives import Plan, Shard
from jscaler.primitives.shard_checks import stored_leaves
from jscaler.rules.made_of import MadeOf, made_of


@dataclass(frozen=True)
class ShardCut:
    """A dim, and the axes of a group's mesh that cut it beyond what cuts it already.

    Attributes:
        elsewhere: other groups that use the tensor, each with the axes that cut it there.
    """

    dim: int
    axes: Axes
    group: DeviceMesh
    elsewhere: tuple[tuple[DeviceMesh, Axes], ...] = ()

    def on(self, group: DeviceMesh) -> Axes:
        """The axes that cut it on the devices of ``group``; none on those of another."""
        places = ((self.group, self.axes), *self.elsewhere)
        return next((axes for known, axes in places if known.unordered == group.unordered), ())

    def of(self, layout: Layout) -> Layout:
        """``layout`` with this cut, where its own parts divide; value shares along the axes are joined.

        Axes that cut some dim already stay where they are. What lies on other devices is not cut.
        """
        used = {a for cuts in layout.cuts for a in cuts}
        axes = tuple(a for a in self.on(layout.mesh) if a not in used)
        if not axes or layout.uneven:
            return layout
        values = tuple((a, c) for a, c in layout.values if a not in axes)
        first = sum(map(len, layout.subdims[: self.dim]))
        for index in range(first, first + len(layout.subdims[self.dim])):
            cuts = list(layout.cuts)
            cuts[index] += axes
            made = dataclasses.replace(layout, cuts=tuple(cuts), values=values)
            plain = without_values(made)
            if made.even and plain.partition_spec() is not None:
                return made
        return layout


@dataclass(frozen=True)
class Shards:
    """A plan's shards, tensor by tensor.

    Attributes:
        stored: parameters that lie in parts, and what is made of them alone, also in loops.
        whole: parameters that lie whole while their updates are split.
        gradients: final gradients of sharded parameters, and of stacks that are made of stored ones. Those that a loop
            makes are scattered slice by slice, inside the loop, so that no device holds a whole stack of them. Where a plan
            adds up over micro-batches each time, also the summands.
        made: what is made of stored parameters alone.
    """

    stored: Mapping[PTensor, ShardCut] = field(default_factory=dict)
    whole: frozenset[PTensor] = frozenset()
    gradients: Mapping[PTensor, ShardCut] = field(default_factory=dict)
    made: MadeOf = field(default_factory=MadeOf)
    cuts: Mapping[PTensor, ShardCut] = field(default_factory=dict)

    @property
    def axes(self) -> dict[PTensor, Axes]:
        """The axes that cut each parameter where it is stored."""
        return {leaf: cut.axes for leaf, cut in self.cuts.items()}

    def factor(self, op: Op, group: DeviceMesh) -> tuple[str, Axes]:
        """The factor of an op on ``group`` that is made for shards alone, and the axes that split it; none of another."""
        found = self.made.factors.get(op.path)
        axes = self.cuts[found[0]].on(group) if found is not None else ()
        return (found[1], axes) if found is not None and axes else ("", ())

    def gradient(self, tensor: PTensor, layout: Layout) -> Layout:
        """How ``tensor``, which is made in ``layout``, comes to its readers."""
        cut = self.gradients.get(tensor)
        return cut.of(layout) if cut is not None else layout

    def leaf(self, tensor: PTensor, layout: Layout) -> Layout:
        """How ``tensor`` lies whose first reader wants it in ``layout``."""
        cut = self.stored.get(tensor)
        return cut.of(layout) if cut is not None else layout


def shard_grids(shard: Shard) -> list[PlacedGrid]:
    """Where the parameter lies, as the meshes see it: first where it is stored, then on other stages that read it."""
    every = (shard.devices, *shard.elsewhere)
    return [PlacedGrid("shards", (shard.parts, len(devices) // shard.parts), devices) for devices in every]


def find_shards(graph: Graph, plan: Plan, grids: Mapping[PlacedGrid, OnMesh]) -> Shards:
    """What ``plan`` shards of ``graph``; ``grids`` says where its grids lie."""
    if not plan.shards:
        return Shards()
    cuts: dict[PTensor, ShardCut] = {}
    for leaf, shard in plan.shards.items():
        (group, axes), *others = ((grids[grid].mesh, grids[grid].axes[0]) for grid in shard_grids(shard))
        cuts[graph.input(leaf)] = ShardCut(shard.dim, axes, group, tuple(others))
    cuts |= {copy: cuts[tensor] for copy, tensor in graph.copy_of.items() if tensor in cuts}
    made = made_of(graph, stored_leaves(graph, plan))
    stored = {t: dataclasses.replace(cuts[leaf], dim=dim) for t, (leaf, dim) in made.dims.items()}
    gradients = _gradients(graph, cuts, stored)
    accumulating = accumulating_loops(graph)
    usual = plan.accumulation.each_time
    often = {graph.input(leaf) for leaf, s in plan.shards.items() if (usual if s.each_time is None else s.each_time)}
    if often and accumulating:
        own = {leaf: cut for leaf, cut in cuts.items() if leaf in often}
        made_often = {t: stored[t] for t, (leaf, _) in made.dims.items() if leaf in often}
        known = _gradients(graph, own, made_often) | _made_cotangents(graph, plan, own)
        gradients |= _summands(graph, known, accumulating)
    whole = frozenset(cuts.keys() - stored.keys())
    return Shards(stored, whole, gradients, made, cuts)


def _gradients(
    graph: Graph, cuts: Mapping[PTensor, ShardCut], stored: Mapping[PTensor, ShardCut]
) -> dict[PTensor, ShardCut]:
    """The final gradients of parameters, and of stacks that are made of stored ones."""
    found: dict[PTensor, ShardCut] = {}
    for call in graph.calls:
        for wrt, gradient in zip(call.wrt, call.gradients, strict=True):
            for leaf in cuts.keys() & origins(graph, wrt):
                found[gradient] = cuts[leaf]
    return found | _cast_stacks(graph, stored)


def _cast_stacks(graph: Graph, stored: Mapping[PTensor, ShardCut]) -> dict[PTensor, ShardCut]:
    """Gradients of stacks that are made of stored parameters (casts), which a loop stacks up layer by layer."""
    pairs = ((op.forward.outputs[i], t) for op in graph.ops if op.forward for i, t in op.cotangents)
    return {t: stored[made] for made, t in pairs if made in stored and graph.flow.sources(t, "stack")}


def _made_cotangents(graph: Graph, plan: Plan, cuts: Mapping[PTensor, ShardCut]) -> dict[PTensor, ShardCut]:
    """Cotangents of what is made of sharded parameters alone (casts), wherever these lie."""
    leaves = {graph.input(leaf): shard.dim for leaf, shard in plan.shards.items()}
    dims = made_of(graph, {leaf: dim for leaf, dim in leaves.items() if leaf in cuts}).dims
    pairs = ((op.forward.outputs[i], t) for op in graph.ops if op.forward for i, t in op.cotangents)
    return {t: dataclasses.replace(cuts[dims[made][0]], dim=dims[made][1]) for made, t in pairs if made in dims}


def _summands(graph: Graph, gradients: Mapping[PTensor, ShardCut], accumulating: frozenset[str]) -> dict[PTensor, ShardCut]:
    """What loops over micro-batches add up to ``gradients``, and the sums: they are scattered as they are made."""
    known = dict(gradients)
    for op in reversed(graph.ops):  # what is joined to a gradient behind the loop
        if op.kind == "backward" and op.forward is None and not op.anywhere and len(op.outputs) == 1:
            (made,) = op.outputs
            if made in known and all(t.shape == made.shape for t in op.inputs):
                known.update({t: known[made] for t in op.inputs if t not in known})
    found: dict[PTensor, ShardCut] = {}
    for name in accumulating:
        for carry in graph.loops[name].carries:
            maker = graph.producer.get(carry.out)
            if carry.is_sum and carry.final in known and maker is not None and maker.anywhere == "sum":
                found.update(dict.fromkeys((carry.final, maker.inputs[1]), known[carry.final]))
    return found
