"""A halo exchange as ``lax`` operations, inside ``jax.shard_map``: edge rows go to the neighbours by ``ppermute``.

Dims are extended one after the other, so that the corners of a grid of parts travel with the second dim. A part at the
border of the whole receives nothing there, which ``ppermute`` makes zeros.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jscaler.lower.members import axis_names
from jscaler.materialize.edges import Edge, hops, neighbours
from jscaler.materialize.mesh import DeviceMesh


def extend(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, layout_mesh: DeviceMesh) -> Any:
    """``local``, a part of what lies on ``layout_mesh``, with the rows around it that its neighbours hold.

    Args:
        mesh: the mesh that the program runs over.
    """
    for edge in edges:
        local = _extend_dim(edge, local, mesh, layout_mesh)
    return local


def _extend_dim(edge: Edge, local: Any, mesh: DeviceMesh, layout_mesh: DeviceMesh) -> Any:
    rows, parts = local.shape[edge.dim], layout_mesh.size(edge.axes)
    position = {device: i for i, device in enumerate(mesh.devices)}
    before, after = [], []
    for hop in hops(edge, rows, parts):
        start = rows - hop.rows if hop.shift > 0 else 0
        sent = lax.slice_in_dim(local, start, start + hop.rows, axis=edge.dim)
        near = neighbours(layout_mesh, edge.axes, hop.shift).tolist()
        received = lax.ppermute(sent, axis_names(mesh.names), [(position[a], position[b]) for a, b in near])
        if hop.shift > 0:
            before.insert(0, received)
        else:
            after.append(received)
    beyond = [edge.before - sum(x.shape[edge.dim] for x in before), edge.after - sum(x.shape[edge.dim] for x in after)]
    outer = [jnp.zeros((*local.shape[: edge.dim], n, *local.shape[edge.dim + 1 :]), local.dtype) for n in beyond]
    pieces = [outer[0], *before, local, *after, outer[1]]
    return lax.concatenate([x for x in pieces if x.shape[edge.dim]], edge.dim)
