"""Device groups: the devices that ops lie on, each group with a mesh of its own; and which group every op runs on.

Grids on the same set of devices share a group, in whatever order, if one mesh has axes fine enough for all of them, or
else meshes with the same axes, each over an order of its own: the first is the group's, in which state lies.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.inherited import inherited
from jscaler.ir.loop import chain_of
from jscaler.materialize.mesh import (
    DeviceMesh,
    OnMesh,
    PlacedGrid,
    by_devices,
    common_mesh,
    find_common_mesh,
)
from jscaler.materialize.op_stages import StageBy
from jscaler.materialize.placement import Decided, check_devices, decided_placements, placed_grids
from jscaler.materialize.shards import shard_grids
from jscaler.materialize.stored import stored_grids, stored_inputs
from jscaler.primitives import OnDevices, Plan


@dataclass(frozen=True)
class Groups:
    """The device groups of a plan.

    Attributes:
        meshes: a mesh for each, in the order in which the plan names them; of a plan that names none, that of all devices.
        grids: where each grid of the plan lies: on the mesh of a group, or on that in another order.
        of: op path -> the mesh that the plan gives it.
        stored: input -> the group that the plan stores it on, first, and others that have it, too.
        stages: op path -> the stage that it is of, where the plan has a schedule of these.
    """

    meshes: tuple[DeviceMesh, ...]
    grids: Mapping[PlacedGrid, OnMesh]
    of: Mapping[str, DeviceMesh]
    stored: Mapping[str, tuple[DeviceMesh, ...]]
    stages: Mapping[str, int] = field(default_factory=dict)

    def group_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The group on whose devices ``mesh`` lies, in whatever order."""
        return self._by_devices[mesh.unordered]

    @cached_property
    def _by_devices(self) -> dict[Any, DeviceMesh]:
        return by_devices(self.meshes)


def find_groups(plan: Plan, decided: Mapping[str, Decided]) -> Groups:
    """The groups on which ``plan`` places ops, and lays state."""
    grids = placed_grids(decided)
    shards = [shard_grids(shard) for shard in plan.shards.values()]
    elsewhere = [grid for _, *others in shards for grid in others]
    stored = {store.leaf: stored_grids(store) for store in stored_inputs(plan)}
    elsewhere += [grid for _, *others in stored.values() for grid in others]
    state = [first for first, *_ in (*shards, *stored.values())]
    ordered = [*state, *(g for p, g in grids.items() if not decided[p].any_order)]
    free = [g for p, g in grids.items() if decided[p].any_order]
    open_ = [d for d in plan.decisions if isinstance(d, OnDevices)]
    named = dict.fromkeys(own.devices for own in (*ordered, *free, *open_, *elsewhere))
    ordered += elsewhere
    sets = {devices: frozenset(devices) for devices in named}
    names = dict.fromkeys(sets.values()) or {frozenset(range(plan.num_devices)): None}
    found: dict[PlacedGrid, OnMesh] = {}
    meshes: dict[frozenset[int], list[DeviceMesh]] = {}
    lying: dict[frozenset[int], tuple[list[PlacedGrid], list[PlacedGrid]]] = {devices: ([], []) for devices in names}
    for number, which in enumerate((ordered, free)):
        for grid in which:
            lying[sets[grid.devices]][number].append(grid)
    for devices, (own, any_order) in lying.items():
        first, *others = _regular(list(dict.fromkeys(own)), tuple(sorted(devices)))
        turned = [other for other in others if {*state, *elsewhere}.isdisjoint(other)]
        mesh, covered = _mesh_of(first, any_order, turned, tuple(sorted(devices)))
        apart = [common_mesh(other, tuple(sorted(devices))) for other in others if other[0] not in covered]
        found |= covered
        found |= {grid: OnMesh(own_mesh, axes) for own_mesh, on_axes in apart for grid, axes in on_axes.items()}
        meshes[devices] = [mesh, *(own_mesh for own_mesh, _ in apart)]
    of = {path: meshes[sets[d.devices]][0] for d in open_ for path in d.ops}
    of |= {path: found[grid].mesh if grid in found else meshes[sets[grid.devices]][0] for path, grid in grids.items()}
    scheduled = open_ if plan.table is not None else []
    stages = {path: d.stage for d in scheduled if d.stage is not None for path in d.ops}
    lie = {leaf: tuple(found[grid].mesh for grid in own) for leaf, own in stored.items()}
    return Groups(tuple(mesh for own in meshes.values() for mesh in own), found, of, lie, stages)


