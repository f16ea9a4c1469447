"""The table of primitives: for each, which dims of operands and results are one index, and what is linear.

Read it against the documentation of ``jax.lax``. A rule is a function from an equation to a `Spec`, written with
labels as in an einsum: dims that carry the same label are one index; a label that no result carries is reduced; a
label in ``blocked`` cannot be split. Dims of size 1 carry no label, since JAX broadcasts them silently.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import dtype, shape
from jscaler.ir import Halo
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


def elementwise(linear: str = "") -> SpecFunction:
    """Every operand dim is the result dim at the same place; scalars and size-1 dims broadcast."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        rank = len(shape(eqn.outvars[0]))
        operands = tuple(dims(shape(v), range(rank)) if shape(v) else () for v in eqn.invars)
        return Spec(operands, tuple(dims(shape(v), range(rank)) for v in eqn.outvars), linear=linear)

    return spec


def convert(eqn: core.JaxprEqn) -> Spec:
    """Casts are linear between floats, unless they narrow: a partial sum in fewer bits is another number."""
    source, target = (np.dtype(dtype(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    widens = all(jnp.issubdtype(d, jnp.floating) for d in (source, target)) and (
        target == source or target.itemsize > source.itemsize
    )
    return elementwise("move" if widens else "")(eqn)


def reduce(combiner: Combiner | None, linear: str = "") -> SpecFunction:
    """Reduce over ``axes``; ``combiner=None`` where parts cannot be joined (argmax)."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        axes = eqn.params["axes"]
        source = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
        result = tuple(d for i, d in enumerate(source) if i not in axes)
        blocked = {} if combiner else {label: "its reduction cannot be joined" for a in axes for label in source[a]}
        results = (result,) * len(eqn.outvars)
        return Spec((source,) * len(eqn.invars), results, combiner or "add", blocked, linear)

    return spec


def divide(eqn: core.JaxprEqn) -> Spec:
    """Linear in the dividend; integer division rounds each share, and is not."""
    floating = jnp.issubdtype(dtype(eqn.invars[0]), jnp.inexact)
    return elementwise("first" if floating else "")(eqn)


def reduce_logical(combiner: Combiner) -> SpecFunction:
    """And is min and or is max for booleans only; on integers they work bit by bit."""
    return lambda eqn: reduce(combiner if dtype(eqn.invars[0]) == np.dtype(bool) else None)(eqn)


def bitcast(eqn: core.JaxprEqn) -> Spec:
    """Elementwise between words of one size; else the minor dim holds the pieces of a word."""
    same = len(shape(eqn.invars[0])) == len(shape(eqn.outvars[0]))
    return (elementwise() if same else trailing(why="it holds the pieces of a word"))(eqn)


def along(parameter: str, linear: str, why: str) -> SpecFunction:
    """All dims pass but those that ``parameter`` names, which are blocked (cumsum, sort, reverse)."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        value = eqn.params[parameter]
        axes = value if isinstance(value, tuple) else (value,)
        all_dims = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
        blocked = {label: why for a in axes for label in all_dims[a]}
        made = [("made", i) for i in range(len(all_dims))]
        sizes = shape(eqn.invars[0])
        results = tuple(
            tuple(
                d if n == m else cut for d, n, m, cut in zip(all_dims, shape(v), sizes, dims(shape(v), made), strict=True)
            )
            for v in eqn.outvars
        )
        blocked |= {label: why for result in results for a in axes for label in result[a]}
        operands = (all_dims, *(((),) * len(shape(v)) for v in eqn.invars[1:]))
        same = all(shape(v) == shape(eqn.invars[0]) for v in eqn.invars)
        return Spec((all_dims,) * len(eqn.invars) if same else operands, results, blocked=blocked, linear=linear)

    return spec


def dot_general(eqn: core.JaxprEqn) -> Spec:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    left_shape, right_shape = shape(eqn.invars[0]), shape(eqn.invars[1])
    left: list[Any] = [("l", i) for i in range(len(left_shape))]
    right: list[Any] = [("r", i) for i in range(len(right_shape))]
    for kind, pairs in (("c", zip(contract_l, contract_r, strict=True)), ("b", zip(batch_l, batch_r, strict=True))):
        for i, j in pairs:
            left[i] = right[j] = (kind, i)
    free_l = [n for i, n in enumerate(left) if i not in (*contract_l, *batch_l)]
    free_r = [n for i, n in enumerate(right) if i not in (*contract_r, *batch_r)]
    out = [left[i] for i in batch_l] + free_l + free_r
    return Spec((dims(left_shape, left), dims(right_shape, right)), (dims(shape(eqn.outvars[0]), out),), linear="each")


def broadcast_in_dim(eqn: core.JaxprEqn) -> Spec:
    target = eqn.params["shape"]
    result = dims(target, range(len(target)))
    places = eqn.params["broadcast_dimensions"]
    source = tuple(() if size == 1 else result[place] for size, place in zip(shape(eqn.invars[0]), places, strict=True))
    return Spec((source,), (result,), linear="move")


def transpose(eqn: core.JaxprEqn) -> Spec:
    source = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    return Spec((source,), (tuple(source[p] for p in eqn.params["permutation"]),), linear="move")


def squeeze(eqn: core.JaxprEqn) -> Spec:
    source = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    return Spec((source,), (tuple(d for i, d in enumerate(source) if i not in eqn.params["dimensions"]),), linear="move")


def expand_dims(eqn: core.JaxprEqn) -> Spec:
    source = list(dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0])))))
    new = {d % len(shape(eqn.outvars[0])) for d in eqn.params["dimensions"]}
    result = tuple(() if i in new else source.pop(0) for i in range(len(shape(eqn.outvars[0]))))
    return Spec((dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0])))),), (result,), linear="move")


