"""Device groups: the devices that ops lie on, each group with a mesh of its own; and which group every op runs on.

Grids on the same set of devices share a group, whatever their order: its mesh has axes fine enough for all of them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.walk import closure
from jscaler.materialize.mesh import Axes, DeviceMesh, PlacedGrid, common_mesh, find_common_mesh
from jscaler.materialize.placement import Decided, placed_grids
from jscaler.materialize.shards import shard_grid
from jscaler.materialize.stored import stored_grid, stored_inputs
from jscaler.primitives import OnDevices, Plan


@dataclass(frozen=True)
class Groups:
    """The device groups of a plan.

    Attributes:
        meshes: a mesh for each, in the order in which the plan names them; of a plan that names none, that of all devices.
        covered: for each grid of the plan, the mesh axes that each of its axes covers.
        of: op path -> the group that the plan gives it.
    """

    meshes: tuple[DeviceMesh, ...]
    covered: Mapping[PlacedGrid, tuple[Axes, ...]]
    of: Mapping[str, DeviceMesh]


def find_groups(plan: Plan, decided: Mapping[str, Decided]) -> Groups:
    """The groups on which ``plan`` places ops, and lays state.

    Raises:
        PlanError: device orders of one group that no common mesh can express.
    """
    grids = placed_grids(decided)
    ordered = [g for p, g in grids.items() if not decided[p].any_order]
    ordered += map(shard_grid, plan.shards.values())
    ordered += map(stored_grid, stored_inputs(plan))
    free = [g for p, g in grids.items() if decided[p].any_order]
    open_ = [d for d in plan.decisions if isinstance(d, OnDevices)]
    named = dict.fromkeys((*(g.devices for g in (*ordered, *free)), *(d.devices for d in open_)))
    sets = {devices: frozenset(devices) for devices in named}
    names = dict.fromkeys(sets.values()) or {frozenset(range(plan.num_devices)): None}
    covered: dict[PlacedGrid, tuple[Axes, ...]] = {}
    meshes: dict[frozenset[int], DeviceMesh] = {}
    for devices in names:
        own, any_order = ([g for g in which if sets[g.devices] == devices] for which in (ordered, free))
        meshes[devices], found = _mesh_of(own, any_order, tuple(sorted(devices)))
        covered |= found
    of = {path: meshes[sets[d.devices]] for d in open_ for path in d.ops}
    of |= {path: meshes[sets[grid.devices]] for path, grid in grids.items()}
    return Groups(tuple(meshes.values()), covered, of)


def _mesh_of(
    ordered: Sequence[PlacedGrid], free: Sequence[PlacedGrid], devices: tuple[int, ...]
) -> tuple[DeviceMesh, dict[PlacedGrid, tuple[Axes, ...]]]:
    """Grids in any order cut the devices as the others order them, if their cuts agree."""
    mesh, covered = common_mesh(ordered, devices)
    as_ordered = [dataclasses.replace(g, devices=mesh.devices) for g in free]
    return find_common_mesh([*ordered, *as_ordered], mesh.devices) or (mesh, covered)


def homes(graph: Graph, groups: Groups, pieces: Mapping[str, tuple[str, ...]]) -> dict[str, DeviceMesh]:
    """The group of every op. One that the plan does not place runs where its forward op does, or else its operands lie.

    A fence runs where what comes out of it is read, and so does what reads nothing that an op made (a key, a count).

    Args:
        pieces: path of an op that was cut -> paths of the ops that stand for it.
    """
    if len(groups.meshes) == 1:
        return dict.fromkeys(graph.by_path, groups.meshes[0])
    found = dict(groups.of)

    def like(op: Op | None) -> DeviceMesh | None:
        return None if op is None else next((found[p] for p in pieces.get(op.path, (op.path,)) if p in found), None)

    def settle(ops: Iterable[Op], neighbours: Callable[[Op], Iterable[Op | None]]) -> None:
        for op in ops:
            known = next(filter(None, map(like, neighbours(op))), None) if op.path not in found else None
            if known is not None:
                found[op.path] = known

    settle(graph.ops, lambda op: (op.forward, op.again))
    through = ThroughLoops(graph)
    fences = (op for op in reversed(graph.ops) if op.anywhere == "fence")
    settle(fences, lambda op: (reader for t in op.outputs for reader in through.readers(t)))
    settle(graph.ops, lambda op: map(through.maker, op.inputs))
    settle(reversed(graph.ops), lambda op: (reader for t in op.outputs for reader in through.readers(t)))
    return {op.path: found.get(op.path, groups.meshes[0]) for op in graph.ops}


class ThroughLoops:
    """Who makes and who reads a tensor, seen through the loops that hand it on."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._sources: dict[PTensor, tuple[PTensor, ...]] = {}
        self._targets: dict[PTensor, tuple[PTensor, ...]] = {}
        self._next = {c.init: c.out for loop in graph.loops.values() for c in loop.carries}
        for loop in graph.loops.values():
            pairs = [*((y.slice, y.stack) for y in loop.ys), *((x.stack, x.slice) for x in loop.xs)]
            pairs += [pair for c in loop.carries for pair in ((c.out, c.final), (c.inside, c.final), (c.init, c.inside))]
            for source, target in pairs:
                self._sources[target] = (*self._sources.get(target, ()), source)
                self._targets[source] = (*self._targets.get(source, ()), target)

    def maker(self, tensor: PTensor) -> Op | None:
        """The op that makes ``tensor``; of what a loop leaves, or finds, the op inside, or in front of it."""
        found = closure([tensor], lambda t: self._sources.get(t, ()))
        return next((self._graph.producer[t] for t in found if t in self._graph.producer), None)

    def readers(self, tensor: PTensor) -> Iterator[Op]:
        """The ops that read ``tensor``; of what a loop takes, or hands on, those that read it inside, or behind it.

        What a carry starts as that nobody reads inside is for who makes its next value.
        """
        for linked in closure([tensor], lambda t: self._targets.get(t, ())):
            yield from self._graph.consumers.get(linked, ())
        maker = self.maker(self._next[tensor]) if tensor in self._next else None
        if maker is not None:
            yield maker