def _regular(grids: Sequence[PlacedGrid], devices: tuple[int, ...]) -> list[list[PlacedGrid]]:
    """``grids`` over one set of devices, by meshes: orders that no common mesh can express are groups of their own."""
    if find_common_mesh(grids, devices) is not None:
        return [list(grids)]
    found: list[list[PlacedGrid]] = []
    for grid in grids:
        fits = next((own for own in found if find_common_mesh([*own, grid], devices) is not None), None)
        if fits is None:
            found.append([grid])
        else:
            fits.append(grid)
    return found


def _mesh_of(
    ordered: Sequence[PlacedGrid],
    free: Sequence[PlacedGrid],
    turned: Sequence[Sequence[PlacedGrid]],
    devices: tuple[int, ...],
) -> tuple[DeviceMesh, dict[PlacedGrid, OnMesh]]:
    """The mesh of a group, and where its grids lie: ``ordered`` ones, and others if their cuts agree with those.

    Args:
        free: grids in any order; they take the mesh's.
        turned: grids in other orders, by order; these lie on meshes of their own with the axes of the group's.
    """
    mesh, covered = common_mesh(ordered, devices)
    in_order = {grid: (grid, mesh.devices) for grid in ordered}
    alike = list(ordered)

    def join(grids: Sequence[PlacedGrid]) -> bool:
        nonlocal mesh, covered, alike
        joint = find_common_mesh([*alike, *grids], mesh.devices)
        if joint is None or joint[0].devices != mesh.devices:
            return False
        (mesh, covered), alike = joint, [*alike, *grids]
        return True

    join([dataclasses.replace(g, devices=mesh.devices) for g in free])
    for others in turned:
        order = common_mesh(others, devices)[0].devices
        place = dict(zip(order, mesh.devices, strict=True))
        back = [dataclasses.replace(g, devices=tuple(place[d] for d in g.devices)) for g in others]
        if join(back):
            in_order.update({grid: (own, order) for grid, own in zip(others, back, strict=True)})
    return mesh, {grid: OnMesh(DeviceMesh(order, mesh.axes), covered[own]) for grid, (own, order) in in_order.items()}


@dataclass(frozen=True)
class Home:
    """The group that an op runs on, and its stage, if it is of one.

    Attributes:
        why: of the group; empty where the plan says so.
        stage_by: what gives the stage: the plan, to the op, its forward op or its loop; what it reads; or who reads it.
    """

    group: DeviceMesh
    why: str = ""
    stage: int | None = None
    stage_by: StageBy | None = None


def homes(
    graph: Graph, groups: Groups, pieces: Mapping[str, tuple[str, ...]], known: Mapping[str, Home] = {}
) -> dict[str, Home]:
    """The group of every op, and its stage.

    Args:
        pieces: path of an op that was cut -> paths of the ops that stand for it.
        known: of ops, that were found before.
    """
    found = _groups_of_ops(graph, groups, pieces, known)
    stages = {path: home.stage for path, home in known.items() if home.stage is not None}
    for path, stage in inherited(graph, {**groups.stages, **stages}, pieces).items():
        if found[path].stage != stage:
            found[path] = dataclasses.replace(found[path], stage=stage, stage_by="plan")
    return found


