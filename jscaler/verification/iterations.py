"""What a jaxpr that moves elements, or joins two values, does in each iteration of a loop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import dtype, shape
from jscaler.errors import VerificationError
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import known
from jscaler.verification.interpret import Interpreter
from jscaler.verification.symbols import Patterns, Symbolic, compact

MOST_CELLS = 2**22  # of all iterations: beyond, the dims of an array are looked at one by one


def ids(sizes: Sequence[int]) -> np.ndarray:
    """The numbers of the elements of an array."""
    return np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)


def only_moves(jaxpr: core.Jaxpr) -> bool:
    """Whether ``jaxpr`` moves elements, to places that it works out of whole numbers, and does nothing else."""

    def is_place(eqn: core.JaxprEqn) -> bool:
        return all(not shape(v) and dtype(v).kind in "biu" for v in eqn.outvars)

    return all(known(e.primitive).seen in ("same", "moves", "casts") or is_place(e) for e in jaxpr.eqns)


def joins(jaxpr: core.Jaxpr) -> Combiner | None:
    """How ``jaxpr`` joins its two operands, if that is all it does; in more bits perhaps."""
    rest = [e for e in jaxpr.eqns if known(e.primitive).seen != "casts"]
    if len(jaxpr.invars) != 2 or len(rest) != 1 or known(rest[0].primitive).seen != "joins":
        return None
    casts = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if e is not rest[0]}
    joined = [casts.get(v, v) if isinstance(v, core.Var) else v for v in rest[0].invars]
    return known(rest[0].primitive).combiner if joined in ([*jaxpr.invars], [*jaxpr.invars][::-1]) else None


def adds_all(jaxpr: core.Jaxpr) -> bool:
    """Whether ``jaxpr`` adds up its operands, each once, and does nothing else."""
    read = [v for e in jaxpr.eqns for v in e.invars]
    made = [v for e in jaxpr.eqns for v in e.outvars]
    each = sorted(map(id, read)) == sorted(map(id, (*jaxpr.invars, *made[:-1])))
    return each and all(known(e.primitive).seen == "joins" and known(e.primitive).combiner == "add" for e in jaxpr.eqns)


@dataclass(frozen=True)
class Moved:
    """Which elements of an array come where, in each of some iterations.

    Attributes:
        elements: (iterations, *what an iteration leaves): the numbers of elements; None of large arrays.
        axes: of large arrays, whose dims are moved independently: for each axis of the result the numbers of the rows that
            arrive there, (iterations, size).
        dims: of large arrays: for each axis the operand's dims (of size 2 and more) whose rows arrive there, major first.
        shape: of what an iteration leaves.
    """

    elements: np.ndarray | None
    axes: tuple[np.ndarray, ...]
    dims: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    def are_parts(self, whole: tuple[int, ...], dim: int, blocks: int, count: int, rows: int) -> bool:
        """Whether iteration i leaves part i of ``whole``: of ``dim``, seen as (blocks, parts, rows)."""
        if self.elements is not None:
            parts = parts_of(ids(whole), dim, blocks, count, rows)
            return parts is not None and np.array_equal(parts, self.elements)
        parts = parts_of(np.arange(whole[dim]), 0, blocks, count, rows)
        stay = [(d,) if n > 1 else () for d, n in enumerate(whole)]
        return self._rest_stays(dim, stay) and parts is not None and np.array_equal(parts, self.axes[dim])

    def puts_together(self, stack: tuple[int, ...], dim: int, blocks: int, count: int, rows: int) -> bool:
        """Whether the first iteration makes the whole of such a ``stack`` of parts."""
        if self.elements is not None:
            parts = parts_of(self.elements[0], dim, blocks, count, rows)
            return parts is not None and np.array_equal(parts, ids(stack))
        parts = parts_of(self.axes[dim][0], 0, blocks, count, rows)
        stay: list[tuple[int, ...]] = [(d + 1,) if n > 1 else () for d, n in enumerate(stack[1:])]
        stay[dim] = (0, *stay[dim]) if count > 1 else stay[dim]
        in_order = parts is not None and np.array_equal(parts, np.arange(parts.size).reshape(parts.shape))
        return self._rest_stays(dim, stay) and in_order

    def _rest_stays(self, dim: int, dims: Sequence[tuple[int, ...]]) -> bool:
        """Whether rows of ``dims`` come to each axis, and but for that of ``dim`` in their order."""
        others = (rows for axis, rows in enumerate(self.axes) if axis != dim)
        return self.dims == tuple(dims) and all((rows == np.arange(rows.shape[1])).all() for rows in others)


def each_once(
    jaxpr: core.Jaxpr, args: Sequence[np.ndarray | None], count: int, places: Sequence[int], where: str
) -> Moved | None:
    """Which elements ``jaxpr`` moves in each of ``count`` iterations: each once on a device, and all on some.

    Args:
        args: for scalars a number for each iteration; None for the array.
        places: how many devices differ along each of its last operands.

    Returns:
        What it moves; None where the array is large and its dims are not moved apart from one another.

    Raises:
        VerificationError: elements are left out, or come more than once.
    """
    read = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)}
    own = [n if v in read else 1 for n, v in zip(places, jaxpr.invars[len(args) :], strict=True)]
    devices = np.indices(own).reshape(len(own), -1) if own else np.zeros((0, 1), int)
    whole = shape(jaxpr.invars[args.index(None)])

    def run(elements: np.ndarray) -> np.ndarray:
        return _moved(jaxpr, args, elements, count, devices, where)

    if count * devices.shape[1] * math.prod(whole) <= MOST_CELLS:
        found = run(ids(whole))
        _check_once(found, math.prod(whole), devices.shape[1], where)
        return Moved(found, (), (), found.shape[1:])
    lines = [run(np.broadcast_to(_along(n, d, len(whole)), whole)) for d, n in enumerate(whole)]
    axes, dims = _axes(lines, whole)
    if not axes:
        return None
    full = [np.array_equal(np.sort(rows, 1), np.broadcast_to(np.arange(size), (len(rows), size))) for rows, size in axes]
    if full.count(False) > 1:
        return None
    for rows, size in (axes[full.index(False)],) if False in full else ():
        _check_once(rows, size, devices.shape[1], where)
    return Moved(None, tuple(rows for rows, _ in axes), dims, lines[0].shape[1:])


def _moved(
    jaxpr: core.Jaxpr, args: Sequence[np.ndarray | None], elements: np.ndarray, count: int, devices: np.ndarray, where: str
) -> np.ndarray:
    """The numbers that ``elements`` have where they come to, device by device and iteration by iteration."""
    total = count * devices.shape[1]
    patterns = Patterns(())
    given: list[Any] = []
    for x in args:
        if x is not None:
            given.append(np.tile(x, devices.shape[1]))
        else:
            cells = np.broadcast_to(elements, (total, *elements.shape))
            given.append(Symbolic(cells, np.broadcast_to(np.int32(patterns.whole), cells.shape)))
    given += [np.repeat(device.astype(np.int32), count) for device in devices]
    try:
        (result,) = Interpreter({"part": total}, patterns).run(jaxpr, given)
    except VerificationError as error:
        raise VerificationError(f"{where}: {str(error).replace('on devices', 'in iterations')}") from None
    return result.element if isinstance(result, Symbolic) else np.full(result.shape, -1)


def _check_once(found: np.ndarray, size: int, devices: int, where: str) -> None:
    often = np.stack([np.bincount(x[x >= 0], minlength=size) for x in found.reshape(devices, -1)])
    missing, twice = int((often == 0).all(0).sum()), int((often > 1).any(0).sum())
    if missing or twice or found.size < size:
        raise VerificationError(f"{where}: of {size} elements {missing} are left out, {twice} come more than once")


def _along(size: int, dim: int, rank: int) -> np.ndarray:
    """The numbers of rows along a dim."""
    return np.arange(size, dtype=np.int32).reshape([size if d == dim else 1 for d in range(rank)])


def _axes(
    lines: Sequence[np.ndarray], whole: tuple[int, ...]
) -> tuple[list[tuple[np.ndarray, int]], tuple[tuple[int, ...], ...]]:
    """Per axis of a result the numbers of the rows that come there, and how many there are of these; and of which dims.

    Args:
        lines: for each dim of the operand the numbers that its rows have in the result.

    Returns:
        Nothing where rows of a dim come to several axes, so that the dims are not moved apart.
    """
    made = lines[0].shape
    axes = [(np.zeros((made[0], n), np.int64), 1) for n in made[1:]]
    dims: list[tuple[int, ...]] = [() for _ in axes]
    for dim, (rows, size) in enumerate(zip(lines, whole, strict=True)):
        (few,) = compact(rows)
        varying = [axis for axis in range(1, few.ndim) if few.shape[axis] > 1]
        varying = varying or [axis for axis in (dim + 1, *range(1, few.ndim)) if axis < few.ndim and made[axis] == 1][:1]
        if size == 1:
            continue
        if len(varying) != 1 or (few < 0).any():
            return [], ()
        axis = varying[0] - 1
        numbers, before = axes[axis]
        line = np.broadcast_to(few.reshape(few.shape[0], -1), numbers.shape)
        axes[axis] = numbers * size + line, before * size
        dims[axis] += (dim,)
    return axes, tuple(dims)


def parts_of(whole: np.ndarray, dim: int, blocks: int, parts: int, rows: int) -> np.ndarray | None:
    """The parts of ``whole``, one after another: of ``dim``, seen as (blocks, parts, rows)."""
    if whole.shape[dim] != blocks * parts * rows:
        return None
    seen = whole.reshape((*whole.shape[:dim], blocks, parts, rows, *whole.shape[dim + 1 :]))
    return np.moveaxis(seen, dim + 1, 0).reshape((parts, *whole.shape[:dim], blocks * rows, *whole.shape[dim + 1 :]))
