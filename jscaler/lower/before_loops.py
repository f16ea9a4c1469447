"""Products that stand in front of a loop, and are read behind it, are made in front of it.

A scheduler that hides collectives may put a weight's gradient off until somebody reads it. Behind a loop, that is after all
layers' backward: what the product reads, which may be the logits, then lies in memory all the while::

    dlogits ──► dot ──► d(table) ┐            ┌──► + look-ups' gradient
    dx ──────────────────────────┴── fence ───┴──► loop over the layers

The fence (an ``optimization_barrier``) has the loop wait for the product. It is put only where an operand, larger than the
product, is then free. It costs no time: the product has to be made anyway.
"""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence

from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import Atom, dtype, shape, trace_flat
from jscaler.lower.casts import Exchange, Item, reads

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def made_before_loops(items: Sequence[Item], outputs: Sequence[Atom]) -> list[Item]:
    """``items`` with a fence in front of each loop that would keep a product's operands in memory.

    Args:
        items: equations, exchanges and loops.
        outputs: what is read after them.
    """
    found = list(items)
    for name in [id(item) for item in items if _is_loop(item)]:
        found = _before(found, next(place for place, item in enumerate(found) if id(item) == name), outputs)
    return found


def _before(items: Sequence[Item], place: int, outputs: Sequence[Atom]) -> list[Item]:
    """``items`` with a fence of the products that the loop at ``place`` waits for; what is made of them is behind it."""
    early, loop, late = items[:place], items[place], items[place + 1 :]
    made = {v: number for number, item in enumerate(early) for v in results(item)}
    arriving = [init for init, *_ in loop.carries if isinstance(init, core.Var) and init in made]
    if not arriving:
        return list(items)
    wanted, taken = needed(late, outputs), set(reads(loop))
    found: dict[int, core.Var] = {}
    behind: set[int] = set()
    for number, item in enumerate(early):
        if _is_put_off(item, made, wanted | taken):
            places, dependent = _made_of(item.outvars[0], early)
            waits = not any(_is_loop(early[i]) for i in places)
            if waits and dependent & wanted and dependent.isdisjoint(taken):
                found[number] = item.outvars[0]
                behind |= places
    products = {v: core.Var(v.aval) for number, v in found.items() if number not in behind}  # not what is made of another
    if not products:
        return list(items)
    last = max(arriving, key=lambda v: made[v])
    later = core.Var(last.aval)
    carries = tuple((later if init is last else init, *rest) for init, *rest in loop.carries)
    first = [renamed(item, products) for i, item in enumerate(early) if i not in behind]
    barrier = fence([last, *products.values()], [later, *products])
    return [*first, barrier, *(early[i] for i in sorted(behind)), dataclasses.replace(loop, carries=carries), *late]


def needed(items: Sequence[Item], outputs: Sequence[Atom]) -> set[core.Var]:
    """What is read by ``items`` that ``outputs`` need, and the outputs."""
    found = {v for v in outputs if isinstance(v, core.Var)}
    for item in reversed(items):
        if not found.isdisjoint(results(item)) or (isinstance(item, core.JaxprEqn) and item.effects):
            found.update(reads(item))
    return found


def _is_put_off(item: Item, made: Container[core.Var], kept: Container[core.Var]) -> bool:
    """Whether it is a product that is smaller than an operand which is read by nobody from the loop on."""
    if not isinstance(item, core.JaxprEqn) or item.primitive.name not in PRODUCTS:
        return False
    operands = [v for v in item.invars if isinstance(v, core.Var) and v in made and v not in kept]
    return any(nbytes(v) > nbytes(item.outvars[0]) for v in operands)


def _made_of(product: core.Var, items: Sequence[Item]) -> tuple[set[int], set[core.Var]]:
    """The places of ``items`` that depend on ``product``; and it and their results."""
    known, places = {product}, set[int]()
    for place, item in enumerate(items):
        if not known.isdisjoint(reads(item)):
            known.update(results(item))
            places.add(place)
    return places, known


def renamed(item: Item, table: Mapping[core.Var, core.Var]) -> Item:
    """``item`` with other names for what it makes: who reads a product reads what the fence hands on."""
    if not isinstance(item, core.JaxprEqn):
        return item
    return item.replace(outvars=[table.get(v, v) for v in item.outvars])


def fence(taken: Sequence[core.Var], given: Sequence[core.Var]) -> core.JaxprEqn:
    eqn = trace_flat(lambda *xs: list(lax.optimization_barrier(xs)), [v.aval for v in taken]).eqns[0]
    return eqn.replace(invars=list(taken), outvars=list(given))


def _is_loop(item: Item) -> bool:
    return not isinstance(item, (core.JaxprEqn, Exchange))


def results(item: Item) -> list[core.Var]:
    if isinstance(item, Exchange):
        return [item.output]
    return [v for v in item.outvars if isinstance(v, core.Var)]


def nbytes(var: core.Var) -> int:
    return math.prod(shape(var)) * dtype(var).itemsize
