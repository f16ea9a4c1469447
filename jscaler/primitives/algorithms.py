"""What ``op_trans`` takes: ``Split``, ``TimeSplit`` and ``Replicate``; each gives the grid one axis."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jscaler.errors import PlanError, SplitError, UnknownNameError, check_count, divisors, listing, shown
from jscaler.ir import Op, Rule
from jscaler.primitives.remedies import blocked
from jscaler.rules.expansion import Expanding


@dataclass(frozen=True)
class Split:
    """Split a factor into equal parts, or into parts of given sizes.

    Attributes:
        factor: the factor's name in the op's rule, or ``(input name, dim)``, e.g. ``("kernel", 1)``.
        parts: how many; must divide the factor's size.
        sizes: in place of ``parts`` the size of each part; they add up to the factor's size. All devices run at the
            largest, and what a smaller part has beyond its own reaches no result.

    Example:
        >>> graph.op_trans("mlp/dot", Split("d", 4)).shape  # by the name of the factor
        (4,)
        >>> graph.op_trans("mlp/dot.1", Split(("down", 0), sizes=(40, 24))).shape  # by a tensor's dim
        (2,)
    """

    factor: str | tuple[str, int]
    parts: int | None = None
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TimeSplit:
    """Split a factor into parts that run one after another on the devices of the cell: an axis in time.

    Where devices split the factor too, each walks through its own block of it. Ops whose time axes have one name share
    loops, as far as their dataflow allows; names nest in the order in which a plan first uses them, the first outermost.

    Attributes:
        factor: as in `Split`.
        parts: how many; must divide what splits of the factor between devices leave.
        axis: the name of the time axis, e.g. ``"microbatch"``.
        sizes: in place of ``parts`` the size of each part; they add up to the factor's size.

    Example:
        >>> parts = graph.op_trans("mlp/dot", Split("a", 4), TimeSplit("a", 2, "microbatch"))  # 8 rows: 4 devices × 2 × 1
        >>> graph.op_assign(parts, devices)
    """

    factor: str | tuple[str, int]
    parts: int | None = None
    axis: str = "time"
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Replicate:
    """Run equal copies of the op.

    Attributes:
        copies: how many.

    Example:
        >>> cells = graph.op_trans("mlp/dot", Split("d", 2), Replicate(2))  # each half of the columns on two devices
        >>> graph.op_assign(cells, devices.reshape(2, 2))
    """

    copies: int


@dataclass(frozen=True)
class Chunk:
    """Run the op's parts along a factor one after another on the same device, in a loop; not an axis of the grid.

    What the op makes inside is then held for one part at a time: a `Planner.fuse` of logits and cross entropy never
    holds all logits, forward and backward.

    Attributes:
        factor: as in `Split`.
        parts: how many; must divide what splits of the factor leave.

    Example:
        >>> loss = graph.fuse("head/dot", "loss/gather.1")
        >>> graph.op_assign(graph.op_trans(loss, Split(("mlp/add:0", 0), 4), Chunk(("mlp/add:0", 1), 8)), devices)
    """

    factor: str | tuple[str, int]
    parts: int


Algorithm = Split | TimeSplit | Replicate | Chunk | Expanding


@dataclass(frozen=True)
class GridAxis:
    """One axis of an op's grid of cells.

    Attributes:
        factor: what is split; None where the cells are copies.
        parts: the number of cells along the axis.
        sizes: of the parts, where they are unequal.
        algorithm: what replaces the op by steps of its own, where a plain split would not do.
        time: the name of the time axis; empty for an axis in space.
    """

    factor: str | None
    parts: int
    sizes: tuple[int, ...] | None = None
    algorithm: Expanding | None = None
    time: str = ""

    def __str__(self) -> str:
        how = f" by {type(self.algorithm).__name__}" if self.algorithm is not None else ""
        when = f" in time ({self.time})" if self.time else ""
        return f"{self.factor or 'copy'}:{parts_text(self.parts, self.sizes)}{how}{when}"


def as_split(axis: GridAxis) -> Algorithm:
    """The algorithm that makes ``axis``, which splits a factor."""
    assert axis.factor is not None
    if axis.algorithm is not None:
        return axis.algorithm
    if axis.time:
        return TimeSplit(axis.factor, None if axis.sizes else axis.parts, axis.time, axis.sizes)
    return Split(axis.factor, sizes=axis.sizes) if axis.sizes else Split(axis.factor, axis.parts)


def parts_text(parts: int, sizes: tuple[int, ...] | None) -> str:
    """``4``, or ``5+3`` where the parts have sizes of their own."""
    return "+".join(map(str, sizes)) if sizes else str(parts)


def grid_axis(
    op: Op, rule: Rule, algorithm: Algorithm, before: Sequence[GridAxis] = (), alone: bool = False
) -> GridAxis:  # fmt: skip
    """Check ``algorithm`` against the op's rule; ``before`` are the axes that the grid has already.

    Args:
        alone: whether the op runs on each part in time alone, where it needs the whole.

    Raises:
        UnknownNameError: there is no such factor.
        SplitError: the factor is blocked, its size does not divide, or ``sizes`` do not make it.
        PlanError: a count is no positive whole number, or ``sizes`` meet another split of the factor.
    """
    if isinstance(algorithm, Replicate):
        return GridAxis(None, _count(op, algorithm.copies))
    if isinstance(algorithm, Chunk):
        return _whole_axis(op, rule, algorithm, before)
    if isinstance(algorithm, TimeSplit):
        if not isinstance(algorithm.axis, str) or not algorithm.axis:
            raise PlanError(f"'{op.path}': a time axis has a name, not {algorithm.axis!r}")
        return dataclasses.replace(_whole_axis(op, rule, algorithm, before, alone), time=algorithm.axis)
    if not isinstance(algorithm, Split):
        return _expanding_axis(op, rule, algorithm, before)
    sizes = _own_sizes(op, algorithm)
    parts = len(sizes) if sizes is not None else algorithm.parts
    assert parts is not None
    parts = _count(op, parts)
    factor = rule.factor(_factor_name(op, rule, algorithm.factor), op.path)
    if not factor.splittable and parts > 1:
        raise SplitError(op.path, factor.name, factor.size, parts, blocked(factor, rule, parts))
    nested = [a for a in before if a.factor == factor.name]
    if any(a.algorithm is not None for a in nested):
        raise PlanError(f"'{op.path}': factor '{factor.name}' is cut by {nested[0]} already, in one go")
    if any(a.sizes for a in nested) or (nested and sizes is not None):
        raise PlanError(
            f"'{op.path}': factor '{factor.name}' is split by {', '.join(map(str, nested))} already; parts of sizes of "
            f"their own are made by one split: give all sizes to one Split('{factor.name}', sizes=…)"
        )
    rest = factor.size // math.prod(a.parts for a in nested)
    if sizes is not None and sum(sizes) != rest:
        raise SplitError(op.path, factor.name, rest, parts, f"the sizes {list(sizes)} add up to {sum(sizes)}")
    if sizes is not None and len(set(sizes)) > 1 and factor.even_only:
        raise SplitError(op.path, factor.name, rest, parts, f"its parts must be of one size: {factor.even_only}")
    if sizes is None and rest % parts:
        raise SplitError(op.path, factor.name, rest, parts, _legal_parts(factor.name, rest, parts, nested))
    even = sizes is None or len(set(sizes)) == 1
    return GridAxis(factor.name, parts, None if even else sizes)


def _whole_axis(
    op: Op, rule: Rule, algorithm: Chunk | TimeSplit, before: Sequence[GridAxis], alone: bool = False
) -> GridAxis:  # fmt: skip
    """An axis whose parts run one after another: each is complete, but for sums."""
    sizes = algorithm.sizes if isinstance(algorithm, TimeSplit) else None
    axis = grid_axis(op, rule, Split(algorithm.factor, algorithm.parts, sizes), before)
    assert axis.factor is not None
    factor = rule.factors[axis.factor]
    why = f"it needs the whole factor: {factor.reason}; take another one" if factor.kind == "blocked" and not alone else ""
    if why and factor.reopens and isinstance(algorithm, TimeSplit):
        why += f"; graph.per_microbatch('{op.path}') runs it on each part alone, which gives other numbers than the whole"
    why = why or ("its parts overlap" if any(name == factor.name for name, _, _ in rule.halos) else "")
    why = why or ("it only adds up what other ops make; split those" if op.anywhere else "")
    if why and axis.parts > 1:
        raise SplitError(op.path, factor.name, factor.size, axis.parts, f"one after another: {why}")
    return axis


def _expanding_axis(op: Op, rule: Rule, algorithm: Expanding, before: Sequence[GridAxis]) -> GridAxis:
    if not isinstance(algorithm, Expanding):
        raise PlanError(
            f"'{op.path}': {algorithm!r} is no algorithm; give Split('{next(iter(rule.factors), 'b')}', 2), Replicate, "
            "Chunk or Prefix, or an object of your own with a factor, parts and an expand method"
        )
    parts = _count(op, algorithm.parts)
    factor = rule.factor(_factor_name(op, rule, algorithm.factor), op.path)
    others = [a for a in before if a.factor == factor.name or a.algorithm is not None]
    if others:
        raise PlanError(
            f"'{op.path}': {algorithm} meets {', '.join(map(str, others))}; one algorithm cuts an op, in one go"
        )
    if factor.size % parts:
        raise SplitError(op.path, factor.name, factor.size, parts)
    return GridAxis(factor.name, parts, algorithm=algorithm)


def _own_sizes(op: Op, algorithm: Split) -> tuple[int, ...] | None:
    if (algorithm.sizes is None) == (algorithm.parts is None):
        raise PlanError(
            f"'{op.path}': a Split has parts or sizes; {algorithm} has {'none' if algorithm.sizes is None else 'both'}"
        )
    if algorithm.sizes is None:
        return None
    sizes = tuple(algorithm.sizes) if isinstance(algorithm.sizes, Iterable) else ()
    if not sizes or not all(isinstance(s, (int, np.integer)) and s > 0 for s in sizes):
        raise PlanError(f"'{op.path}': the sizes of parts are positive whole numbers, not {shown(algorithm.sizes)}")
    return tuple(map(int, sizes))


def _legal_parts(name: str, size: int, parts: int, nested: Sequence[GridAxis]) -> str:
    """What to write in place of a number of parts that does not divide."""
    legal = "legal: " + ", ".join(map(str, divisors(size)))
    if nested:
        return f"{legal}, since it is split already: {', '.join(map(str, nested))}"
    if parts > size:
        return legal
    sizes = tuple(size // parts + (i < size % parts) for i in range(parts))
    return f"{legal}; or unequal parts by sizes, like Split('{name}', sizes={sizes})"


def _count(op: Op, parts: Any) -> int:
    return check_count(f"'{op.path}': the number of parts", parts)


def _factor_name(op: Op, rule: Rule, factor: str | tuple[str, int]) -> str:
    if isinstance(factor, str):
        return factor
    if not (isinstance(factor, tuple) and [type(one) for one in factor] == [str, int]):
        raise PlanError(
            f"'{op.path}': a factor is a name ({', '.join(rule.factors) or 'it has none'}), or a tensor's name and a dim "
            f"(such as ('kernel', 1)), not {factor!r}"
        )
    name, dim = factor
    tensors = [*zip(op.inputs, rule.operands, strict=True), *zip(op.outputs, rule.results, strict=True)]
    found = [(t, dims) for t, dims in tensors if t.name == name or t.name.endswith("/" + name)]
    if not found:
        raise UnknownNameError("tensor", name, [t.name for t, _ in tensors], f" at op '{op.path}'")
    if len({t for t, _ in found}) > 1:
        raise PlanError(f"'{op.path}': '{name}' may be {listing([t.name for t, _ in found])}; give more of the path")
    tensor, dims = found[0]
    if not -len(dims) <= dim < len(dims) or not dims[dim]:
        raise PlanError(f"'{op.path}': '{tensor.name}' of shape {tensor.shape} has no splittable dim {dim}")
    return dims[dim][0]
