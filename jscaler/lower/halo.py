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


def extend(edges: Sequence[Edge], local: Any, mesh: DeviceMesh) -> Any:
    """``local`` with the rows around it that its neighbours hold."""
    for edge in edges:
        local = _extend_dim(edge, local, mesh)
    return local


def _extend_dim(edge: Edge, local: Any, mesh: DeviceMesh) -> Any:
    rows, parts = local.shape[edge.dim], mesh.size(edge.axes)
    before, after = [], []
    for hop in hops(edge, rows, parts):
        start = rows - hop.rows if hop.shift > 0 else 0
        sent = lax.slice_in_dim(local, start, start + hop.rows, axis=edge.dim)
        names, order = _members(mesh, edge.axes)
        pairs = [(order[p], order[p + hop.shift]) for p in range(parts) if 0 <= p + hop.shift < parts]
        received = lax.ppermute(sent, axis_names(names), pairs)
        if hop.shift > 0:
            before.insert(0, received)
        else:
            after.append(received)
    beyond = [edge.before - sum(x.shape[edge.dim] for x in before), edge.after - sum(x.shape[edge.dim] for x in after)]
    outer = [jnp.zeros((*local.shape[: edge.dim], n, *local.shape[edge.dim + 1 :]), local.dtype) for n in beyond]
    pieces = [outer[0], *before, local, *after, outer[1]]
    return lax.concatenate([x for x in pieces if x.shape[edge.dim]], edge.dim)


def _members(mesh: DeviceMesh, axes: Axes) -> tuple[Axes, list[int]]:
    """The axes in the mesh's order, as ``ppermute`` wants them, and for each part its place along these."""
    names = tuple(n for n in mesh.names if n in axes)
    sizes = [mesh.size(n) for n in names]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose([names.index(a) for a in axes])
    return names, places.reshape(-1).tolist()
