"""``Spec``: which dims of an equation's operands and results are one index, and what is linear.

A rule is a function from an equation to a `Spec`, written with labels as in an einsum: dims that carry the same label are
one index; a label that no result carries is reduced; a label in ``blocked`` cannot be split. Dims of size 1 carry no label,
since JAX broadcasts them silently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from jscaler.ir import Halo
from jscaler.ir.equations import shape
from jscaler.ir.mask import Combiner

Label = tuple[Any, int]  # any hashable name, and the size
Dims = tuple[tuple[Label, ...], ...]  # per dim its labels, major first


@dataclass(frozen=True)
class Window:
    """An index whose rows are read through windows that may reach beyond a part's own.

    Attributes:
        dims: per operand the dim that carries it; None where it does not.
        halos: per operand the rows that are read beyond the part's own.
        number: which of the equation's windowed dims it is.
    """

    dims: tuple[int | None, ...]
    halos: tuple[Halo, ...]
    number: int


@dataclass(frozen=True)
class Spec:
    """How one equation carries indices and partial sums.

    Attributes:
        operands, results: labels per dim.
        combiner: how a label that no result carries is joined.
        blocked: label -> why it cannot be split.
        linear: how partial operands (value shares) pass: ``add`` all operands together, ``each`` one operand of several
            (multilinear), ``first`` the first operand only, ``select`` all but the first together, ``update`` the first
            two together, ``outer`` all but the second together, ``move`` a data movement that any combiner passes,
            ``pair`` one of the first two, ``""`` not at all.
        base: an operand that a reduction adds to (scatter-add): it must be zero for the reduced label to be split.
        pairwise: whether the i-th result depends on the i-th operand alone.
        windows: the indices that are read through windows.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    combiner: Combiner = "add"
    blocked: dict[Label, str] = field(default_factory=dict)
    linear: str = ""
    base: int | None = None
    pairwise: bool = False
    windows: tuple[Window, ...] = ()


SpecFunction = Callable[[core.JaxprEqn], Spec]


def dims(sizes: Sequence[int], names: Sequence[Any]) -> Dims:
    """One label per dim; none for a dim of size 1."""
    return tuple(() if size == 1 else ((name, size),) for size, name in zip(sizes, names, strict=True))


def seen_whole(eqn: core.JaxprEqn, why: str, batch: int = 0) -> Spec:
    """The first ``batch`` dims of all operands and results are one each; no other can be split."""
    blocked: dict[Label, str] = {}

    def one(side: str, index: int, sizes: tuple[int, ...]) -> Dims:
        labels = dims(sizes, [i if i < batch else (side, index, i) for i in range(len(sizes))])
        blocked.update({label: why for dim in labels[batch:] for label in dim})
        return labels

    operands = tuple(one("in", i, shape(v)) for i, v in enumerate(eqn.invars))
    return Spec(operands, tuple(one("out", i, shape(v)) for i, v in enumerate(eqn.outvars)), blocked=blocked)
