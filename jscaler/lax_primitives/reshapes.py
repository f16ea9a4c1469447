"""Which sub-dims of two shapes are one index when one is reshaped to the other.

A sub-dim is a digit of an element's flat index: from ``low`` to ``high`` rows it is ``flat // low % (high // low)``.
Digits of both shapes are matched from the minor end; where sizes do not divide, as far as they have a common divisor,
and then from the major end of what is mixed. What lies between is mixed, and cannot be split.

    (6, 4) and (3, 8)        3 | 2 | 4
    (8, 6, 10) and (8, 4, 15)        8 | 2 | mixed, 6 | 5
"""

import itertools
import math
from collections.abc import Sequence

from jax.extend import core

from jscaler.ir.equations import shape
from jscaler.lax_primitives.spec import Dims, Label, Spec, dims

Digit = tuple[int, int]  # low, high

MIXED = "a reshape mixes it with its neighbour"


def reshape(eqn: core.JaxprEqn) -> Spec:
    """Digits that both sides have pass."""
    order = eqn.params.get("dimensions")  # lax.reshape may transpose first
    source, target = shape(eqn.invars[0]), shape(eqn.outvars[0])
    order = tuple(range(len(source))) if order is None else order
    operand, result, blocked = _labels(tuple(source[d] for d in order), target)
    return Spec((tuple(operand[order.index(d)] for d in range(len(order))),), (result,), blocked=blocked, linear="move")


def common_refinement(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], bool]:
    """The sizes of the digits that both shapes have, major first, and whether these are all.

    Example: ``(6, 4)`` and ``(3, 8)`` have the common refinement ``(3, 2, 4)``; ``(4, 9)`` and ``(6, 6)`` share the
    major 2 and the minor 3.
    """
    found = [high // low for low, high in reversed(shared_digits(a, b))]
    return found, math.prod(found) == math.prod(a)


def shared_digits(a: Sequence[int], b: Sequence[int]) -> list[Digit]:
    """The digits that two shapes of one size have in common, minor first."""
    chains = [list(itertools.accumulate(reversed(s), lambda x, y: x * y, initial=1)) for s in (a, b)]
    assert chains[0][-1] == chains[1][-1] > 0
    found: list[Digit] = []
    at = 1
    while at < chains[0][-1]:
        after = [min(n for n in chain if n > at) for chain in chains]
        step = math.gcd(*(n // at for n in after))
        found += [(at, at * step)] if step > 1 else []
        if at * step in after:
            at *= step
            continue
        end = min(n for n in chains[0] if n > at and n in chains[1])
        found += reversed(_from_above(chains, at * step, end))
        at = end
    return found


def _from_above(chains: Sequence[Sequence[int]], low: int, high: int) -> list[Digit]:
    """The digits between ``low`` and ``high`` that both have, matched from the major end."""
    found: list[Digit] = []
    while high > low:
        before = [max(low, *(n for n in chain if n < high)) for chain in chains]
        step = math.gcd(*(high // n for n in before))
        found += [(high // step, high)] if step > 1 else []
        high //= step
        if high not in before:
            break
    return found


def _labels(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[Label, str]]:
    """Labels of both sides; an empty tensor has those of its dims that are not empty."""
    sides = [[n for n in sizes if n] for sizes in (source, target)]
    if math.prod(sides[0]) != math.prod(sides[1]):
        both = [dims(sizes, [(side, i) for i in range(len(sizes))]) for side, sizes in enumerate((source, target))]
        return both[0], both[1], {label: MIXED for tensor in both for dim in tensor for label in dim}
    digits = shared_digits(*sides)
    blocked: dict[Label, str] = {}

    def tensor(side: int, sizes: Sequence[int]) -> Dims:
        found, low = [], 1
        for size in reversed(sizes):
            found.append(_dim(digits, low, low * size, side) if size else ())
            low *= size or 1
        blocked.update({label: MIXED for dim in found for label in dim if label[0][0] != "flat"})
        return tuple(reversed(found))

    return tensor(0, source), tensor(1, target), blocked


def _dim(digits: Sequence[Digit], low: int, high: int, side: int) -> tuple[Label, ...]:
    """The labels of the dim from ``low`` to ``high``, major first; what no digit fills is one of its own."""
    found: list[Label] = []
    for start, end in [(a, b) for a, b in digits if low <= a and b <= high] + [(high, high)]:
        if start > low:
            found.append(((side, low), start // low))
        if end > start:
            found.append((("flat", start), end // start))
        low = end
    return tuple(reversed(found))
