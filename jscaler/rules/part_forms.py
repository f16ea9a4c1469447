"""Which part of each tensor one part of an op reads and leaves; and the parts of an op along a factor, of any sizes.

y (8 rows) = f(x (8 rows), w)        four parts        y' (2 rows) = f'(x' (2 rows), w)
                                                       x' is Sliced; w is read whole; a sum over rows is Summed
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jscaler.capture.bodies import BodyTable
from jscaler.ir import Body, FactorNames, Op, Rule
from jscaler.ir.mask import Combiner
from jscaler.ir.rule import TensorFactors
from jscaler.rules.rule_book import RuleBook


@dataclass(frozen=True)
class Sliced:
    """A part of a tensor: of dim ``dim``, seen as (blocks, parts, rows), one of the parts."""

    dim: int
    blocks: int
    parts: int
    rows: int

    def shifted(self, by: int) -> "Sliced | None":
        """The same of a tensor with ``by`` dims more in front; None where the dim would be gone."""
        return dataclasses.replace(self, dim=self.dim + by) if self.dim + by >= 0 else None

    def shape(self, whole: Sequence[int], number: int = 0) -> tuple[int, ...]:
        """The shape of any part."""
        return (*whole[: self.dim], self.blocks * self.rows, *whole[self.dim + 1 :])

    def take(self, x: jax.Array, index: jax.Array | int) -> jax.Array:
        """Part ``index`` of ``x``."""
        seen = x.reshape((*x.shape[: self.dim], self.blocks, self.parts, self.rows, *x.shape[self.dim + 1 :]))
        row = lax.dynamic_index_in_dim(seen, index, self.dim + 1, keepdims=False, allow_negative_indices=False)
        return row.reshape(self.shape(x.shape))

    def merge(self, stack: jax.Array) -> jax.Array:
        """The whole of a stack of all parts."""
        _, *part = stack.shape
        seen = stack.reshape((self.parts, *part[: self.dim], self.blocks, self.rows, *part[self.dim + 1 :]))
        whole = (*part[: self.dim], self.blocks * self.parts * self.rows, *part[self.dim + 1 :])
        return jnp.moveaxis(seen, 0, self.dim + 1).reshape(whole)


@dataclass(frozen=True)
class Summed:
    """A summand, or candidate: the whole is what all parts join to."""

    combiner: Combiner


@dataclass(frozen=True)
class Own:
    """What every part has for itself (a micro-batch's mean): no part of a whole. The next part may take it over."""


@dataclass(frozen=True)
class Ranged:
    """One of several parts of unequal sizes: of dim ``dim``, seen as (outer, the factor, inner), a range of the factor."""

    dim: int
    outer: int
    sizes: tuple[int, ...]
    inner: int

    def shape(self, whole: Sequence[int], number: int) -> tuple[int, ...]:
        """The shape of part ``number``."""
        return (*whole[: self.dim], self.outer * self.sizes[number] * self.inner, *whole[self.dim + 1 :])

    def take(self, x: jax.Array, number: int) -> jax.Array:
        """Part ``number`` of ``x``."""
        seen = x.reshape((*x.shape[: self.dim], self.outer, sum(self.sizes), self.inner, *x.shape[self.dim + 1 :]))
        start = sum(self.sizes[:number])
        found = lax.slice_in_dim(seen, start, start + self.sizes[number], axis=self.dim + 1)
        return found.reshape(self.shape(x.shape, number))

    def merge(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The whole of all parts."""
        seen = [
            x.reshape((*x.shape[: self.dim], self.outer, size, self.inner, *x.shape[self.dim + 1 :]))
            for x, size in zip(parts, self.sizes, strict=True)
        ]
        rest = parts[0].shape
        whole = (*rest[: self.dim], self.outer * sum(self.sizes) * self.inner, *rest[self.dim + 1 :])
        return lax.concatenate(seen, self.dim + 1).reshape(whole)


Piece = Sliced | Ranged
Form = Piece | Summed | Own | None  # None: the tensor as it is, the same for all parts


@dataclass(frozen=True)
class OpPart:
    """What one op does for one part.

    Attributes:
        inputs, outputs: which part of each tensor.
        body: at the part's shapes; None for an op that is right for any part of its inputs.
        named: the names of the factors that are left; the plan's decisions in space speak of them.
        indexed: whether the part's index is the body's last operand.
    """

    inputs: tuple[Form, ...]
    outputs: tuple[Form, ...]
    body: Body | None = None
    named: FactorNames | None = None
    indexed: bool = False

    def of(self, number: int) -> tuple[Body | None, FactorNames | None]:
        """Body and names for part ``number``."""
        return self.body, self.named


@dataclass(frozen=True)
class CellParts(OpPart):
    """What one op does for each of several unequal parts.

    Attributes:
        bodies, names: of each part.
    """

    bodies: tuple[Body, ...] = ()
    names: tuple[FactorNames, ...] = ()

    def of(self, number: int) -> tuple[Body | None, FactorNames | None]:
        return self.bodies[number], self.names[number]


def cell_parts(op: Op, factor: str, sizes: tuple[int, ...], book: RuleBook, bodies: BodyTable) -> CellParts | None:
    """The parts of ``op`` along ``factor``, of these sizes; None where it has no such factor, or needs it whole."""
    rule = book.rule(op)
    found = rule.factors.get(factor)
    if found is None or found.kind == "blocked" or found.size != sum(sizes):
        return None
    if (found.even_only and len(set(sizes)) > 1) or any(name == factor for name, _, _ in rule.halos):
        return None
    inputs = [_ranged(rule, dims, factor, sizes) for dims in rule.operands]
    outputs: list[Form] = []
    for i, dims in enumerate(rule.results):
        combiner = rule.shares.get((factor, i))
        outputs.append(Summed(combiner) if combiner is not None else _ranged(rule, dims, factor, sizes))
    made = [book.cell(op, factor, sizes, i) for i in range(len(sizes))]
    known = {id(jaxpr): bodies.intern(jaxpr) for jaxpr in {id(jaxpr): jaxpr for jaxpr in made}.values()}

    def named(size: int) -> FactorNames:
        tensors = (*rule.operands, *rule.results)
        own = {f: size if f == factor else rule.factors[f].size for f in rule.factors}
        return FactorNames(tuple(tuple(tuple((f, own[f]) for f in dim) for dim in dims) for dims in tensors), tuple(own))

    names = {size: named(size) for size in sizes}
    own = tuple(known[id(jaxpr)] for jaxpr in made)
    for body, size in dict(zip(own, sizes, strict=True)).items():
        book.know_cell(op, factor, size, body, names[size])
    return CellParts(tuple(inputs), tuple(outputs), bodies=own, names=tuple(names[size] for size in sizes))


def _ranged(rule: Rule, dims: TensorFactors, name: str, sizes: tuple[int, ...]) -> Ranged | None:
    place = rule.dim_of(dims, name)
    if place is None:
        return None
    dim, outer, inner = place
    return Ranged(dim, outer, sizes, inner)
