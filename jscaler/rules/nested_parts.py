"""Scan, while and cond on one part: the same construct around the inner programs at part shapes."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import dtype
from jscaler.lax_primitives.primitive import Part
from jscaler.rules.analysed import Analysis
from jscaler.rules.nested import loop_of, stops_by_row


class NestingPart(Part, Protocol):
    """A part of a fragment that holds programs; ``inside`` says how it runs one of these."""

    analysis: Analysis

    def inside(self, inner: Analysis) -> Callable[[Sequence[Any]], list[Any]]: ...


def _typed(values: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
    """Numbers written into the program as arrays of their type, which a loop keeps."""
    return [jnp.asarray(x, dtype(v)) if isinstance(v, core.Literal) else x for x, v in zip(values, atoms, strict=True)]


def _scan(part: NestingPart, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    loop, (inner,) = loop_of(eqn), part.analysis.inner[id(eqn)]
    body, values = part.inside(inner), _typed(values, eqn.invars)
    start = loop.consts + loop.carry
    lengths = [x.shape[0] for x in values[start:]] + [part.shape(v)[0] for v in eqn.outvars[loop.carry :]]

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made = body([*values[: loop.consts], *carry, *x])
        return made[: loop.carry], made[loop.carry :]

    carry, stacked = lax.scan(
        step, values[loop.consts : start], values[start:], length=(lengths or [eqn.params["length"]])[0],
        reverse=eqn.params["reverse"], unroll=eqn.params["unroll"],
    )  # fmt: skip
    return [*carry, *stacked]


def _while(part: NestingPart, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    loop, inner = loop_of(eqn), part.analysis.inner[id(eqn)]
    test, body = map(part.inside, inner)
    values = _typed(values, eqn.invars)
    consts = values[: loop.consts]

    def on(carry: Sequence[Any]) -> Any:
        return test([*consts[: loop.conditions], *carry])[0]

    def step(carry: Sequence[Any]) -> list[Any]:
        return body([*consts[loop.conditions :], *carry])

    def step_by_row(carry: Sequence[Any]) -> list[Any]:  # vmap's: a row that is done stays as it is
        going = on(carry)
        each = [going.reshape(going.shape + (1,) * (x.ndim - going.ndim)) for x in carry]
        return [jnp.where(rows, new, old) for rows, new, old in zip(each, step(carry), carry, strict=True)]

    if stops_by_row(inner[0]):
        return lax.while_loop(lambda carry: on(carry).any(), step_by_row, values[loop.consts :])
    return lax.while_loop(on, step, values[loop.consts :])


def _cond(part: NestingPart, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    index, *operands = _typed(values, eqn.invars)
    branches = [part.inside(inner) for inner in part.analysis.inner[id(eqn)]]
    wrapped = [lambda *xs, run=run: run(xs) for run in branches]
    return lax.switch(index.astype(jnp.int32), wrapped, *operands)


def bind_nested(part: NestingPart, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """The results of a nested equation on one part."""
    return {"scan": _scan, "while": _while, "cond": _cond}[eqn.primitive.name](part, eqn, values)
