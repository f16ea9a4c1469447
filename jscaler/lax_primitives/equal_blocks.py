"""Specs of split, concatenate, slice and pad: dims in equal blocks, of which the place inside a block can be split.

A dim that is cut at multiples of a block is (which block, place in the block). Which block an element lies in changes
at the cut and stays whole; the place in the block does not, and is one index of both sides.

    x of 12, y = x[4:10], blocks of 2      x = (6 2), y = (3 2), both share the 2
    q, k, v = split(x, 3)                  x = (3 4), each of q, k, v has the 4
    x[1::3]                                x = (4 3), the result has the 4
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jscaler.ir.equations import shape
from jscaler.lax_primitives.primitive import Part, Primitive
from jscaler.lax_primitives.spec import Dims, Label, Spec, dims

DimLabels = tuple[Label, ...]


@dataclass(frozen=True)
class BlockWindow:
    """Along one dim: element ``i`` of the narrow side is element ``(first + i) * step + phase`` of the wide side.

    The narrow side has ``narrow`` elements, the wide side ``rows * step``.
    """

    narrow: int
    rows: int
    first: int
    step: int = 1
    phase: int = 0

    @property
    def block(self) -> int:
        """The longest block of rows at whose multiples both sides begin and end."""
        return math.gcd(self.narrow, self.rows, self.first)

    def labels(self, dim: int) -> tuple[DimLabels, DimLabels]:
        """Labels of the narrow and of the wide side; those named ``which`` cannot be split."""
        place = ((("place", dim), self.block),) if self.block > 1 else ()

        def side(name: str, rows: int) -> DimLabels:
            major = ((("which", name, dim), rows // self.block),) if rows != self.block else ()
            return (*major, *place)

        step = ((("which", "step", dim), self.step),) if self.step > 1 else ()
        return side("narrow", self.narrow), (*side("wide", self.rows), *step)

    def local(self, wide: int) -> tuple[int, int]:
        """In a part of ``wide`` elements, where the narrow side begins, and how many rows of ``step`` there are."""
        rows = wide // self.step
        return self.first * rows // self.rows * self.step + self.phase, rows


def slice_window(size: int, start: int, limit: int, stride: int) -> BlockWindow | None:
    """The window of a slice; None where the stride does not divide the dim."""
    narrow = max(0, -(-(limit - start) // stride))
    if 0 in (size, narrow) or size % stride:
        return None
    return BlockWindow(narrow, size // stride, start // stride, stride, start % stride)


def pad_window(size: int, low: int, high: int, interior: int) -> BlockWindow | None:
    """The window of a dim in its padded self; None where it is cut off, or the padding is not whole rows."""
    total = low + high + size + (size - 1) * interior
    if size == 0 or min(low, high) < 0 or total % (interior + 1):
        return None
    return BlockWindow(size, total // (interior + 1), low // (interior + 1), interior + 1, low % (interior + 1))


def _spec(
    sizes: tuple[Sequence[int], Sequence[int]], windows: Sequence[BlockWindow | None], narrow: int, why: str
) -> tuple[Dims, Dims, dict[Label, str]]:
    """Labels of operand and result, ``narrow`` says which of them (0 or 1) is the narrow side."""
    sides: tuple[list[DimLabels], list[DimLabels]] = ([], [])
    blocked: dict[Label, str] = {}
    for i, window in enumerate(windows):
        if window is None:
            labels = [dims((sizes[s][i],), [("which", s, i)])[0] for s in (0, 1)]
        else:
            pair = window.labels(i)
            labels = [pair[0], pair[1]] if narrow == 0 else [pair[1], pair[0]]
        for side, own in zip(sides, labels, strict=True):
            side.append(own)
            blocked.update({label: why for label in own if label[0][0] == "which"})
    return tuple(sides[0]), tuple(sides[1]), blocked


def _slice_windows(eqn: core.JaxprEqn) -> list[BlockWindow | None]:
    source = shape(eqn.invars[0])
    strides = eqn.params["strides"] or (1,) * len(source)
    return [
        slice_window(*numbers)
        for numbers in zip(source, eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    ]


def slice_(eqn: core.JaxprEqn) -> Spec:
    sizes = (shape(eqn.invars[0]), shape(eqn.outvars[0]))
    operand, result, blocked = _spec(sizes, _slice_windows(eqn), 1, "it is sliced: only equal blocks of it can be split")
    return Spec((operand,), (result,), blocked=blocked, linear="move")


def _local_slice(part: Part, eqn: core.JaxprEqn) -> dict[str, Any]:
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    locals_ = zip(part.shape(eqn.invars[0]), part.shape(eqn.outvars[0]), strict=True)
    for i, (window, (wide, narrow)) in enumerate(zip(_slice_windows(eqn), locals_, strict=True)):
        if window is not None and wide != shape(eqn.invars[0])[i]:
            starts[i] = window.local(wide)[0]
            limits[i] = starts[i] + (narrow - 1) * window.step + 1
    return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}


def _pad_windows(eqn: core.JaxprEqn) -> list[BlockWindow | None]:
    return [pad_window(n, *each) for n, each in zip(shape(eqn.invars[0]), eqn.params["padding_config"], strict=True)]


def pad(eqn: core.JaxprEqn) -> Spec:
    sizes = (shape(eqn.invars[0]), shape(eqn.outvars[0]))
    why = "it is padded: only equal blocks of it can be split"
    operand, result, blocked = _spec(sizes, _pad_windows(eqn), 0, why)
    for i, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if min(low, high) < 0 and max(low, high) <= 0 and not interior:  # a slice: the operand is the wide side
            cut = slice_window(sizes[0][i], -low, sizes[0][i] + high, 1)
            if cut is not None:
                narrow, wide = cut.labels(i)
                operand, result = (*operand[:i], wide, *operand[i + 1 :]), (*result[:i], narrow, *result[i + 1 :])
                blocked |= {label: why for label in (*narrow, *wide) if label[0][0] == "which"}
    return Spec((operand, ()), (result,), blocked=blocked, linear="add")


def _local_pad(part: Part, eqn: core.JaxprEqn) -> dict[str, Any]:
    config = list(eqn.params["padding_config"])
    sizes = zip(shape(eqn.invars[0]), part.shape(eqn.invars[0]), part.shape(eqn.outvars[0]), strict=True)
    for i, (whole, size, total) in enumerate(sizes):
        low, _, interior = config[i]
        if size == whole:
            continue
        window = pad_window(whole, *config[i])
        low = window.local(total)[0] if window else low * size // whole
        config[i] = (low, total - low - size - (size - 1) * interior, interior)
    return {"padding_config": tuple(config)}


def concatenate(eqn: core.JaxprEqn) -> Spec:
    why = "it is concatenated: only equal blocks of it can be split"
    labels, blocked = _pieces([shape(v) for v in eqn.invars], shape(eqn.outvars[0]), eqn.params["dimension"], why)
    return Spec(tuple(labels[:-1]), (labels[-1],), blocked=blocked, linear="add")


def split(eqn: core.JaxprEqn) -> Spec:
    why = "it is cut by jnp.split: only equal blocks of it can be split"
    labels, blocked = _pieces([shape(v) for v in eqn.outvars], shape(eqn.invars[0]), eqn.params["axis"], why)
    return Spec((labels[-1],), tuple(labels[:-1]), blocked=blocked, linear="move")


def _pieces(
    pieces: Sequence[tuple[int, ...]], whole: tuple[int, ...], axis: int, why: str
) -> tuple[list[Dims], dict[Label, str]]:
    """Labels of all pieces, then of the whole; pieces that all are multiples of one block share its places."""
    block = math.gcd(*(p[axis] for p in pieces)) or 1
    place = ((("place", axis), block),) if block > 1 else ()
    blocked: dict[Label, str] = {}

    def one(sizes: tuple[int, ...], name: Any) -> Dims:
        major = ((("which", name), sizes[axis] // block),) if sizes[axis] != block else ()
        blocked.update(dict.fromkeys(major, why))
        rest = dims(sizes, range(len(sizes)))
        return (*rest[:axis], (*major, *place), *rest[axis + 1 :])

    return [one(sizes, i) for i, sizes in enumerate((*pieces, whole))], blocked


def _local_split(part: Part, eqn: core.JaxprEqn) -> dict[str, Any]:
    return {"sizes": tuple(part.shape(v)[eqn.params["axis"]] for v in eqn.outvars)}


def stack(eqn: core.JaxprEqn) -> Spec:
    """A new dim, one operand after the other; the other dims pass."""
    axis = eqn.params["axis"] % len(shape(eqn.outvars[0]))
    result = dims(shape(eqn.outvars[0]), range(len(shape(eqn.outvars[0]))))
    blocked = dict.fromkeys(result[axis], "it is stacked from several tensors")
    return Spec((result[:axis] + result[axis + 1 :],) * len(eqn.invars), (result,), blocked=blocked, linear="add")


def unstack(eqn: core.JaxprEqn) -> Spec:
    """One result for each index of a dim; the other dims pass."""
    axis = eqn.params["axis"] % len(shape(eqn.invars[0]))
    operand = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    blocked = dict.fromkeys(operand[axis], "it is taken apart index by index")
    return Spec((operand,), (operand[:axis] + operand[axis + 1 :],) * len(eqn.outvars), blocked=blocked, linear="move")


RECORDS = (
    Primitive("slice", slice_, shaped=_local_slice, cost="fused", picks=True, seen="moves"),
    Primitive("pad", pad, shaped=_local_pad, cost="fused", seen="moves"),
    Primitive("concatenate", concatenate, cost="fused", seen="moves"),
    Primitive("split", split, shaped=_local_split, cost="fused", seen="moves"),
    Primitive("stack", stack, cost="fused", seen="moves"),
    Primitive("unstack", unstack, cost="fused"),
)
