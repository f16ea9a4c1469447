"""``Rule``: the factors of an op. For each operand and result dim, which factors it carries; like an einsum."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jscaler.errors import UnknownNameError
from jscaler.ir.mask import Combiner

FactorKind = Literal["parallel", "reduction", "blocked"]
DimFactors = tuple[str, ...]  # the factors of one dim, major first; empty for a dim of size 1
TensorFactors = tuple[DimFactors, ...]
NamedDims = tuple[tuple[tuple[str, int], ...], ...]  # of a tensor: per dim its sub-dims as (name, size)


@dataclass(frozen=True)
class Factor:
    """One independent index of an op's iteration space.

    ``parallel`` splits outputs, ``reduction`` splits the op into value shares of some output, ``blocked`` cannot split
    (``reason`` says at which primitive and why).

    Attributes:
        reopens: of a blocked factor, whether cutting the op at its inner reductions frees it; ``op_trans`` does that.
        even_only: why its parts must be of equal sizes; empty where they need not.
    """

    name: str
    size: int
    kind: FactorKind = "parallel"
    reason: str = ""
    reopens: bool = False
    even_only: str = ""

    @property
    def splittable(self) -> bool:
        """Whether ``op_trans`` may split it, by cutting the op where needed."""
        return self.kind != "blocked" or self.reopens


@dataclass(frozen=True)
class FactorNames:
    """Names that an op's factors have from elsewhere: the op it was cut from.

    Attributes:
        tensors: of inputs, then outputs; an empty name is none.
        reserved: names that mean something else here, and must not be given to other factors.
    """

    tensors: tuple[NamedDims, ...]
    reserved: tuple[str, ...] = ()


def unnamed(sizes: Sequence[int], outer: Mapping[int, int]) -> NamedDims:
    """The sub-dims of a tensor, without names: ``outer`` says by dim how many indices the major one has."""

    def sub_dims(dim: int, size: int) -> tuple[int, ...]:
        first = outer.get(dim, 1)
        return tuple(n for n in (first, size // first) if n != 1)

    return tuple(tuple(("", n) for n in sub_dims(dim, size)) for dim, size in enumerate(sizes))


@dataclass(frozen=True)
class Halo:
    """Rows beyond a part's own that an op reads: so many ``before`` and ``after`` it, whichever part it is.

    What lies beyond the border of the whole is zero.
    """

    before: int
    after: int

    def __or__(self, other: "Halo") -> "Halo":
        """What serves both."""
        return Halo(max(self.before, other.before), max(self.after, other.after))

    def __bool__(self) -> bool:
        return self.before > 0 or self.after > 0


class SubDim(NamedTuple):
    """A sub-dim of one of a rule's tensors, operands first.

    Attributes:
        outer: the size of what stands in front of it in its dim.
        alone: whether nothing in front of it can be split, so that it is followed where an op does not tell it apart.
    """

    tensor: int
    dim: int
    outer: int = 1
    alone: bool = True


@dataclass(frozen=True)
class Rule:
    """The factors of an op and where its operands and results carry them.

    Attributes:
        factors: by name.
        operands, results: per tensor, per dim, the factors it carries (a flat qkv dim carries three).
        shares: ``(factor, result index) -> combiner`` where splitting the factor leaves a result in value shares.
        halos: ``(factor, operand index, dim) -> rows`` where a part reads beyond its own rows if the factor is split.
    """

    factors: dict[str, Factor]
    operands: tuple[TensorFactors, ...]
    results: tuple[TensorFactors, ...]
    shares: dict[tuple[str, int], Combiner] = field(default_factory=dict)
    halos: dict[tuple[str, int, int], Halo] = field(default_factory=dict)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What equal rules share."""
        return (*self.factors.values(), self.operands, self.results, *self.shares.items(), *self.halos.items())

    @cached_property
    def followed(self) -> dict[tuple[int, int], str]:
        """Number of a tensor, operands first, and dim -> its factor: of several sub-dims' the first that can be split."""
        return {
            (number, dim): next((n for n in names if self.factors[n].splittable), names[0])
            for number, dims in enumerate((*self.operands, *self.results))
            for dim, names in enumerate(dims)
            if names
        }

    @cached_property
    def places(self) -> dict[str, list["SubDim"]]:
        """Factor -> the sub-dims that stand for it: those on which a dim is followed, and those behind others."""
        found: dict[str, list[SubDim]] = {}
        for number, dims in enumerate((*self.operands, *self.results)):
            for dim, names in enumerate(dims):
                outer = 1
                for name in names:
                    alone = self.followed[number, dim] == name
                    if alone or outer != 1:
                        found.setdefault(name, []).append(SubDim(number, dim, outer, alone))
                    outer *= self.factors[name].size
        return found

    def at(self, place: "SubDim") -> str | None:
        """The factor of a sub-dim that stands behind as many indices of its dim; where there is none, the `followed`."""
        if place.outer != 1:
            named = self._minor.get(place[:3])
            if named is not None or not place.alone:
                return named
        return self.followed.get(place[:2])

    @cached_property
    def _minor(self) -> dict[tuple[int, int, int], str]:
        """The factors of sub-dims that stand behind others."""
        return {place[:3]: name for name, places in self.places.items() for place in places if place.outer != 1}

    def factor(self, name: str, op: str) -> Factor:
        """The factor called ``name``; raises UnknownNameError with the near ones."""
        if name not in self.factors:
            raise UnknownNameError("factor", name, self.factors, f" in op '{op}' ({self})")
        return self.factors[name]

    def dim_of(self, tensor: TensorFactors, name: str) -> tuple[int, int, int] | None:
        """The dim that carries factor ``name``, and the sizes of what lies outside of it there, and inside; None: none."""
        for dim, factors in enumerate(tensor):
            if name in factors:
                at = factors.index(name)
                outer, inner = (math.prod(self.factors[f].size for f in part) for part in (factors[:at], factors[at + 1 :]))
                return dim, outer, inner
        return None

    def named(self, tensor: TensorFactors) -> NamedDims:
        """The factors of a tensor's dims, with their sizes."""
        return tuple(tuple((f, self.factors[f].size) for f in dim) for dim in tensor)

    def names(self) -> FactorNames:
        """What the dims of the op's tensors are called."""
        return FactorNames(tuple(map(self.named, (*self.operands, *self.results))), tuple(self.factors))

    def __str__(self) -> str:
        def one(tensor: TensorFactors) -> str:
            dims = [d[0] if len(d) == 1 else f"({' '.join(d)})" if d else "1" for d in tensor]
            return " ".join(dims) or "·"

        left = ", ".join(map(one, self.operands)) or "·"
        return f"{left} -> {', '.join(map(one, self.results)) or '·'}"
