"""Inputs whose layout is given: those that a plan stores, and how the layouts of one plan are told to another."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jscaler.errors import PlanError, UnknownNameError
from jscaler.ir import Graph, PTensor
from jscaler.materialize.layout import Layout, without_values
from jscaler.materialize.mesh import DeviceMesh, OnMesh, PlacedGrid
from jscaler.primitives import Plan, Store


def stored_grids(store: Store) -> list[PlacedGrid]:
    """The devices of a stored input, as meshes have to express them; one grid for all inputs that lie on the same."""
    return [PlacedGrid("the inputs that are stored", store.grid, own) for own in (store.devices, *store.elsewhere)]


def stored_inputs(plan: Plan) -> list[Store]:
    """What the plan says of where inputs lie."""
    return [d for d in plan.decisions if isinstance(d, Store)]


def stored_layouts(graph: Graph, plan: Plan, grids: Mapping[PlacedGrid, OnMesh]) -> dict[PTensor, Layout]:
    """The layout of every input that the plan stores; ``grids`` says where its grids lie.

    Raises:
        UnknownNameError: the graph has no such input.
        PlanError: its dims are not those that are cut, or do not divide.
    """
    inputs = {t.name: t for t in graph.inputs}
    found: dict[PTensor, Layout] = {}
    for store in stored_inputs(plan):
        if store.leaf not in inputs:
            raise UnknownNameError("input", store.leaf, inputs, " (the plan stores it)")
        tensor, (mesh, axes) = inputs[store.leaf], grids[stored_grids(store)[0]]
        cuts = tuple(tuple(a for i in cut for a in axes[i]) for cut in store.cuts)
        if len(cuts) != len(tensor.shape):
            raise PlanError(f"'{store.leaf}' of shape {tensor.shape} is stored as a tensor of {len(cuts)} dims: {store}")
        layout = dataclasses.replace(Layout.replicated(mesh, tensor.shape), cuts=cuts)
        if not layout.even:
            raise PlanError(f"'{store.leaf}' of shape {tensor.shape} does not divide into the parts of {store}")
        found[tensor] = layout
    return found


def store_of(leaf: str, layout: Layout, elsewhere: Sequence[Layout] = ()) -> Store:
    """The decision that another plan stores input ``leaf`` in a storable ``layout``, and alike on other groups."""
    assert layout.partition_spec() is not None, f"no array can lie as {layout}"
    names = layout.mesh.names
    cuts = tuple(tuple(names.index(a) for axes in dim for a in axes) for dim in layout.by_dim)
    grid = tuple(size for _, size in layout.mesh.axes)
    assert math.prod(grid) == len(layout.mesh.devices)
    return Store(leaf, grid, layout.mesh.devices, cuts, tuple(other.mesh.devices for other in elsewhere))


def storable(layout: Layout, group: DeviceMesh, elsewhere: bool = False) -> Layout:
    """A layout that a jax.Array can have: no value shares, and cuts that a PartitionSpec can say.

    Args:
        group: the mesh in whose order the devices stand.
        elsewhere: whether cuts of a dim that does not divide are made along another that does, rather than nowhere.
    """
    plain = without_values(dataclasses.replace(layout, mesh=group))
    if not plain.even and elsewhere:
        plain = _divided_elsewhere(plain)
    return plain if plain.even and plain.partition_spec() is not None else Layout.replicated(group, layout.shape)


def _divided_elsewhere(layout: Layout) -> Layout:
    """``layout`` with the axes that cut dims into unequal parts on dims that they divide, the last first."""
    unequal = {i for i, axes in enumerate(layout.cuts) if layout.sizes[i] % layout.mesh.size(axes)} | {*dict(layout.uneven)}
    cuts = [() if i in unequal else axes for i, axes in enumerate(layout.cuts)]
    for index in unequal:
        axes = layout.cuts[index]
        free = (i for i in reversed(range(len(cuts))) if not cuts[i] and i not in unequal)
        other = next((i for i in free if layout.sizes[i] % layout.mesh.size(axes) == 0), None)
        if other is not None:
            cuts[other] = axes
    return dataclasses.replace(layout, cuts=tuple(cuts), uneven=())
