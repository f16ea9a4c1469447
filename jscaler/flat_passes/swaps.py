"""``transpose(dot(a, b))`` becomes ``dot(b, a)``, where the transpose only swaps what the two operands leave.

JAX writes the gradient of a kernel so. XLA folds the transpose into the dot, into a form for which its CPU backend has
no fast kernel; GSPMD escapes by chance, since its all-reduce stands between the two. Each element is the same sum.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

from jax.extend import core

from jscaler.capture.jaxprs import Atom, shape
from jscaler.lower.flat_program import FlatProgram, Item, each_level, reads


def swapped_dots(program: FlatProgram) -> FlatProgram:
    """Every such pair as one dot, where nobody else reads the dot that goes: XLA's CPU backend has a fast kernel for it."""
    return each_level(program, lambda level: swap_dots(level.items, level.outputs))


def swap_dots(items: Sequence[Item], outputs: Sequence[Atom]) -> list[Item]:
    """``items``, behind which ``outputs`` are read, with the dots swapped."""
    readers = Counter(v for v in outputs if isinstance(v, core.Var))
    for item in items:
        readers.update(set(reads(item)))
    dots = {item.outvars[0]: (place, item) for place, item in enumerate(items) if _is(item, "dot_general")}
    found: list[Item | None] = list(items)
    for place, eqn in enumerate(items):
        if not _is(eqn, "transpose"):
            continue
        (source,), (out,) = eqn.invars, eqn.outvars
        if not isinstance(source, core.Var) or source not in dots or readers[source] != 1:
            continue
        at, dot = dots[source]
        if _swaps(eqn.params["permutation"], dot):
            swapped = _swapped(dot, out)
            found[at], found[place] = swapped, None
            dots[out] = at, swapped  # two in a row undo each other
    return [item for item in found if item is not None]


def _is(item: Item, name: str) -> TypeGuard[core.JaxprEqn]:
    return isinstance(item, core.JaxprEqn) and item.primitive.name == name


def _swaps(permutation: Sequence[int], dot: core.JaxprEqn) -> bool:
    """Whether the dims that the left operand leaves and those of the right change places, and no others."""
    (contracted, _), (batch, _) = dot.params["dimension_numbers"]
    left = len(shape(dot.invars[0])) - len(contracted)
    dims = list(range(len(permutation)))
    plain = dot.params["precision"] is None or isinstance(dot.params["precision"], tuple)
    kept = len(batch)
    return (
        plain
        and dot.params.get("out_sharding") is None
        and list(permutation) == dims[:kept] + dims[left:] + dims[kept:left]
    )


def _swapped(dot: core.JaxprEqn, out: core.Var) -> core.JaxprEqn:
    (contracted, batch), precision = dot.params["dimension_numbers"], dot.params["precision"]
    params = {
        **dot.params,
        "dimension_numbers": (contracted[::-1], batch[::-1]),
        "precision": precision[::-1] if precision else precision,
    }
    return dot.replace(invars=dot.invars[::-1], outvars=[out], params=params)
