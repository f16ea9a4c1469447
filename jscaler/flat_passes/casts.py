"""Adapters move across casts, to the side where fewer bytes travel.

    gather(x) then cast to bfloat16    becomes    cast to bfloat16, then gather(x)        half the bytes
    cast to float32 then gather(x)     becomes    gather(x), then cast to float32         half the bytes

Both are exact: a cast looks at one element at a time, and these adapters (collectives that move elements; point-to-point
exchanges stay where they are) change none. Sums are never moved to
fewer bits; that is ``reduce_dtype``'s to say. (Reshapes and scaling change no bytes; value shares pass through linear
ops in ``materialize.filling``.)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jscaler.capture.jaxprs import Atom
from jscaler.lax_primitives import is_cast
from jscaler.lower.flat_program import Exchange, FlatProgram, Item, Level, each_level, reads
from jscaler.lower.program import Extend


def adapters_across_casts(program: FlatProgram) -> FlatProgram:
    """Every adapter on the narrow side of the casts next to it: fewer bytes travel."""

    def moved(level: Level) -> list[Item]:
        if not any(isinstance(item, Exchange) for item in level.items):
            return list(level.items)
        return _behind_narrow_inputs(_behind_narrowing(level.items, level.outputs))

    return each_level(program, moved)


def _behind_narrowing(items: Sequence[Item], outputs: Sequence[Atom]) -> list[Item]:
    """Cast first where all that reads an adapter's result is one narrowing cast."""
    readers: dict[core.Var, list[Item]] = {}
    for item in items:
        for atom in reads(item):
            readers.setdefault(atom, []).append(item)
    kept = {v for v in outputs if isinstance(v, core.Var)}
    gone: set[int] = set()  # casts that are made in front instead
    found: list[Item] = []
    for item in reversed(items):  # so that a cast passes several adapters in a row
        if isinstance(item, Exchange) and _moves(item) and item.output not in kept:
            reading = readers.get(item.output, [])
            cast = reading[0] if len(reading) == 1 else None
            if isinstance(cast, core.JaxprEqn) and _narrows(cast):
                gone.add(id(cast))
                made, early = _cast_like(cast, item.input)
                later = dataclasses.replace(item, input=made, output=cast.outvars[0])
                found += [later, early]
                _replace(readers, item, cast, early, later)
                continue
        found.append(item)
    return [item for item in reversed(found) if id(item) not in gone]


def _replace(
    readers: dict[core.Var, list[Item]], item: Exchange, cast: core.JaxprEqn, early: core.JaxprEqn, later: Exchange
) -> None:
    """Bring ``readers`` up to date."""
    assert isinstance(item.input, core.Var)
    readers[item.input] = [early if reader is item else reader for reader in readers[item.input]]
    readers[early.outvars[0]] = [later]
    readers.pop(item.output)


def _behind_narrow_inputs(items: Sequence[Item]) -> list[Item]:
    """Cast last where what an adapter reads was made by a widening cast."""
    made: dict[core.Var, core.JaxprEqn] = {}
    found: list[Item] = []
    for item in items:
        if isinstance(item, Exchange):
            cast = made.get(item.input) if isinstance(item.input, core.Var) else None
            if cast is not None and _moves(item):
                narrow = cast.invars[0]
                arrived = _like(narrow, item.output)
                late = cast.replace(invars=[arrived], outvars=[item.output])
                found += [dataclasses.replace(item, input=narrow, output=arrived), late]
                made[item.output] = late
                continue
        elif isinstance(item, core.JaxprEqn) and _widens(item):
            made[item.outvars[0]] = item
        found.append(item)
    return found


def _moves(item: Exchange) -> bool:
    if isinstance(item.adapt, Extend):  # rows move, and the zeros beyond the border are zeros of any dtype
        return isinstance(item.input, core.Var)
    adapter = item.adapt.adapter
    in_place = adapter.source.memory == adapter.target.memory  # a cast would run in the host's memory
    padded = any(stage.view != stage.start.local_sizes for stage in adapter.stages)  # a cast would meet the padding
    return all(step.line.moves for step in adapter.steps) and in_place and not padded and isinstance(item.input, core.Var)


def _narrows(eqn: core.JaxprEqn) -> bool:
    return _change(eqn) < 0


def _widens(eqn: core.JaxprEqn) -> bool:
    return _change(eqn) > 0 and isinstance(eqn.invars[0], core.Var)


def _change(eqn: core.JaxprEqn) -> int:
    """Bytes that a cast adds to each element; 0 for what is no cast."""
    if not is_cast(eqn):
        return 0
    before, after = (getattr(v.aval, "dtype") for v in (eqn.invars[0], eqn.outvars[0]))  # noqa: B009
    return after.itemsize - before.itemsize


def _like(var: Atom, shaped: Atom) -> core.Var:
    """A new variable of ``var``'s dtype and the shape of ``shaped``."""
    aval: Any = var.aval
    return core.Var(aval.update(shape=getattr(shaped.aval, "shape")))  # noqa: B009


def _cast_like(cast: core.JaxprEqn, source: Atom) -> tuple[core.Var, core.JaxprEqn]:
    made = _like(cast.outvars[0], source)
    return made, cast.replace(invars=[source], outvars=[made])
