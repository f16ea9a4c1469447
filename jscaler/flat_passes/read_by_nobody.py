"""What nobody reads goes: equations and exchanges whose results are not needed, and stacks that loops write for nobody."""

import dataclasses
from collections.abc import Iterable, Sequence

from jax.extend import core

from jscaler.capture.jaxprs import Atom
from jscaler.lower.flat_program import FlatLoop, FlatProgram, Item, has_effects, reads, results


def live(program: FlatProgram) -> FlatProgram:
    """Only what the results need: what a backward body computes again is there already, and its readers read that."""
    return dataclasses.replace(program, items=_live(program.items, program.outputs))


def _live(items: Sequence[Item], outputs: Iterable[Atom]) -> tuple[Item, ...]:
    needed = {v for v in outputs if isinstance(v, core.Var)}
    found: list[Item] = []
    for item in reversed(items):
        if needed.isdisjoint(results(item)) and not has_effects(item):
            continue
        kept = _pruned(item, needed) if isinstance(item, FlatLoop) else item
        needed.update(reads(kept))
        found.append(kept)
    return tuple(found[::-1])


def _pruned(loop: FlatLoop, needed: set[core.Var]) -> FlatLoop:
    """A loop without the stacks that nobody reads, nor what only they need."""
    ys = tuple((piece, stack) for piece, stack in loop.ys if stack in needed)
    kept = dataclasses.replace(loop, ys=ys, sums=tuple(one for one in loop.sums if one[-1] in needed))
    return dataclasses.replace(kept, items=_live(loop.items, kept.returned))
