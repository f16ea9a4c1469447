"""Constraints on where ops lie, in place of the devices of an ``op_assign``. All lie on all devices of a mesh; so they say
which of the mesh's axes split the ops along a dim that they share.

::

    graph.op_assign("mlp/down/*", same_as("mlp/up/*"))   parts of a shared dim lie where the other's do
    graph.op_assign("attention/*", together())           the same of each other
    graph.op_assign(["table", "head"], apart("words"))   no axis splits two of them along words
    graph.op_assign("table", on_all())                   each device has a part of its own, and no axis a copy
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jscaler.errors import PlanError
from jscaler.ir import Graph, Op
from jscaler.rules.reached_factors import all_reached_factors
from jscaler.spaces.holes import dims_of

Shared = Mapping[str, frozenset[str]]  # of a dim that ops share: path of an op -> its factors that the dim is


@dataclass(frozen=True)
class Where:
    """Where ops lie; see `same_as`, `together`, `apart` and `on_all`."""

    kind: Literal["same_as", "together", "apart", "on_all"]
    others: Any = None
    dims: tuple[str, ...] | None = None

    def __str__(self) -> str:
        told = [] if self.others is None else [repr(getattr(self.others, "path", self.others))]
        told += [] if self.dims is None else [f"dims={self.dims}"]
        return f"{self.kind}({', '.join(told)})"


def same_as(others: Any, dims: str | Sequence[str] | None = None) -> Where:
    """Where other ops lie: an axis that splits one along a dim that both have splits the other along it, too.

    Args:
        others: an op, a path or pattern, or several.
        dims: what the dim must be of the model, as for `any_split`; by default anything.

    Example:
        >>> print(same_as("mlp/up/*"))
        same_as('mlp/up/*')
    """
    return Where("same_as", others, dims_of(dims))


def together(dims: str | Sequence[str] | None = None) -> Where:
    """All where the others lie; in place of recompute's ``keep``, that all run again or none does.

    Args:
        dims: what a shared dim must be of the model, as for `any_split`; by default anything.

    Example:
        >>> print(together(dims="heads"))
        together(dims=('heads',))
    """
    return Where("together", None, dims_of(dims))


def apart(dims: str | Sequence[str] | None = None) -> Where:
    """On axes of their own: none splits two of the ops along a dim that both have.

    Args:
        dims: what the dim must be of the model, as for `any_split`; by default anything.

    Example:
        >>> print(apart())
        apart()
    """
    return Where("apart", None, dims_of(dims))


def on_all() -> Where:
    """In parts on all devices: no axis of the mesh copies the op.

    Example:
        >>> print(on_all())
        on_all()
    """
    return Where("on_all")


@dataclass(frozen=True)
class Tie:
    """A constraint between ops.

    Attributes:
        text: how it was written, with the first of its ops.
        alike: whether an axis splits all of them along a shared dim or none; else it splits one of them at most.
        dims: those that they share.
    """

    text: str
    alike: bool
    dims: tuple[Shared, ...]


def tied(
    graph: Graph, where: Where, ops: Sequence[str], others: Sequence[str], wanted: Callable[[str], Collection[str]] | None
) -> Tie:
    """What ``where`` says of some ops.

    Args:
        wanted: the factors of an op that count; by default all.

    Raises:
        PlanError: they share no dim, so that it says nothing.
    """
    dims = [*_shared(graph, [graph[path] for path in dict.fromkeys((*ops, *others))])]
    if where.kind == "same_as":
        dims = [own for own in dims if {*others} & {*own} and ({*ops} - {*others}) & {*own}]
    if wanted is not None:
        dims = [own for own in dims if any(factors.intersection(wanted(path)) for path, factors in own.items())]
    text = f"op_assign({names_of(ops)}, {where})"
    if not dims:
        raise PlanError(
            f"{text} matches nothing: {' and '.join(filter(None, map(names_of, (ops, others))))} share no dim through the "
            "dataflow; name ops of which one makes what the other reads, or both read one tensor"
        )
    return Tie(text, where.kind != "apart", tuple(dims))


def names_of(ops: Sequence[str]) -> str:
    """The first of some paths.

    Example:
        >>> names_of(["a", "b", "c", "d"])
        "'a', 'b', 'c', …"
    """
    return ", ".join([*(f"'{path}'" for path in ops[:3]), *["…"] * (len(ops) > 3)])


def _shared(graph: Graph, ops: Sequence[Op]) -> Iterator[Shared]:
    """The dims that two or more of the ops have."""
    seen: set[tuple[str, str]] = set()
    for op in ops:
        rule = graph.rule(op)
        for factor in (f.name for f in rule.factors.values() if f.splittable and f.size > 1):
            place = next((own for own in rule.places.get(factor, ()) if own.alone), None)
            if place is None or (op.path, factor) in seen:
                continue
            reached = all_reached_factors(graph, [((*op.inputs, *op.outputs)[place.tensor], place.dim)])
            found = {one.path: frozenset(reached.get(one, ())) for one in ops}
            found[op.path] |= {factor}
            seen |= {(path, name) for path, names in found.items() for name in names}
            if sum(map(bool, found.values())) > 1:
                yield {path: names for path, names in found.items() if names}
