"""The two products of an attention's backward are made together, where one of them frees what is larger than itself.

Where a block has collectives, XLA may put off what no other device waits for. Of ``probs @ v`` that is ``dv``, so that the
probabilities lie in memory beside their cotangent, and beside what is made of it next, which are all of one size::

    d(out), v     ──► dot ──► d(probs) ──┐           ┌──► backward of the softmax
    d(out), probs ──► dot ──► dv ────────┴── fence ──┴──► projection

So it is in a loop over parts of heads (co-shard), where these arrays are what the parts are made for.

Only products with batch dims are fenced: they are no weight's gradients, so that their readers come soon in any order.
"""

import itertools
from collections.abc import Sequence
from typing import TypeGuard

from jax.extend import core

from jscaler.capture.jaxprs import nbytes
from jscaler.flat_passes.before_loops import fence, needed
from jscaler.lower.flat_program import Exchange, FlatProgram, Item, Level, each_level, reads, renamed, results


def pairs_together(program: FlatProgram) -> FlatProgram:
    """A fence of every two products of which one frees what is larger than itself: both are made before either is read."""
    return each_level(program, _with_pairs)


def _with_pairs(level: Level) -> list[Item]:
    items, outputs = level.items, level.outputs
    found = list(items)
    if not level.in_time and not any(isinstance(item, Exchange) for item in items):
        return found
    last: dict[core.Var, int] = {v: len(items) for v in outputs if isinstance(v, core.Var)}
    for place, item in enumerate(items):
        last |= {v: max(place, last.get(v, 0)) for v in reads(item)}
    alive = needed(items, outputs)
    batched = {place: item for place, item in enumerate(items) if _is_batched(item) and item.outvars[0] in alive}
    pairs = [(a, b) for a, b in itertools.pairwise(batched) if _is_pair(batched[a], batched[b])]
    taken: set[int] = set()
    for first, second in reversed(pairs):  # from behind, so that places hold
        if not {first, second} & taken and _frees(batched[first], batched[second], second, last):
            taken |= {first, second}
            found[first : second + 1] = _fenced(items[first : second + 1])
    return found


def _is_batched(item: Item) -> TypeGuard[core.JaxprEqn]:
    return (
        isinstance(item, core.JaxprEqn)
        and item.primitive.name == "dot_general"
        and any(item.params["dimension_numbers"][1])
    )


def _is_pair(first: core.JaxprEqn, second: core.JaxprEqn) -> bool:
    """Whether both read one array, and stand in one op."""
    shared = {v for v in first.invars if isinstance(v, core.Var)} & {v for v in second.invars if isinstance(v, core.Var)}
    return bool(shared) and str(first.source_info.name_stack) == str(second.source_info.name_stack)


def _frees(first: core.JaxprEqn, second: core.JaxprEqn, place: int, last: dict[core.Var, int]) -> bool:
    """Whether one of them leaves less than an operand that nobody reads after both."""
    return any(
        nbytes(v) > nbytes(eqn.outvars[0]) and last[v] <= place
        for eqn in (first, second)
        for v in eqn.invars
        if isinstance(v, core.Var)
    )


def _fenced(items: Sequence[Item]) -> list[Item]:
    """A pair and what stands between: that which reads the first product comes after the fence."""
    pair = [results(items[0])[0], results(items[-1])[0]]
    known, before, behind = {pair[0]}, [], []
    for item in items[1:-1]:
        if known.isdisjoint(reads(item)):
            before.append(item)
        else:
            known.update(results(item))
            behind.append(item)
    if not known.isdisjoint(reads(items[-1])):
        return list(items)  # one is made of the other
    table = {v: core.Var(v.aval) for v in pair}
    made = [renamed(items[0], {}, table), *before, renamed(items[-1], {}, table)]
    return [*made, fence(list(table.values()), pair), *behind]