def iota(eqn: core.JaxprEqn) -> Spec:
    return Spec((), (dims(shape(eqn.outvars[0]), range(len(shape(eqn.outvars[0])))),))


def random_bits(eqn: core.JaxprEqn) -> Spec:
    """Bits are a function of the key and the element's global index, so every dim can be split (see localize)."""
    keys = len(shape(eqn.invars[0]))
    result = dims(shape(eqn.outvars[0]), range(len(shape(eqn.outvars[0]))))
    return Spec((result[:keys],), (result,), blocked=_drawn_together(eqn.invars[0], result[:keys], ("fry",)))


def _drawn_together(key: Any, labels: Dims, each: tuple[str, ...]) -> dict[Label, str]:
    """Batches of keys may be split only for generators that draw from every key by itself, named in ``each``."""
    by_itself = str(dtype(key)) in {f"key<{name}>" for name in each}
    return {} if by_itself else {label: "its keys are drawn from together" for dim in labels for label in dim}


def random_fold_in(eqn: core.JaxprEqn) -> Spec:
    spec = elementwise()(eqn)
    return dataclasses.replace(spec, blocked=_drawn_together(eqn.invars[0], spec.results[0], ("fry", "rbg")))


def trailing(linear: str = "", why: str = "it is the inside of a random key") -> SpecFunction:
    """Leading dims pass; dims that only one side has are blocked (random_wrap and its inverse)."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        ranks = [len(shape(v)) for v in (*eqn.invars, *eqn.outvars)]
        common = min(ranks)
        longest = max((*eqn.invars, *eqn.outvars), key=lambda v: len(shape(v)))
        labels = dims(shape(longest), range(len(shape(longest))))
        blocked = {label: why for d in labels[common:] for label in d}
        operands = tuple(labels[: len(shape(v))] for v in eqn.invars)
        return Spec(operands, tuple(labels[: len(shape(v))] for v in eqn.outvars), blocked=blocked, linear=linear)

    return spec


def random_split(eqn: core.JaxprEqn) -> Spec:
    """New keys along new dims, which are drawn together."""
    keys = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
    result = dims(shape(eqn.outvars[0]), range(len(shape(eqn.outvars[0]))))
    new = {label: "its keys are split together" for dim in result[len(keys) :] for label in dim}
    return Spec((keys,), (result,), blocked=new | _drawn_together(eqn.invars[0], keys, ("fry", "rbg")))


def optimization_barrier(eqn: core.JaxprEqn) -> Spec:
    each = tuple(dims(shape(v), [(i, d) for d in range(len(shape(v)))]) for i, v in enumerate(eqn.invars))
    return Spec(each, each, pairwise=True)
