"""``transpose(dot(a, b))`` becomes ``dot(b, a)``, where the transpose only swaps what the two operands leave.

JAX writes the gradient of a kernel so. XLA folds the transpose into the dot, into a form for which its CPU backend has
no fast kernel; GSPMD escapes by chance, since its all-reduce stands between the two. Each element is the same sum.
"""

from collections import Counter
from collections.abc import Sequence

from jax.extend import core

from jscaler.capture.jaxprs import Atom, shape
from jscaler.lower.casts import Item, reads


def swap_dots(items: Sequence[Item], outputs: Sequence[Atom]) -> list[Item]:
    """``items`` with every such pair as one dot, where nobody else reads the dot that goes.

    Args:
        items: equations, exchanges and loops.
        outputs: what is read after them.
    """
    readers = Counter(v for v in outputs if isinstance(v, core.Var))
    for item in items:
        readers.update(set(reads(item)))
    dots = {item.outvars[0]: place for place, item in enumerate(items) if _is(item, "dot_general")}
    found: list[Item | None] = list(items)
    for place, eqn in enumerate(items):
        source = eqn.invars[0] if _is(eqn, "transpose") else None
        if not isinstance(source, core.Var) or source not in dots or readers[source] != 1:
            continue
        at = dots[source]
        dot = found[at]
        assert dot is not None
        if _swaps(eqn.params["permutation"], dot):
            found[at], found[place] = _swapped(dot, eqn.outvars[0]), None
            dots[eqn.outvars[0]] = at  # two in a row undo each other
    return [item for item in found if item is not None]


def _is(item: Item, name: str) -> bool:
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
