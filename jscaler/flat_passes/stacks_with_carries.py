"""What a backward loop has saved for it waits for the cotangent that it carries in.

A loop with collectives is peeled by XLA, so that those of one iteration run beside the next one's arithmetic. Of the first
iteration, which then stands in front of the loop, nothing that is computed again needs the cotangent: the scheduler may put
it before the loss's backward, where logits and cotangents lie in memory already::

    saved stack, keys ─┐            ┌──► first iteration: computed again, then backward ──► loop over the other layers
    d(loss) ──► d(x) ──┴── fence ───┴──►

Parameters do not wait: what is gathered of them may come early. Where the step's peak is in the loop itself, nothing waits:
XLA has room in front, and the fence would cost it some of the loop's.
"""

import dataclasses
from collections.abc import Mapping, Set

from jax.extend import core

from jscaler.capture.jaxprs import swapped
from jscaler.flat_passes.before_loops import fence
from jscaler.flat_passes.occupancy import Occupancy
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item, Level, all_items, each_level, results


def stacks_with_carries(program: FlatProgram) -> FlatProgram:
    """A fence in front of backward loops with collectives: the stacks that were made for them, and what they carry in."""
    occupied = Occupancy(program)
    return each_level(program, lambda level: _with_fences(level, occupied))


def _with_fences(level: Level, occupied: Occupancy) -> list[Item]:
    found: list[Item] = []
    made: dict[core.Var, int] = {}
    saved: set[core.Var] = set()  # by a loop in front
    start = 0  # behind the last loop
    for place, item in enumerate(level.items):
        if isinstance(item, FlatLoop):
            early = _may_be_early(item, saved) and occupied.most(level.items[start:place]) > occupied.most([item])
            found += _fenced(item, made) if early else [item]
            saved |= {stack for _, stack in item.ys}
            start = place + 1
        else:
            found.append(item)
        made.update((v, place) for v in results(item))
    return found


def _may_be_early(loop: FlatLoop, saved: Set[core.Var]) -> bool:
    """Whether XLA peels it, and it reads what a loop in front has saved."""
    return any(stack in saved for stack, _ in loop.xs) and any(isinstance(item, Exchange) for item in all_items(loop.items))


def _fenced(loop: FlatLoop, made: Mapping[core.Var, int]) -> list[Item]:
    arriving = [init for init, *_ in loop.carries if isinstance(init, core.Var) and init in made]
    if not arriving:
        return [loop]
    newest = max(arriving, key=lambda v: made[v])
    stacks = dict.fromkeys(stack for stack, _ in loop.xs if isinstance(stack, core.Var) and stack in made)
    later = {v: core.Var(v.aval) for v in (newest, *stacks)}
    carries = tuple((later[newest] if init is newest else init, *rest) for init, *rest in loop.carries)
    xs = tuple((swapped(later, stack), piece) for stack, piece in loop.xs)
    return [fence(list(later), list(later.values())), dataclasses.replace(loop, carries=carries, xs=xs)]
