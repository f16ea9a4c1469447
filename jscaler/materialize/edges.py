"""Halos: the rows beyond its own part that an op reads of an operand, and the messages that bring them.

part        0         1         2          before 3, after 1; parts of 2 rows
rows       0 1       2 3       4 5
extended ···0 1 2  ·0 1 2 3 4  1 2 3 4 5 ·    2 from the neighbour, 1 from the next; nothing (zero) beyond the border
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jscaler.clusters import CostModel
from jscaler.ir import Rule
from jscaler.ir.mask import Mask
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh


@dataclass(frozen=True)
class Edge:
    """One dim of which rows are read beyond a part's own.

    Attributes:
        dim: of the tensor.
        axes: the mesh axes that cut it, major first.
        before, after: how many rows.
    """

    dim: int
    axes: Axes
    before: int
    after: int

    def __str__(self) -> str:
        return f"dim {self.dim}: {self.before} before, {self.after} after"


@dataclass(frozen=True)
class Hop:
    """Rows sent to the part that lies ``shift`` parts further (back, where negative)."""

    shift: int
    rows: int


def edges_of(rule: Rule, factors: dict[str, Axes], index: int) -> tuple[Edge, ...]:
    """The edges at which an op reads beyond its part of operand ``index``; ``factors`` are the axes of its splits."""
    return tuple(
        Edge(dim, factors[name], halo.before, halo.after)
        for (name, operand, dim), halo in sorted(rule.halos.items(), key=lambda item: item[0][1:])
        if operand == index and factors.get(name)
    )


def hops(edge: Edge, rows: int, parts: int) -> list[Hop]:
    """The messages that fill an edge of parts of ``rows`` rows: more than one where the halo is larger than a part."""
    found = []
    for sign, wanted in ((1, edge.before), (-1, edge.after)):
        for distance in range(1, min(parts - 1, -(-wanted // rows)) + 1):
            found.append(Hop(sign * distance, min(rows, wanted - (distance - 1) * rows)))
    return found


def neighbours(mesh: DeviceMesh, axes: Axes, shift: int) -> np.ndarray:
    """The messages of a hop: (messages, 2) device numbers of sender and receiver."""
    groups = mesh.groups(axes)
    count = groups.shape[1]
    senders = [p for p in range(count) if 0 <= p + shift < count]
    return np.stack([groups[:, senders], groups[:, [p + shift for p in senders]]], axis=-1).reshape(-1, 2)


def extended_shape(layout: Layout, edges: Sequence[Edge]) -> tuple[int, ...]:
    """The local shape with the rows of the edges."""
    shape = list(layout.local_shape)
    for edge in edges:
        shape[edge.dim] += edge.before + edge.after
    return tuple(shape)


def messages(layout: Layout, edges: Sequence[Edge]) -> Iterator[tuple[np.ndarray, int]]:
    """Each hop's (sender, receiver) pairs and the elements of one message; later edges carry the corners of earlier."""
    for number, edge in enumerate(edges):
        shape = extended_shape(layout, edges[:number])
        row = int(np.prod([s for d, s in enumerate(shape) if d != edge.dim], dtype=int))
        for hop in hops(edge, shape[edge.dim], layout.mesh.size(edge.axes)):
            yield neighbours(layout.mesh, edge.axes, hop.shift), hop.rows * row


def halo_cost(layout: Layout, edges: Sequence[Edge], itemsize: int, cost: CostModel) -> float:
    """In the cost model's unit."""
    count = len(layout.mesh.devices)
    return sum(cost.messages(pairs, elements * itemsize, count) for pairs, elements in messages(layout, edges))


def halo_bytes(layout: Layout, edges: Sequence[Edge], itemsize: int) -> list[float]:
    """Per hop the bytes that each device sends, in the mean."""
    count = len(layout.mesh.devices)
    return [len(pairs) * elements * itemsize / count for pairs, elements in messages(layout, edges)]


def extended_mask(mask: Mask, edges: Sequence[Edge]) -> Mask:
    """A part with the rows around it, as far as the whole has them."""
    subdims, box = list(mask.subdims), list(mask.box)
    for edge in edges:
        sizes, intervals = subdims[edge.dim], box[edge.dim]
        size = int(np.prod(sizes, dtype=int))
        row = size // sizes[0]  # only the major sub-dim is cut
        start, stop = (end * row for end in intervals[0])
        subdims[edge.dim] = (size,)
        box[edge.dim] = ((max(0, start - edge.before), min(size, stop + edge.after)),)
    return Mask(tuple(subdims), tuple(box), mask.shares)
