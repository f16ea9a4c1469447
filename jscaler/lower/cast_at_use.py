"""Casts of stacks to fewer bits are made slice by slice, in the loops that take the stacks apart.

    before   masters f32[24, …] ──► cast ──► f16[24, …] ──► loop: slice         a copy of all layers lies in memory
    now      masters f32[24, …] ──────────────────────────► loop: slice ──► cast

Of a stack of layers whose masters have 32 bits, one layer's parameters lie in 16 bits at a time, forward and backward.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.jaxprs import Atom, dtype, shape


def cast_at_use(items: Sequence[Any], outputs: Sequence[Atom], step: Callable[[Sequence[core.JaxprEqn]], Any]) -> list[Any]:
    """``items`` (equations, exchanges, loops) without casts whose results loops take apart and nobody else reads.

    Args:
        step: makes a step of a loop's body of casts.
    """
    casts = {item.outvars[0]: item for item in items if _narrows(item)}
    if not casts:
        return list(items)
    read = {v for v in outputs if isinstance(v, core.Var)}
    for item in items:
        read.update(_reads(item))
    taken = {v for item in items for v in _taken_apart(item)}
    sunk = {v: eqn for v, eqn in casts.items() if v in taken and v not in read}
    return [_sunk(item, sunk, step) for item in items if not (_narrows(item) and item.outvars[0] in sunk)]


def _narrows(item: Any) -> bool:
    """Whether an item casts a stack to a float of fewer bits."""
    if not isinstance(item, core.JaxprEqn) or item.primitive.name != "convert_element_type":
        return False
    (source,), (result,) = item.invars, item.outvars
    before, after = dtype(source), dtype(result)
    floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return floats and isinstance(source, core.Var) and len(shape(result)) > 1 and before.itemsize > after.itemsize


def _is_loop(item: Any) -> bool:
    return hasattr(item, "xs") and hasattr(item, "steps")


def _reads(item: Any) -> Iterator[core.Var]:
    """What an item reads other than slice by slice."""
    found: list[Any] = []
    if isinstance(item, core.JaxprEqn):
        found += item.invars
    elif _is_loop(item):
        found += [init for init, *_ in item.carries] + list(item.returned)
        for step in item.steps:
            yield from _reads(step)
    elif hasattr(item, "jaxpr"):
        found += item.jaxpr.invars
    else:
        found.append(item.input)
    yield from (v for v in found if isinstance(v, core.Var))


def _taken_apart(item: Any) -> Iterator[core.Var]:
    """What loops of an item read slice by slice."""
    if _is_loop(item):
        yield from (stack for stack, _ in item.xs if isinstance(stack, core.Var))
        for step in item.steps:
            yield from _taken_apart(step)


def _sunk(item: Any, casts: Mapping[core.Var, core.JaxprEqn], step: Callable[[Sequence[core.JaxprEqn]], Any]) -> Any:
    """``item``, whose loops cast their own slices."""
    if not _is_loop(item) or casts.keys().isdisjoint(_taken_apart(item)):
        return item
    xs, eqns = [], []
    for stack, piece in item.xs:
        if stack in casts:
            (source,) = casts[stack].invars
            wide = core.Var(source.aval.update(shape=piece.aval.shape))
            eqns.append(casts[stack].replace(invars=[wide], outvars=[piece]))
            stack, piece = source, wide
        xs.append((stack, piece))
    steps = tuple(_sunk(inner, casts, step) for inner in item.steps)
    steps = (step(eqns), *steps) if eqns else steps
    return dataclasses.replace(item, xs=tuple(xs), steps=steps)