def _groups_of_ops(
    graph: Graph, groups: Groups, pieces: Mapping[str, tuple[str, ...]], known: Mapping[str, Home]
) -> dict[str, Home]:
    """The group of every op.

    An op that the plan does not place runs where its forward op does. Else it runs on the group of its loop, if all ops in
    that have one group; else where the fewest bytes cross, counting its inputs and its readers that have a group. A fence
    runs where its results are read, and so does what reads no result of an op (a key, a count).
    """
    found = {path: Home(group) for path, group in groups.of.items()} | dict(known)
    if len({*groups.meshes, *groups.of.values()}) == 1:
        return {path: found.get(path, Home(groups.meshes[0])) for path in graph.by_path}

    def like(op: Op | None) -> Home | None:
        return None if op is None else next((found[p] for p in pieces.get(op.path, (op.path,)) if p in found), None)

    def settle(ops: Iterable[Op], why: str, neighbours: Callable[[Op], Iterable[Op | None]]) -> None:
        for op in ops:
            known = next(filter(None, map(like, neighbours(op))), None) if op.path not in found else None
            if known is not None:
                found[op.path] = Home(known.group, why)

    def nbytes(tensor: PTensor, reader: Op) -> int:
        """Of all iterations that make it and read it; what a loop leaves is read once."""
        around = set(chain_of(reader.loop, graph.loops)).intersection(chain_of(graph.homes.get(tensor), graph.loops))
        return tensor.nbytes * math.prod(graph.loops[name].length for name in around)

    def cheapest(op: Op) -> Home | None:
        makers = [(t, home.group) for t in op.inputs if (home := like(graph.flow.maker(t))) is not None]
        stores = [(t, lies[t]) for t in op.inputs if t in lies]
        uses = [(t, reader, home.group) for t in op.outputs for reader in graph.flow.readers(t) if (home := like(reader))]
        back = [(t, lies[version[t]]) for t in op.outputs if version.get(t) in lies]  # state leaves where it came in
        near_by = {group for _, group in (*makers, *stores)}
        if len(near_by.union(group for *_, group in (*uses, *back))) == 1 and near_by:
            return Home(near_by.pop(), "by its operands")
        read = {(t, group): nbytes(t, op) for t, group in makers} | {(t, group): t.nbytes for t, group in stores}
        made = {(t, group): t.nbytes for t, group in back}
        for tensor, reader, group in uses:
            made[tensor, group] = max(made.get((tensor, group), 0), nbytes(tensor, reader))
        lie: dict[DeviceMesh, int] = {}  # of what is sent, once to each group
        for (_, group), size in (read | made).items():
            lie[group] = lie.get(group, 0) + size
        total = {group: sum(lie.values()) - size for group, size in lie.items()}
        if not read:
            return None
        near = {group for t, group in read if graph.homes.get(t) == op.loop}
        readers = {group for _, group in made}
        here = min(total, key=lambda group: (total[group], group not in readers, group not in near))
        return Home(here, "by its operands" if here in {group for _, group in read} else "by its readers")

    settle(graph.ops, "as its forward", lambda op: (op.forward, op.again))
    left = [op for op in graph.ops if op.path not in found]
    if not left:
        return {op.path: found[op.path] for op in graph.ops}
    version = {graph.outputs[o]: graph.inputs[i] for o, i in graph.next_version.items()}
    at_ends = {end for op in left for end in (*op.inputs, *(version[t] for t in op.outputs if t in version))}
    inputs = [t for t in graph.inputs if t in at_ends]
    first = {t: next((h for r in _readers(graph, t) if (h := like(r)) is not None), None) for t in inputs}
    lies = {t: groups.group_of(home.group) for t, home in first.items() if home is not None}  # where it is read first
    lies |= {t: groups.stored[t.name][0] for t in inputs if t.name in groups.stored}
    by_parts = _groups_of_parts(graph, lies)
    lies |= by_parts
    for op in left:
        groups_of = {by_parts[version[t]] for t in op.outputs if version.get(t) in by_parts}
        if op.path not in found and len(groups_of) == 1:
            found[op.path] = Home(groups_of.pop(), "as its leaf's part")
    fences = (op for op in reversed(left) if op.anywhere == "fence")
    settle(fences, "by its readers", lambda op: (reader for t in op.outputs for reader in graph.flow.readers(t)))
    of_loop: dict[str, set[DeviceMesh]] = {name: set() for name in graph.loops}
    for op in graph.ops:
        for name in chain_of(op.loop, graph.loops) if op.path in found else ():
            of_loop[name].add(found[op.path].group)

    def as_its_loop(op: Op) -> Home | None:
        """Where the innermost loop around ``op`` runs of which something has a group, if that is one group."""
        own = next((of_loop[name] for name in chain_of(op.loop, graph.loops)[::-1] if of_loop[name]), ())
        return Home(next(iter(own)), "as its loop") if len(own) == 1 else None

    for op in left:
        if op.path not in found:
            home = as_its_loop(op) or cheapest(op)
            if home is not None:
                found[op.path] = home
                for name in chain_of(op.loop, graph.loops):
                    of_loop[name].update({home.group} if not of_loop[name] else ())
    for op in left:  # what stands in front of the first with a home: a loop's counter reads nothing that an op made
        if op.path not in found and (home := as_its_loop(op)) is not None:
            found[op.path] = home
    settle(reversed(left), "by its readers", lambda op: (reader for t in op.outputs for reader in graph.flow.readers(t)))
    return {op.path: found.get(op.path, Home(groups.meshes[0], "by default")) for op in graph.ops}


