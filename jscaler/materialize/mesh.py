"""``DeviceMesh``: logical devices in an order, under axes fine enough for every grid of a plan.

Grids of 2×4 and 4×2 cells over the same eight devices cut the device number at 4 and at 2; together they need axes of
2, 2 and 2. The axes are the coarsest common refinement of all the cuts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jscaler.errors import PlanError

Axes = tuple[str, ...]


@dataclass(frozen=True)
class DeviceMesh:
    """Devices, row-major over named axes.

    Attributes:
        devices: logical device numbers.
        axes: (name, size), major first; sizes multiply to the number of devices.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        assert math.prod(s for _, s in self.axes) == len(self.devices)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # layouts are looked up by it all the time; of numbers alone, so equal in every process
        return hash(self.devices)

    @cached_property
    def names(self) -> Axes:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def numbers(self) -> np.ndarray:
        """``devices`` as an array, not to be written to."""
        numbers = np.array(self.devices)
        numbers.setflags(write=False)
        return numbers

    @cached_property
    def positions(self) -> np.ndarray:
        """The positions in the order of the device numbers."""
        return np.argsort(self.numbers)

    @cached_property
    def table(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(self.axes)

    def size(self, axes: str | Axes) -> int:
        """Number of devices along an axis, or along several."""
        names = (axes,) if isinstance(axes, str) else axes
        return math.prod([self.table[name] for name in names])

    def coordinate(self, position: int, axes: Axes) -> int:
        """The index of the device at ``position`` along ``axes`` taken together, the first axis major."""
        return int(self.coordinates(axes)[position])

    def coordinates(self, axes: Axes) -> np.ndarray:
        """``coordinate`` of every position."""
        names, sizes = self.names, [size for _, size in self.axes]
        found = np.zeros([1] * len(names), int)
        for name in axes:
            index = np.arange(self.table[name]).reshape([-1 if n == name else 1 for n in names])
            found = found * self.table[name] + index
        return np.broadcast_to(found, sizes).reshape(-1)

    def groups(self, axes: Axes) -> np.ndarray:
        """The device numbers of each group along ``axes``: (groups, members), members in the order of ``axes``."""
        names = self.names
        array = self.numbers.reshape([size for _, size in self.axes])
        order = [names.index(n) for n in names if n not in axes] + [names.index(n) for n in axes]
        return array.transpose(order).reshape(-1, self.size(axes))


@dataclass(frozen=True)
class PlacedGrid:
    """The devices of one op's grid: row-major, one per cell. Grids of the same shape and devices are equal."""

    op: str = field(compare=False)
    shape: tuple[int, ...]
    devices: tuple[int, ...]


Covered = dict[PlacedGrid, tuple[Axes, ...]]


class OnMesh(NamedTuple):
    """Where a grid lies: the mesh of its group, and the mesh axes that each of its axes covers."""

    mesh: DeviceMesh
    axes: tuple[Axes, ...]


def common_mesh(grids: Sequence[PlacedGrid], devices: tuple[int, ...]) -> tuple[DeviceMesh, Covered]:
    """The mesh of a group of ``devices``, and for each grid the mesh axes that each of its axes covers.

    Raises:
        PlanError: device orders that no common mesh can express.
    """
    distinct = list(dict.fromkeys(grids))
    found = find_common_mesh(distinct, devices)
    if found is not None:
        return found
    raise PlanError(
        "the plan's device arrays share no common mesh: "
        + "; ".join(f"'{g.op}' {g.shape} on {list(g.devices)}" for g in distinct[:4])
        + ". Use reshapes and transposes of one device array"
    )


def find_common_mesh(grids: Sequence[PlacedGrid], devices: tuple[int, ...]) -> tuple[DeviceMesh, Covered] | None:
    """The coarsest mesh in which all ``grids`` over ``devices`` are regular, if there is one.

    The device order is ``devices`` or else that of the first grid whose order makes all others regular.
    """
    for order in dict.fromkeys([devices, *(g.devices for g in grids)]):
        rank = {d: i for i, d in enumerate(order)}
        strides = {g: _strides([rank[d] for d in g.devices], g.shape) for g in grids}
        if all(s is not None for s in strides.values()):
            cuts = _cuts([(g, s) for g, s in strides.items() if s is not None], len(devices))
            if cuts is not None:
                return _mesh(order, cuts, {g: s for g, s in strides.items() if s is not None})
    return None


def _strides(ranks: list[int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The stride of each axis, if the device numbers are regular along it; None otherwise."""
    if not shape:
        return () if ranks[0] == 0 else None
    array = np.array(ranks).reshape(shape)
    strides = []
    for axis, size in enumerate(shape):
        first = [0] * len(shape)
        first[axis] = 1
        strides.append(int(array[tuple(first)] - array.flat[0]) if size > 1 else 0)
    index = np.indices(shape).reshape(len(shape), -1)
    regular = np.array(strides, dtype=int) @ index
    return tuple(strides) if ranks[0] == 0 and (regular == np.array(ranks)).all() else None


def _cuts(grids: Sequence[tuple[PlacedGrid, tuple[int, ...]]], num_devices: int) -> list[int] | None:
    """Where the device number is cut: each cut divides the next."""
    cuts = {1, num_devices}
    for grid, strides in grids:
        for size, stride in zip(grid.shape, strides, strict=True):
            if size > 1:
                cuts |= {stride, stride * size}
    ordered = sorted(cuts)
    return ordered if all(b % a == 0 for a, b in itertools.pairwise(ordered)) else None


def _mesh(
    order: tuple[int, ...], cuts: list[int], strides: dict[PlacedGrid, tuple[int, ...]]
) -> tuple[DeviceMesh, dict[PlacedGrid, tuple[Axes, ...]]]:
    spans = list(itertools.pairwise(cuts))[::-1]  # major first
    names = [f"x{i}" for i in range(len(spans))]
    mesh = DeviceMesh(order, tuple((n, high // low) for n, (low, high) in zip(names, spans, strict=True)))

    def covered(stride: int, size: int) -> Axes:
        inside = (n for n, (low, high) in zip(names, spans, strict=True) if stride <= low and high <= stride * size)
        return tuple(inside) if size > 1 else ()

    table = {g: tuple(covered(stride, size) for stride, size in zip(s, g.shape, strict=True)) for g, s in strides.items()}
    return mesh, table
