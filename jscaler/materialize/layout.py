"""``Layout`` (RVD): how one PTensor lies on the devices of a mesh. Every axis is replicated, value-split, or cuts a dim.

R2 V1 D(4,1) on [0 1 2 3 4 5 6 7]      replicated twice, no value shares, dim 0 cut in four

A size that k parts do not divide is cut into blocks of ``ceil(size / k)``; the last ones are short or empty, and are
stored padded at the end. A cut may also have block sizes of its own (``uneven``), which are stored padded to the largest:

R1 V1 D(5+3,1) on [0 1]                 dim 0 of size 8 cut in two, after 5
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jax.sharding import PartitionSpec

from jscaler.ir.mask import Combiner, Mask, Share, SubDims
from jscaler.ir.place import MemorySpace
from jscaler.materialize.mesh import Axes, DeviceMesh

Values = tuple[tuple[str, Combiner], ...]
Uneven = tuple[tuple[int, tuple[int, ...]], ...]  # index of a sub-dim, sizes of its blocks


@dataclass(frozen=True)
class Layout:
    """An assignment of mesh axes. Axes that neither cut a sub-dim nor carry values replicate.

    Attributes:
        mesh: the devices and their axes; the order of members is the mesh's.
        subdims: the tensor's dims, each refined into sub-dims.
        cuts: per sub-dim (of all dims, in order) the ordered axes that cut it.
        values: the axes along which devices hold value shares, with their combiner; outermost first.
        memory: the memory space of every device's part.
        uneven: sub-dims with block sizes of their own, in order; made by ``with_sizes``, so that equal layouts are equal.
    """

    mesh: DeviceMesh
    subdims: SubDims
    cuts: tuple[Axes, ...]
    values: Values = ()
    memory: MemorySpace = "device"
    uneven: Uneven = ()

    @staticmethod
    def replicated(mesh: DeviceMesh, shape: tuple[int, ...]) -> "Layout":
        """A full copy on every device."""
        return Layout(mesh, tuple((s,) for s in shape), ((),) * len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(math.prod(dim) for dim in self.subdims)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sub-dim sizes in order: the shape of the refined view."""
        return tuple(s for dim in self.subdims for s in dim)

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The refined view of one device's part."""
        equal = [-(-s // self.mesh.size(axes)) for s, axes in zip(self.sizes, self.cuts, strict=True)]
        for index, blocks in self.uneven:
            equal[index] = max(blocks)
        return tuple(equal)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one device's part."""
        rest = iter(self.local_sizes)
        return tuple(math.prod(next(rest) for _ in dim) for dim in self.subdims)

    @property
    def free(self) -> Axes:
        """The axes that replicate."""
        used = {a for axes in self.cuts for a in axes} | {a for a, _ in self.values}
        return tuple(a for a in self.mesh.names if a not in used)

    @property
    def even(self) -> bool:
        """Whether every cut divides its size."""
        divides = all(s % self.mesh.size(axes) == 0 for s, axes in zip(self.sizes, self.cuts, strict=True))
        return divides and not self.uneven

    def block_sizes(self, index: int) -> tuple[int, ...]:
        """The sizes of the blocks that sub-dim ``index`` is cut into."""
        size, parts = self.sizes[index], self.mesh.size(self.cuts[index])
        return dict(self.uneven).get(index) or ceil_blocks(size, parts)

    def bounds(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop of every position's block of sub-dim ``index``."""
        place, size = self.mesh.coordinates(self.cuts[index]), self.sizes[index]
        blocks = dict(self.uneven).get(index)
        if blocks is None:
            local = -(-size // self.mesh.size(self.cuts[index]))
            return np.minimum(place * local, size), np.minimum((place + 1) * local, size)
        edges = np.cumsum([0, *blocks])
        return edges[place], edges[place + 1]

    def with_sizes(self, sizes: Mapping[int, tuple[int, ...]]) -> "Layout":
        """This layout with blocks of the given sizes, by sub-dim; the blocks of equal parts need no mention."""
        if not sizes:
            return self
        made = dict(self.uneven) | dict(sizes)
        for index, blocks in made.items():
            assert sum(blocks) == self.sizes[index], f"{blocks} are not the blocks of {self.sizes[index]}"
            assert len(blocks) == self.mesh.size(self.cuts[index]), f"{blocks} against {self.cuts[index]}"
        own = [(i, b) for i, b in sorted(made.items()) if b != ceil_blocks(self.sizes[i], len(b))]
        return dataclasses.replace(self, uneven=tuple(own))

    def uneven_rows(self, dim: int) -> tuple[Axes, tuple[int, ...]] | None:
        """The axes that cut ``dim`` into unequal runs of rows, and the number of rows of each; None for any other cut."""
        first = sum(map(len, self.subdims[:dim]))
        cuts = self.by_dim[dim]
        if not cuts or not cuts[0] or any(cuts[1:]):
            return None
        equal = self.sizes[first] % self.mesh.size(cuts[0]) == 0 and first not in dict(self.uneven)
        if equal or len(set(self.block_sizes(first))) == 1:
            return None
        minor = math.prod(self.subdims[dim][1:])
        return cuts[0], tuple(b * minor for b in self.block_sizes(first))

    @property
    def level(self) -> "Layout":
        """This layout with equal blocks in place of uneven ones."""
        return dataclasses.replace(self, uneven=())

    @property
    def by_dim(self) -> tuple[tuple[Axes, ...], ...]:
        """``cuts`` grouped by dim."""
        rest = iter(self.cuts)
        return tuple(tuple(next(rest) for _ in dim) for dim in self.subdims)

    def stacked(self, length: int) -> "Layout":
        """The layout of ``length`` such tensors under a dim in front, which is not cut."""
        uneven = tuple((index + 1, blocks) for index, blocks in self.uneven)
        return Layout(self.mesh, ((length,), *self.subdims), ((), *self.cuts), self.values, self.memory, uneven)

    def sliced(self) -> "Layout":
        """The layout of a slice along the first dim, which must be whole to be taken apart."""
        first = len(self.subdims[0])
        uneven = tuple((index - first, blocks) for index, blocks in self.uneven if index >= first)
        return Layout(self.mesh, self.subdims[1:], self.cuts[first:], self.values, self.memory, uneven)

    def partition_spec(self) -> PartitionSpec | None:
        """The PartitionSpec that says the same; None for value shares, uneven blocks and cuts on minor sub-dims."""
        if self.values or self.uneven:
            return None
        entries: list[Axes] = []
        for sizes, cuts in zip(self.subdims, self.by_dim, strict=True):
            joined: Axes = ()
            contiguous = True
            for size, axes in zip(sizes, cuts, strict=True):
                if axes and not contiguous:
                    return None
                joined += axes
                contiguous = contiguous and self.mesh.size(axes) == size
            entries.append(joined)
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in entries))

    def mask(self, position: int) -> Mask:
        """What the device at ``position`` of the mesh holds."""
        return _masks(self)[position]

    def blocks(self) -> np.ndarray:
        """For each position the number of the block and share that it holds: equal numbers hold equal data."""
        return self.mesh.coordinates((*(a for axes in self.cuts for a in axes), *(a for a, _ in self.values)))

    def refined(self, subdims: SubDims) -> "Layout | None":
        """The same layout seen over a finer refinement; None where a cut does not fall on the new boundaries."""
        cuts: list[Axes] = []
        uneven: dict[int, tuple[int, ...]] = {}
        index = 0
        for old, new, by in zip(self.subdims, subdims, self.by_dim, strict=True):
            rest = list(new)
            for size, axes in zip(old, by, strict=True):
                pieces = []
                while math.prod(pieces) < size:
                    pieces.append(rest.pop(0))
                assert math.prod(pieces) == size, f"{new} does not refine {old}"
                blocks = dict(self.uneven).get(index)
                if blocks is not None:
                    minor = math.prod(pieces[1:])
                    if any(b % minor for b in blocks):
                        return None
                    uneven[len(cuts)] = tuple(b // minor for b in blocks)
                dealt = self._deal(axes, pieces) if blocks is None else [axes] + [()] * (len(pieces) - 1)
                if dealt is None:
                    return None
                cuts += dealt
                index += 1
            cuts += [()] * len(rest)
        return dataclasses.replace(self, subdims=subdims, cuts=tuple(cuts), uneven=()).with_sizes(uneven)

    def _deal(self, axes: Axes, pieces: list[int]) -> list[Axes] | None:
        """Deal the axes of one sub-dim to the pieces it is refined into: each piece is filled before the next."""
        dealt: list[Axes] = []
        rest = list(axes)
        for piece in pieces:
            mine: list[str] = []
            while rest and piece % self.mesh.size((*mine, rest[0])) == 0:
                mine.append(rest.pop(0))
            if rest and self.mesh.size(tuple(mine)) != piece:
                return None
            dealt.append(tuple(mine))
        return None if rest else dealt

    @property
    def shares(self) -> tuple[tuple[int, Combiner], ...]:
        """(parts, combiner) of the nested value shares, outermost first; neighbours of one combiner together."""
        runs = [list(run) for _, run in itertools.groupby(self.values, key=lambda v: v[1])]
        return tuple((self.mesh.size(tuple(a for a, _ in run)), run[0][1]) for run in runs)

    @property
    def counts(self) -> str:
        """The layout without its devices: ``R2 V1 D(4,1)``."""
        parts = tuple(dict(self.uneven).get(i) or self.mesh.size(axes) for i, axes in enumerate(self.cuts))
        return counts_text(self.subdims, self.mesh.size(self.free), self.shares, parts)

    def __str__(self) -> str:
        order = (*self.free, *(a for a, _ in self.values), *(a for axes in self.cuts for a in axes))
        devices = self.mesh.groups(order).reshape(-1).tolist()
        where = "" if self.memory == "device" else f" @{self.memory}"
        return f"{self.counts} on [{_runs(devices)}]{where}"


def without_values(layout: Layout) -> Layout:
    """``layout`` with its value shares joined: the axes that carried them replicate."""
    return dataclasses.replace(layout, values=()) if layout.values else layout


def ceil_blocks(size: int, parts: int) -> tuple[int, ...]:
    """``size`` in blocks of ``ceil(size / parts)``, the last ones short or empty."""
    block = -(-size // parts)
    return tuple(max(0, min(block, size - i * block)) for i in range(parts))


def counts_text(
    subdims: SubDims,
    replicas: int,
    shares: Sequence[tuple[int, Combiner]],
    parts: Sequence[int | tuple[int, ...]],
) -> str:
    """``R2 V1 D(4,1)``: parts of refined dims and nested shares are joined by ``·``, uneven blocks by ``+``."""
    values = "·".join(f"{n}{'' if c == 'add' else c}" for n, c in shares if n > 1) or "1"
    rest = iter("+".join(map(str, p)) if isinstance(p, tuple) else str(p) for p in parts)
    dims = ",".join("·".join(next(rest) for _ in dim) for dim in subdims)
    return f"R{replicas} V{values} D({dims})"


def _runs(devices: Sequence[int]) -> str:
    """Device numbers; from 17 on, runs of neighbours as ``0-16``."""
    if len(devices) <= 16:
        return " ".join(map(str, devices))
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def common_subdims(a: SubDims, b: SubDims) -> SubDims | None:
    """The coarsest refinement of both, dim by dim; None where sizes do not match from the minor end."""
    result = []
    for mine, theirs in zip(a, b, strict=True):
        left, right = [s for s in mine if s > 1], [s for s in theirs if s > 1]
        found: list[int] = []
        while left and right:
            small, large = sorted((left[-1], right[-1]))
            if large % small:
                return None
            found.append(small)
            for side in (left, right):
                size = side.pop()
                if size != small:
                    side.append(size // small)
        result.append(tuple(found[::-1]) or (1,))
    return tuple(result)


def on_devices(layout: Layout, numbers: Mapping[int, int]) -> Layout:
    """``layout`` with its devices called by other numbers."""
    devices = tuple([numbers[device] for device in layout.mesh.devices])
    return dataclasses.replace(layout, mesh=dataclasses.replace(layout.mesh, devices=devices))


@lru_cache(maxsize=512)  # of large meshes each is a thousand masks
def _masks(layout: Layout) -> tuple[Mask, ...]:
    """What the device at each position holds; many ask for all, again and again."""
    edges = [zip(*(edge.tolist() for edge in layout.bounds(index)), strict=True) for index in range(len(layout.cuts))]
    boxes = zip(*edges, strict=True) if edges else itertools.repeat((), len(layout.mesh.devices))
    places = [layout.mesh.coordinates((axis,)).tolist() for axis, _ in layout.values]
    found = []
    for position, box in enumerate(boxes):
        rest = iter(box)
        shares = tuple(
            Share(place[position], layout.mesh.size(axis), combiner)
            for place, (axis, combiner) in zip(places, layout.values, strict=True)
        )
        found.append(Mask(layout.subdims, tuple(tuple(next(rest) for _ in dim) for dim in layout.subdims), shares))
    return tuple(found)