def _readers(graph: Graph, leaf: PTensor) -> Iterable[Op]:
    """The readers that say where a leaf, or a part of one, lies: those behind fences, and not what puts parts together."""
    for op in graph.flow.readers(leaf):
        made = dict(zip(op.inputs, op.outputs, strict=True)).get(leaf) if op.anywhere == "fence" else None
        if made is not None:
            yield from _readers(graph, made)
        elif op.ranges != "joined":
            yield op


def _groups_of_parts(graph: Graph, lies: Mapping[PTensor, DeviceMesh]) -> dict[PTensor, DeviceMesh]:
    """The groups of the parts of leaves: moments of a stack's ranges are kept where the parameters of these are.

    Parts of leaves in equal ranges go where those lie of which it is known, if all of them agree.
    """
    known: dict[tuple[tuple[int, ...], int], set[DeviceMesh]] = {}
    parts: list[tuple[PTensor, tuple[tuple[int, ...], int]]] = []
    start = 0
    for count in graph.leaf_parts:
        own = graph.inputs[start : start + count]
        start += count
        sizes = tuple(t.shape[0] for t in own) if count > 1 else ()
        for number, tensor in enumerate(own if count > 1 else ()):
            parts.append((tensor, (sizes, number)))
            known.setdefault((sizes, number), set()).update([lies[tensor]] if tensor in lies else [])
    return {tensor: next(iter(known[key])) for tensor, key in parts if len(known[key]) == 1}


@dataclass(frozen=True)
class OnGroups:
    """A graph on the device groups of a plan.

    Attributes:
        decided: what the plan decides on ops.
        groups: the plan's device groups.
        homes: op path -> the group that it runs on, its stage, and why.
        pieces: path of an op that was cut -> paths of the ops that stand for it.
        lies: inputs that are on several groups, and their copies -> the group of each.
    """

    graph: Graph
    decided: Mapping[str, Decided]
    groups: Groups
    homes: Mapping[str, Home]
    bodies: BodyTable = field(repr=False)
    pieces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lies: Mapping[PTensor, DeviceMesh] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.graph)

    @cached_property
    def of_op(self) -> dict[str, DeviceMesh]:
        """Op path -> the group that it runs on, in the order of its state."""
        return {path: self.groups.group_of(home.group) for path, home in self.homes.items()}

    @cached_property
    def of_part(self) -> dict[PTensor, DeviceMesh]:
        """Part of a leaf -> the group that it lies on, that of its first reader."""
        counts = self.graph.leaf_parts
        each = zip(self.graph.inputs, (n for n in counts for _ in range(n)), strict=False)
        parts = (t for t, n in each if n > 1 and t not in self.lies)
        first = ((t, next(iter(_readers(self.graph, t)), None)) for t in parts)
        return {t: self.of_op[op.path] for t, op in first if op is not None}

    def with_graph(
        self, graph: Graph, moved: Mapping[str, DeviceMesh] = {}, unsettled: Set[str] = frozenset()
    ) -> "OnGroups":
        """``graph``, which a pass has made of this one; itself, if it is the same.

        Args:
            moved: op path -> the group for which a pass has made the op, or to which it has moved it.
            unsettled: paths of ops that are as they were, and read what is made elsewhere now. All others stay.
        """
        if graph is self.graph:
            return self
        kept = (op for op in graph.ops if self.graph.by_path.get(op.path) is op and op.path not in unsettled)
        same = {op.path: self.homes[op.path] for op in kept}
        same |= {path: Home(group, "by its readers") for path, group in moved.items() if path not in self.groups.of}
        return dataclasses.replace(self, graph=graph, homes=homes(graph, self.groups, self.pieces, same))


def on_groups(graph: Graph, plan: Plan, bodies: BodyTable, pieces: Mapping[str, tuple[str, ...]] = {}) -> OnGroups:
    """Lay ``graph`` on the device groups of ``plan``.

    Args:
        pieces: path of an op that was cut -> paths of the ops that stand for it.

    Raises:
        UnknownNameError, PlanError: incomplete or contradictory decisions.
    """
    decided = decided_placements(graph, plan)
    check_devices(decided)
    groups = find_groups(plan, decided)
    return OnGroups(graph, decided, groups, homes(graph, groups, pieces), bodies, pieces)
