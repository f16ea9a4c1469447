"""Casts of stacks to fewer bits are made slice by slice, in the loops that take the stacks apart.

    before   masters f32[24, …] ──► cast ──► f16[24, …] ──► loop: slice         a copy of all layers lies in memory
    now      masters f32[24, …] ──────────────────────────► loop: slice ──► cast

Of a stack of layers whose masters have 32 bits, one layer's parameters lie in 16 bits at a time, forward and backward.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeGuard

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.jaxprs import dtype, shape
from jscaler.lax_primitives import is_cast
from jscaler.lower.flat_program import FlatLoop, FlatProgram, Item, Level, each_level, reads


def casts_at_use(program: FlatProgram) -> FlatProgram:
    """No casts of whole stacks which only loops take apart: no device holds a copy of all layers in 16 bits."""
    return each_level(program, _without_stacked_casts)


def _without_stacked_casts(level: Level) -> list[Item]:
    casts = {item.outvars[0]: item for item in level.items if _narrows(item)}
    if not casts:
        return list(level.items)
    read = {v for v in level.outputs if isinstance(v, core.Var)}
    for item in level.items:
        read.update(_read_whole(item))
    taken = {v for item in level.items for v in _taken_apart(item)}
    sunk = {v: eqn for v, eqn in casts.items() if v in taken and v not in read}
    return [_sunk(item, sunk) for item in level.items if not (_narrows(item) and item.outvars[0] in sunk)]


def _narrows(item: Item) -> TypeGuard[core.JaxprEqn]:
    """Whether an item casts a stack to a float of fewer bits."""
    if not isinstance(item, core.JaxprEqn) or not is_cast(item):
        return False
    (source,), (result,) = item.invars, item.outvars
    before, after = dtype(source), dtype(result)
    floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return floats and isinstance(source, core.Var) and len(shape(result)) > 1 and before.itemsize > after.itemsize


def _read_whole(item: Item) -> Iterator[core.Var]:
    """What an item reads other than slice by slice."""
    if not isinstance(item, FlatLoop):
        yield from reads(item)
        return
    yield from (v for v in (*item.whole, *item.returned) if isinstance(v, core.Var))
    for inner in item.items:
        yield from _read_whole(inner)


def _taken_apart(item: Item) -> Iterator[core.Var]:
    """What loops of an item read slice by slice."""
    if isinstance(item, FlatLoop):
        yield from (stack for stack, _ in item.xs if isinstance(stack, core.Var))
        for inner in item.items:
            yield from _taken_apart(inner)


def _sunk(item: Item, casts: Mapping[core.Var, core.JaxprEqn]) -> Item:
    """``item``, whose loops cast their own slices."""
    if not isinstance(item, FlatLoop) or casts.keys().isdisjoint(_taken_apart(item)):
        return item
    xs, eqns = [], []
    for stack, piece in item.xs:
        if isinstance(stack, core.Var) and stack in casts:
            (source,) = casts[stack].invars
            wide = core.Var(source.aval.update(shape=shape(piece)))
            eqns.append(casts[stack].replace(invars=[wide], outvars=[piece]))
            stack, piece = source, wide
        xs.append((stack, piece))
    inside = tuple(_sunk(inner, casts) for inner in item.items)
    return dataclasses.replace(item, xs=tuple(xs), items=(*eqns, *inside))
