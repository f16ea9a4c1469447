"""Products that stand in front of a loop, and are read behind it, are made in front of it, where that saves memory.

A scheduler that hides collectives may put a weight's gradient off until somebody reads it. Behind a loop, that is after all
layers' backward: what the product reads, which may be the logits, then lies in memory all the while::

    dlogits ──► dot ──► d(table) ┐            ┌──► + look-ups' gradient
    dx ──────────────────────────┴── fence ───┴──► loop over the layers

The fence (an ``optimization_barrier``) has the loop wait for the product. It is put where an operand, larger than the
product, is then free, and where the step's peak would grow if the operand were not: so the estimate says, which lays the
program out as it is written. A fence too many is not free: what XLA makes of nothing (random bits, zeros) it may then put
in front, where the peak is. Layers that are computed again, and are no loop, have fences already (`capture.recompute`):
the first of them waits for such products, too.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from jax import lax
from jax.extend import core, source_info_util

from jscaler.capture.jaxprs import Atom, nbytes, trace_flat
from jscaler.flat_passes.occupancy import Late, Occupancy
from jscaler.ir.walk import grouped
from jscaler.lax_primitives import contracts, is_fence
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item, Level, each_level, reads, renamed, results

HELD = "held"  # the scope of fences that passes put up


def products_before_loops(program: FlatProgram) -> FlatProgram:
    """A fence in front of each loop that would keep a product's operands in memory, so that the product is made first."""
    occupied = Occupancy(program)
    return occupied.kept_in(each_level(program, lambda level: _with_gates(level, occupied)))


def _with_gates(level: Level, occupied: Occupancy) -> list[Item]:
    """Without collectives nothing is put off across the fences of what is computed again."""
    items = level.items
    last = _last_reads(items, level.outputs)
    readers = _readers(items, last)
    hides = any(isinstance(item, Exchange) for item in items)
    found: list[Item] = []
    between: list[Item] = []
    late: list[Late] = []
    made: set[core.Var] = set()
    for place, item in enumerate(items):
        if isinstance(item, FlatLoop) or (hides and is_fence(item) and not is_held(item)):
            gate = _gated(items, between, place, last, readers, made)
            if gate is not None and not occupied.fits(items, [*late, gate.late]):
                found += gate.items
            else:
                late += [gate.late] if gate is not None else []
                found += [*between, item]
            between = []
        else:
            between.append(item)
        made.update(results(item))
    return [*found, *between]


def _last_reads(items: Sequence[Item], outputs: Sequence[Atom]) -> dict[core.Var, int]:
    """The place of the last item that reads a variable, of those that ``outputs`` need."""
    found = {v: len(items) for v in outputs if isinstance(v, core.Var)}
    for place in reversed(range(len(items))):
        if _is_needed(items[place], found):
            for v in reads(items[place]):
                found.setdefault(v, place)
    return found


def _readers(items: Sequence[Item], last: Container[core.Var]) -> Mapping[core.Var, list[int]]:
    """The places of the items that read a variable and are needed."""
    return grouped((v, place) for place, item in enumerate(items) if _is_needed(item, last) for v in reads(item))


def _is_needed(item: Item, wanted: Container[core.Var]) -> bool:
    return any(v in wanted for v in results(item)) or (isinstance(item, core.JaxprEqn) and bool(item.effects))


@dataclass(frozen=True)
class _Gated:
    """Items with the loop or fence behind them, which waits for products; and what it means if it does not."""

    items: list[Item]
    late: Late


def _gated(
    level: Sequence[Item],
    between: Sequence[Item],
    place: int,
    last: Mapping[core.Var, int],
    readers: Mapping[core.Var, Sequence[int]],
    known: Container[core.Var],
) -> _Gated | None:
    """The gate at ``place``, and the items ``between`` the last one and it; None where it needs to wait for nothing.

    Args:
        last, readers: the places of the last item, and of all, that read a variable.
        known: what was made in front of the gate.
    """
    gate = level[place]
    made = {v: number for number, item in enumerate(between) for v in results(item)}
    waits = [init for init, *_ in gate.carries] if isinstance(gate, FlatLoop) else reads(gate)
    arriving = [v for v in waits if isinstance(v, core.Var) and v in made]
    taken = set(reads(gate))
    found: dict[int, core.Var] = {}
    freed, readable, behind = set[core.Var](), set[core.Var](), set[int]()
    for number, item in enumerate(between) if arriving else ():
        operands = _put_off(item, known, last, place)
        if operands:
            product = results(item)[0]
            places, dependent = _made_of(product, between)
            if any(last.get(v, -1) > place for v in dependent) and dependent.isdisjoint(taken):
                found[number] = product
                behind |= places
                freed |= operands
                readable |= dependent
    products = {v: core.Var(v.aval) for number, v in found.items() if number not in behind}  # not what is made of another
    if not products:
        return None
    until = min((i for v in readable for i in readers.get(v, ()) if i > place), default=len(level))
    late = Late(place, until, sum(map(nbytes, freed)) - sum(map(nbytes, products)))
    # who reads a product reads what the fence hands on
    first = [renamed(item, {}, products) for i, item in enumerate(between) if i not in behind]
    rest = [between[i] for i in sorted(behind)]
    if not isinstance(gate, FlatLoop):
        assert isinstance(gate, core.JaxprEqn)
        return _Gated([*first, fence([*gate.invars, *products.values()], [*gate.outvars, *products]), *rest], late)
    newest = max(arriving, key=lambda v: made[v])
    later = core.Var(newest.aval)
    carries = tuple((later if init is newest else init, *others) for init, *others in gate.carries)
    barrier = fence([newest, *products.values()], [later, *products])
    return _Gated([*first, barrier, *rest, dataclasses.replace(gate, carries=carries)], late)


def needed(items: Sequence[Item], outputs: Sequence[Atom]) -> set[core.Var]:
    """What is read by ``items`` that ``outputs`` need, and the outputs."""
    return set(_last_reads(items, outputs))


def _put_off(item: Item, known: Container[core.Var], last: Mapping[core.Var, int], place: int) -> set[core.Var]:
    """Of a product the operands that are larger than it, and that nobody reads from ``place`` on."""
    if not isinstance(item, core.JaxprEqn) or not contracts([item]):
        return set()
    operands = [v for v in item.invars if isinstance(v, core.Var) and v in known and last.get(v, -1) < place]
    return {v for v in operands if nbytes(v) > nbytes(item.outvars[0])}


def _made_of(product: core.Var, items: Sequence[Item]) -> tuple[set[int], set[core.Var]]:
    """The places of ``items`` that depend on ``product``; and it and their results."""
    known, places = {product}, set[int]()
    for place, item in enumerate(items):
        if not known.isdisjoint(reads(item)):
            known.update(results(item))
            places.add(place)
    return places, known


def fence(taken: Sequence[Atom], given: Sequence[core.Var]) -> core.JaxprEqn:
    """A fence that a pass puts up, for XLA's scheduler; its scope tells it from those of ops and orders."""
    eqn = trace_flat(lambda *xs: list(lax.optimization_barrier(xs)), [v.aval for v in taken]).eqns[0]
    info = eqn.source_info.replace(name_stack=source_info_util.new_name_stack(HELD))
    return eqn.replace(invars=list(taken), outvars=list(given), source_info=info)


def is_held(item: Item) -> bool:
    """Whether it is a fence that a pass has put up."""
    return isinstance(item, core.JaxprEqn) and is_fence(item) and str(item.source_info.name_stack) == HELD
