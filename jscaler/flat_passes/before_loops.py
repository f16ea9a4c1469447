"""Products that stand in front of a loop, and are read behind it, are made in front of it.

A scheduler that hides collectives may put a weight's gradient off until somebody reads it. Behind a loop, that is after all
layers' backward: what the product reads, which may be the logits, then lies in memory all the while::

    dlogits ──► dot ──► d(table) ┐            ┌──► + look-ups' gradient
    dx ──────────────────────────┴── fence ───┴──► loop over the layers

The fence (an ``optimization_barrier``) has the loop wait for the product. It is put only where an operand, larger than the
product, is then free. It costs no time: the product has to be made anyway. Layers that are computed again, and are no loop,
have fences already (`capture.recompute`): the first of them waits for such products, too.
"""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import TypeGuard

from jax import lax
from jax.extend import core, source_info_util

from jscaler.capture.jaxprs import Atom, dtype, shape, trace_flat
from jscaler.lax_primitives import contracts, is_fence
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item, Level, each_level, reads, results

HELD = "held"  # the scope of fences that passes put up


def products_before_loops(program: FlatProgram) -> FlatProgram:
    """A fence in front of each loop that would keep a product's operands in memory, so that the product is made first."""
    return each_level(program, _with_gates)


def _with_gates(level: Level) -> list[Item]:
    """Without collectives nothing is put off across the fences of what is computed again."""
    items = level.items
    last = _last_reads(items, level.outputs)
    hides = any(isinstance(item, Exchange) for item in items)
    found: list[Item] = []
    between: list[Item] = []
    for place, item in enumerate(items):
        if isinstance(item, FlatLoop) or (hides and is_fence(item) and not _holds(item)):
            found += _gated(between, item, place, last)
            between = []
        else:
            between.append(item)
    return [*found, *between]


def _last_reads(items: Sequence[Item], outputs: Sequence[Atom]) -> dict[core.Var, int]:
    """The place of the last item that reads a variable, of those that ``outputs`` need."""
    found = {v: len(items) for v in outputs if isinstance(v, core.Var)}
    for place in reversed(range(len(items))):
        if _is_needed(items[place], found):
            for v in reads(items[place]):
                found.setdefault(v, place)
    return found


def _is_needed(item: Item, wanted: Container[core.Var]) -> bool:
    return any(v in wanted for v in results(item)) or (isinstance(item, core.JaxprEqn) and bool(item.effects))


def _gated(items: Sequence[Item], gate: FlatLoop | core.JaxprEqn, place: int, last: Mapping[core.Var, int]) -> list[Item]:
    """``items`` and the loop or fence behind them, which waits for products; what is made of these comes later."""
    made = {v: number for number, item in enumerate(items) for v in results(item)}
    waits = [init for init, *_ in gate.carries] if isinstance(gate, FlatLoop) else gate.invars
    arriving = [v for v in waits if isinstance(v, core.Var) and v in made]
    taken = set(reads(gate))
    found: dict[int, core.Var] = {}
    behind: set[int] = set()
    for number, item in enumerate(items) if arriving else ():
        if _is_put_off(item, made, last, place):
            places, dependent = _made_of(item.outvars[0], items)
            if any(last.get(v, -1) > place for v in dependent) and dependent.isdisjoint(taken):
                found[number] = item.outvars[0]
                behind |= places
    products = {v: core.Var(v.aval) for number, v in found.items() if number not in behind}  # not what is made of another
    if not products:
        return [*items, gate]
    first = [renamed(item, products) for i, item in enumerate(items) if i not in behind]
    late = [items[i] for i in sorted(behind)]
    if not isinstance(gate, FlatLoop):
        return [*first, fence([*gate.invars, *products.values()], [*gate.outvars, *products]), *late]
    newest = max(arriving, key=lambda v: made[v])
    later = core.Var(newest.aval)
    carries = tuple((later if init is newest else init, *rest) for init, *rest in gate.carries)
    barrier = fence([newest, *products.values()], [later, *products])
    return [*first, barrier, *late, dataclasses.replace(gate, carries=carries)]


def needed(items: Sequence[Item], outputs: Sequence[Atom]) -> set[core.Var]:
    """What is read by ``items`` that ``outputs`` need, and the outputs."""
    return set(_last_reads(items, outputs))


def _is_put_off(
    item: Item, made: Container[core.Var], last: Mapping[core.Var, int], place: int
) -> TypeGuard[core.JaxprEqn]:
    """Whether it is a product that is smaller than an operand which is read by nobody from ``place`` on."""
    if not isinstance(item, core.JaxprEqn) or not contracts([item]):
        return False
    operands = [v for v in item.invars if isinstance(v, core.Var) and v in made and last.get(v, -1) < place]
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


def fence(taken: Sequence[Atom], given: Sequence[core.Var]) -> core.JaxprEqn:
    """A fence that a pass puts up, for XLA's scheduler; its scope tells it from those of ops and orders."""
    eqn = trace_flat(lambda *xs: list(lax.optimization_barrier(xs)), [v.aval for v in taken]).eqns[0]
    info = eqn.source_info.replace(name_stack=source_info_util.new_name_stack(HELD))
    return eqn.replace(invars=list(taken), outvars=list(given), source_info=info)


def _holds(fence: core.JaxprEqn) -> bool:
    """Whether a pass has put ``fence`` up."""
    return str(fence.source_info.name_stack) == HELD


def nbytes(var: core.Var) -> int:
    return math.prod(shape(var)) * dtype(var).itemsize
