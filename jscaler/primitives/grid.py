"""``Grid``: the cells that ``op_trans`` made of an op. Indexing gives cells or sub-grids, as with an array."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from jscaler.errors import PlanError
from jscaler.ir import Graph, Op
from jscaler.ir.overview import clipped
from jscaler.primitives.algorithms import GridAxis
from jscaler.primitives.plan import Index


@dataclass(frozen=True)
class Grid:
    """A box of the grid of cells of one op. The whole grid, a sub-grid, and a single cell are all Grids.

    Attributes:
        op: the op that was split.
        axes: the axes of the whole grid.
        index: per axis the range of cells that this object stands for.
        pieces: what the op does, piece by piece, where splitting it so cuts it at its inner reductions: then every cell
            is a group of ops, which are placed together.
        chunks: the parts of every cell that run one after another in it.
        graph: the op's, which knows what its factors are.
    """

    op: Op
    axes: tuple[GridAxis, ...]
    index: Index
    pieces: tuple[str, ...] = ()
    chunks: tuple[GridAxis, ...] = ()
    graph: Graph | None = field(default=None, compare=False)

    @staticmethod
    def whole(
        op: Op,
        axes: tuple[GridAxis, ...],
        pieces: tuple[str, ...] = (),
        chunks: tuple[GridAxis, ...] = (),
        graph: Graph | None = None,
    ) -> "Grid":
        return Grid(op, axes, tuple((0, a.parts) for a in axes), pieces, chunks, graph)

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells along each axis."""
        return tuple(stop - start for start, stop in self.index)

    @property
    def space_shape(self) -> tuple[int, ...]:
        """Cells along each axis, those that share a device counted once."""
        return tuple(1 if a.time else n for a, n in zip(self.axes, self.shape, strict=True))

    @property
    def is_whole(self) -> bool:
        return self.shape == tuple(a.parts for a in self.axes)

    def __getitem__(self, key: int | slice | tuple[int | slice, ...]) -> "Grid":
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.index):
            raise PlanError(f"'{self.op.path}': {len(keys)} indices for a grid of {len(self.index)} axes")
        index = list(self.index)
        for axis, one in enumerate(keys):
            index[axis] = self._range(axis, one)
        return dataclasses.replace(self, index=tuple(index))

    def _range(self, axis: int, key: int | slice) -> tuple[int, int]:
        start, stop = self.index[axis]
        size = stop - start
        if isinstance(key, slice):
            first, last, step = key.indices(size)
            if step != 1 or last <= first:
                raise PlanError(f"'{self.op.path}': grid slice {key} is empty or has a step; axis {axis} has {size} cells")
            return start + first, start + last
        if not isinstance(key, (int, np.integer)) or not -size <= key < size:
            raise PlanError(f"'{self.op.path}': cell {key!r} of grid axis {axis}, which has {size} cells")
        return start + key % size, start + key % size + 1

    def __repr__(self) -> str:
        factors = [a.factor for a in (*self.axes, *self.chunks) if a.factor is not None]
        named = self.graph.factors_text(self.op, dict.fromkeys(factors)) if self.graph is not None else ""
        return clipped(" ".join(filter(None, (str(self), named))))

    def __str__(self) -> str:
        axes = ", ".join([*map(str, self.axes), *(f"{a} chunks" for a in self.chunks)])
        name = f"{self.op.path} = {', '.join(self.pieces)}" if self.pieces else self.op.path
        return f"Grid({name} [{axes}])" if self.is_whole else f"Grid({name} [{axes}] at {self.index})"


def one_in_time(cells: Grid, devices: np.ndarray) -> np.ndarray:
    """``devices`` with one entry for the cells along time axes, where these all run on one device."""
    if devices.size != int(np.prod(cells.shape, dtype=int)) or cells.shape == cells.space_shape:
        return devices
    array = devices.reshape(cells.shape)
    for i, axis in enumerate(cells.axes):
        array = array.take([0], i) if axis.time and (array == array.take([0], i)).all() else array
    whole = all(n == 1 for n, axis in zip(array.shape, cells.axes, strict=True) if axis.time)
    return array if whole else devices.reshape(cells.shape)
