"""What ``op_trans`` takes: ``Split`` and ``Replicate``; each gives the grid one axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jscaler.errors import PlanError, SplitError, UnknownNameError, listing
from jscaler.ir import Op, Rule


@dataclass(frozen=True)
class Split:
    """Split a factor into equal parts.

    Attributes:
        factor: the factor's name in the op's rule, or ``(input name, dim)``, e.g. ``("kernel", 1)``.
        parts: how many; must divide the factor's size.
    """

    factor: str | tuple[str, int]
    parts: int


@dataclass(frozen=True)
class Replicate:
    """Run ``copies`` equal copies of the op."""

    copies: int


Algorithm = Split | Replicate


@dataclass(frozen=True)
class GridAxis:
    """One axis of an op's grid of cells; ``factor`` is None where the cells are copies."""

    factor: str | None
    parts: int

    def __str__(self) -> str:
        return f"{self.factor or 'copy'}:{self.parts}"


def grid_axis(op: Op, rule: Rule, algorithm: Algorithm, before: Sequence[GridAxis] = ()) -> GridAxis:
    """Check ``algorithm`` against the op's rule; ``before`` are the axes that the grid has already.

    Raises:
        UnknownNameError: there is no such factor.
        SplitError: the factor is blocked, or its size does not divide.
    """
    if isinstance(algorithm, Replicate):
        _check_count(op, algorithm.copies)
        return GridAxis(None, int(algorithm.copies))
    _check_count(op, algorithm.parts)
    factor = rule.factor(_factor_name(op, rule, algorithm.factor), op.path)
    if not factor.splittable and algorithm.parts > 1:
        raise SplitError(op.path, factor.name, factor.size, algorithm.parts, f"it is blocked: {factor.reason}")
    rest = factor.size // math.prod(a.parts for a in before if a.factor == factor.name)
    if rest % algorithm.parts:
        raise SplitError(op.path, factor.name, rest, algorithm.parts)
    return GridAxis(factor.name, int(algorithm.parts))


def _check_count(op: Op, count: int) -> None:
    if not isinstance(count, (int, np.integer)) or count < 1:
        raise PlanError(f"'{op.path}': the number of parts is a positive whole number, not {count!r}")


def _factor_name(op: Op, rule: Rule, factor: str | tuple[str, int]) -> str:
    if isinstance(factor, str):
        return factor
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
