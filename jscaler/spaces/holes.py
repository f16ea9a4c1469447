"""Holes: objects that stand where a primitive's argument stands, and say what may stand there.

graph.op_trans(op, any_split())                                         every factor, on every mesh axis
graph.op_trans(op, any_split(axes=0, dims="batch"), any_split(axes=1, dims=("heads", "units")))
graph.op_trans(op, any_split(least=2, most=8))                          into 2 to 8 parts, by all axes together
graph.op_trans(op, one_of(Split("a", 4), Replicate(4)))
graph.shard("*", one_of(None, "zero1", "zero3"))
graph.recompute(ops, maybe())
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jscaler.errors import PlanError, UnknownNameError, check_count

Dim = Literal["batch", "sequence", "heads", "units", "words", "experts"]
DIMS: tuple[Dim, ...] = get_args(Dim)
Copies = Literal["any", "needed", "never"]


@dataclass(frozen=True)
class AnySplit:
    """Some factor of an op, or a copy, on each of some mesh axes; see `any_split`."""

    axes: tuple[int, ...] | None
    dims: tuple[str, ...] | None
    never: tuple[str, ...]
    copies: Copies
    least: int = 1
    most: int | None = None
    said: str = ""  # how it was written, where it stands for something else

    def __str__(self) -> str:
        if self.said:
            return self.said
        said = {"axes": self.axes, "dims": self.dims, "never": self.never or None}
        said |= {"least": self.least if self.least > 1 else None, "most": self.most}
        told = [f"{name}={value}" for name, value in said.items() if value is not None]
        return f"any_split({', '.join([*told, *([] if self.copies == 'any' else [f'copies={self.copies!r}'])])})"


def any_split(
    axes: int | Sequence[int] | None = None,
    dims: str | Sequence[str] | None = None,
    never: str | Sequence[str] = (),
    copies: Copies = "any",
    least: int = 1,
    most: int | None = None,
) -> AnySplit:
    """Any factor of an op on a mesh axis, or a copy.

    Args:
        axes: the numbers of the mesh axes that it is for; by default all.
        dims: what the factor must be of the model: ``"batch"``, ``"sequence"``, ``"heads"``, ``"units"`` (hidden units of a
            feed-forward pair), ``"words"``, ``"experts"``; by default anything. They are found in the dataflow.
        never: what it must not be.
        copies: whether the op may be copied on all devices of the axis: ``"needed"`` where no factor can be split.
        least, most: into how many parts these axes may split it together.

    Raises:
        UnknownNameError: there is no such dim.
        PlanError: ``copies`` is none of its words.

    Example:
        >>> print(any_split(axes=1, dims="heads", copies="needed"))
        any_split(axes=(1,), dims=('heads',), copies='needed')
    """
    if copies not in get_args(Copies):
        raise PlanError(f"any_split: copies is one of {', '.join(map(repr, get_args(Copies)))}, not {copies!r}")
    check_count("any_split: least", least)
    if most is not None:
        check_count("any_split: most", most, least=least)
    numbers = None if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
    return AnySplit(numbers, dims_of(dims), dims_of(never) or (), copies, least, most)


def dims_of(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names of dims of a model, one or several.

    Raises:
        UnknownNameError: there is no such dim.
    """
    if names is None:
        return None
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if name not in DIMS:
            raise UnknownNameError("dim", name, DIMS, "; holes take these")
    return found


@dataclass(frozen=True)
class Maybe:
    """Whether; see `maybe`."""


def maybe() -> Maybe:
    """Whether something is done at all.

    Example:
        >>> maybe()
        Maybe()
    """
    return Maybe()
