"""Gradients of a stack of layers are added to their sum layer by layer, in the loop that makes them.

::

    before   loop: slice ──► stack [24, …] ──► add ──► sum [24, …]        gradients of all layers lie beside their sum
    now      loop: slice ──► add ──► sum's slice                          those of one layer do

Of a sum over micro-batches, in a loop over these or between the blocks of a pipeline. The sum is taken in the memory in
which it was before, so it has to be nobody else's: a carry, or what the program was given, that only this addition reads.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from jax.extend import core

from jscaler.capture.jaxprs import shape
from jscaler.lax_primitives import is_cast
from jscaler.lower.flat_program import FlatLoop, FlatProgram, Item, Level, each_level, reads, results


def added_by_slices(program: FlatProgram) -> FlatProgram:
    """Loops that add to the slices of a sum, where they made a stack that was added to it."""
    return each_level(program, _with_sums)


def _with_sums(level: Level) -> list[Item]:
    loops = {stack: item for item in level.items if isinstance(item, FlatLoop) for _, stack in item.ys}
    if not loops or not level.given:
        return list(level.items)
    often = Counter(v for item in level.items for v in _read_by(item))
    often.update(v for v in level.outputs if isinstance(v, core.Var))
    given = {v for v in level.given if often[v] == 1}
    stacks = {v: v for v in loops if often[v] == 1}  # what is added -> the stack that it is, or is a cast of
    sums: dict[core.Var, tuple[core.Var, core.Var]] = {}  # stack -> the sum before and after
    gone: set[core.Var] = set()
    for item in level.items:
        added = [v for v in _read_by(item) if v in stacks] if isinstance(item, core.JaxprEqn) else []
        if len(added) != 1 or not isinstance(item, core.JaxprEqn) or len(item.outvars) != 1:
            continue
        (result,), first = item.outvars, item.invars[0]
        if is_cast(item) and often[result] == 1:
            stacks[result] = stacks[added[0]]
        elif item.primitive.name == "add" and first in given and shape(first) == shape(added[0]):
            sums[stacks[added[0]]] = first, result
            gone |= {added[0], result}
    return [
        _adding(item, sums) if isinstance(item, FlatLoop) else item
        for item in level.items
        if isinstance(item, FlatLoop) or gone.isdisjoint(results(item))
    ]


def _read_by(item: Item) -> list[core.Var]:
    """What an item reads, as often as it does."""
    return [a for a in item.invars if isinstance(a, core.Var)] if isinstance(item, core.JaxprEqn) else [*reads(item)]


def _adding(loop: FlatLoop, sums: Mapping[core.Var, tuple[core.Var, core.Var]]) -> FlatLoop:
    """``loop``, which adds to sums what it has left as stacks."""
    added = tuple((sums[stack][0], piece, sums[stack][1]) for piece, stack in loop.ys if stack in sums)
    if not added:
        return loop
    kept = tuple((piece, stack) for piece, stack in loop.ys if stack not in sums)
    return dataclasses.replace(loop, ys=kept, sums=(*loop.sums, *added))
