"""A halo exchange as ``lax`` operations, inside ``jax.shard_map``: edge rows go to the neighbours by ``ppermute``.

Dims are extended one after the other, so that the corners of a grid of parts travel with the second dim. A part at the
border of the whole receives nothing there, which ``ppermute`` makes zeros.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jscaler.lower.members import axis_names
from jscaler.materialize.edges import Edge, hops
from jscaler.materialize.mesh import Axes, DeviceMesh


def extend(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, layout_mesh: DeviceMesh) -> Any:
    """``local``, a part of what lies on ``layout_mesh``, with the rows around it that its neighbours hold.

    Args:
        mesh: the mesh that the program runs over.
    """
    for edge in edges:
        local = _extend_dim(edge, local, mesh, layout_mesh)
    return local


def _extend_dim(edge: Edge, local: Any, mesh: DeviceMesh, layout_mesh: DeviceMesh) -> Any:
    rows, parts = local.shape[edge.dim], mesh.size(edge.axes)
    names, groups = _members(mesh, layout_mesh, edge.axes)
    before, after = [], []
    for hop in hops(edge, rows, parts):
        start = rows - hop.rows if hop.shift > 0 else 0
        sent = lax.slice_in_dim(local, start, start + hop.rows, axis=edge.dim)
        near = [p for p in range(parts) if 0 <= p + hop.shift < parts]
        pairs = [(order[p], order[p + hop.shift]) for order in groups for p in near]
        received = lax.ppermute(sent, axis_names(names), pairs)
        if hop.shift > 0:
            before.insert(0, received)
        else:
            after.append(received)
    beyond = [edge.before - sum(x.shape[edge.dim] for x in before), edge.after - sum(x.shape[edge.dim] for x in after)]
    outer = [jnp.zeros((*local.shape[: edge.dim], n, *local.shape[edge.dim + 1 :]), local.dtype) for n in beyond]
    pieces = [outer[0], *before, local, *after, outer[1]]
    return lax.concatenate([x for x in pieces if x.shape[edge.dim]], edge.dim)


def _members(mesh: DeviceMesh, layout_mesh: DeviceMesh, axes: Axes) -> tuple[Axes, list[list[int]]]:
    """The axes in the mesh's order, as ``ppermute`` wants them, and for each part its place along these.

    In another order than the mesh's all axes, and the places by the groups that hold the parts.
    """
    if layout_mesh != mesh:
        position = {device: i for i, device in enumerate(mesh.devices)}
        return mesh.names, [[position[d] for d in group] for group in layout_mesh.groups(axes).tolist()]
    names = tuple(n for n in mesh.names if n in axes)
    sizes = [mesh.size(n) for n in names]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose([names.index(a) for a in axes])
    return names, [places.reshape(-1).tolist()]
