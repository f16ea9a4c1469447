"""``DeviceMesh``: logical devices in an order, under axes fine enough for every grid of a plan.

Grids of 2×4 and 4×2 cells over the same eight devices cut the device number at 4 and at 2; together they need axes of
2, 2 and 2. The axes are the coarsest common refinement of all the cuts. What a grid's axis counts may be several of them,
in any order: an order of the devices that is a transpose of another, 0 2 1 3 beside 0 1 2 3, lies on the same mesh.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jscaler.errors import PlanError

Axes = tuple[str, ...]
Digits = tuple[tuple[int, int], ...]  # (stride, size) in the device number, major first


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
    def unordered(self) -> tuple[frozenset[int], tuple[tuple[str, int], ...]]:
        """What is equal of meshes that differ in the order of their devices alone."""
        return frozenset(self.devices), self.axes

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


def by_devices(groups: Sequence[DeviceMesh]) -> dict[Any, DeviceMesh]:
    """`DeviceMesh.unordered` -> the first of ``groups`` on these devices, in whatever order."""
    return {group.unordered: group for group in reversed(groups)}


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

    An axis of a grid counts *digits* of the device number, in any order: 0 2 1 3 counts the minor of two major. The device
    order is ``devices`` or else that of a grid: the first in which each axis counts one digit, or else several.
    """
    found = None
    for order in dict.fromkeys([devices, *(g.devices for g in grids)]):
        rank = {d: i for i, d in enumerate(order)}
        digits = {g: own for g in grids if (own := _digits([rank[d] for d in g.devices], g.shape)) is not None}
        cuts = _cuts(digits, len(devices)) if len(digits) == len(set(grids)) else None
        if cuts is not None and all(len(counted) < 2 for own in digits.values() for counted in own):
            return _mesh(order, cuts, digits)
        if cuts is not None and found is None:
            found = _mesh(order, cuts, digits)
    return found


def _digits(ranks: list[int], shape: tuple[int, ...]) -> tuple[Digits, ...] | None:
    """What each axis counts, if the device numbers are regular along it; None otherwise."""
    array = np.array(ranks).reshape(shape)
    lines = [array[(*(0,) * axis, slice(None), *(0,) * (len(shape) - axis - 1))] for axis in range(len(shape))]
    regular = ranks[0] == 0 and (sum(np.ix_(*lines), np.zeros(shape, int)) == array).all()
    found = [_digits_of(line.tolist()) for line in lines] if regular else [None]
    return None if None in found else tuple(own for own in found if own is not None)


def _digits_of(line: list[int]) -> Digits | None:
    """The digits of numbers from 0 on, ``[0, 2, 1, 3]`` -> ``((1, 2), (2, 2))``; None where they are no such counting."""
    if len(line) == 1:
        return ()
    stride = line[1]
    size = next((i for i, number in enumerate(line) if number != i * stride), len(line))
    if stride < 1 or len(line) % size or any(line[i] != line[i % size] + line[i - i % size] for i in range(len(line))):
        return None
    major = _digits_of(line[::size])
    return None if major is None else (*major, (stride, size))


def _cuts(grids: Mapping[PlacedGrid, tuple[Digits, ...]], num_devices: int) -> list[int] | None:
    """Where the device number is cut: each cut divides the next."""
    cuts = {1, num_devices}
    for stride, size in itertools.chain.from_iterable(itertools.chain.from_iterable(grids.values())):
        cuts |= {stride, stride * size}
    ordered = sorted(cuts)
    return ordered if all(b % a == 0 for a, b in itertools.pairwise(ordered)) else None


def _mesh(
    order: tuple[int, ...], cuts: list[int], digits: Mapping[PlacedGrid, tuple[Digits, ...]]
) -> tuple[DeviceMesh, Covered]:
    spans = list(itertools.pairwise(cuts))[::-1]  # major first
    names = [f"x{i}" for i in range(len(spans))]
    mesh = DeviceMesh(order, tuple((n, high // low) for n, (low, high) in zip(names, spans, strict=True)))

    def covered(counted: Digits) -> Axes:
        inside = [(low, low * size) for low, size in counted]
        return tuple(
            name
            for start, stop in inside
            for name, (low, high) in zip(names, spans, strict=True)
            if start <= low < high <= stop
        )

    return mesh, {grid: tuple(map(covered, own)) for grid, own in digits.items()}
