"""``Prefix``: split running sums, products and extrema along the dim that they walk."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, make_jaxpr
from jscaler.ir.mask import Combiner
from jscaler.rules.expansion import Site, Step, Value
from jscaler.rules.neutral import neutral

# primitive -> what joins two neighbouring runs, and what leaves any run as it is
JOINS: dict[str, tuple[Callable[[Any, Any], Any], Combiner | float]] = {
    "cumsum": (jnp.add, "add"),
    "cumprod": (jnp.multiply, 1.0),
    "cummax": (jnp.maximum, "max"),
    "cummin": (jnp.minimum, "min"),
    "cumlogsumexp": (jnp.logaddexp, "max"),
}


@dataclass(frozen=True)
class Prefix:
    """Split an op along a dim that its ``cumsum`` walks (or ``cumprod``, ``cummax``, ``cummin``, ``cumlogsumexp``).

    Every part runs over its own rows. The totals of all parts, one row each, are sent to everybody, and each part adds
    those before it (behind it, where the sum runs from the end, as in the backward of a cumsum). This is the two-level
    scan of Blelloch, "Prefix sums and their applications" (1990).

    Attributes:
        factor: as in `Split`.
        parts: how many; must divide the factor's size.

    Example:
        >>> graph.op_assign(graph.op_trans(graph["loss/cumsum"], Prefix("a", 4)), devices)  # doctest: +SKIP
    """

    factor: str | tuple[str, int]
    parts: int

    def expand(self, site: Site) -> Sequence[Step] | None:
        """The equations up to each running sum, its totals, and so on; None without one along the factor."""
        writer = _Writer(site)
        for eqn in site.jaxpr.eqns:
            axis = eqn.params["axis"] if eqn.primitive.name in JOINS else None
            if axis is not None and axis == site.dim(eqn.invars[0]):
                writer.walk(eqn, axis)
            else:
                writer.eqns.append(eqn)
        return writer.finish() if writer.count else None


class _Writer:
    """Collects equations until a running sum ends a step."""

    def __init__(self, site: Site):
        self.site = site
        self.eqns: list[core.JaxprEqn] = []
        self.steps: list[Step] = []
        self.count = 0
        self.names: dict[core.Var, Value] = {v: i for i, v in enumerate(site.jaxpr.invars)}
        # of the running sum that the next step completes: its equation, axis, and the names of its two halves
        self.open: tuple[core.JaxprEqn, int, str, str] | None = None

    def walk(self, eqn: core.JaxprEqn, axis: int) -> None:
        number, self.count = self.count, self.count + 1
        local, totals, before = (f"{kind}{number}" for kind in ("local", "totals", "before"))
        name, reverse, parts = eqn.primitive.name, eqn.params["reverse"], self.site.parts
        run = functools.partial(_within, name, axis, reverse, parts)
        self._close(f"within{number}" if number else "within", eqn.invars, run, (local, totals))
        carry = functools.partial(_carried, name, axis, reverse)
        self.steps.append(Step(f"carry{number}" if number else "carry", carry, (totals,), (before,)))
        self.open = (eqn, axis, local, before)

    def finish(self) -> list[Step]:
        self._close("add", [], list, ())
        return self.steps

    def _close(self, name: str, wants: Sequence[Any], then: Callable[..., Any], made: tuple[str, ...]) -> None:
        """A step of the equations so far, after the running sum that is open; ``then`` is run on ``wants`` at its end."""
        begun, eqns = self.open, self.eqns
        self.eqns, self.open = [], None
        ready = {v for e in eqns for v in e.outvars} | ({begun[0].outvars[0]} if begun is not None else set())
        results = self.site.jaxpr.outvars
        last = not made
        later = self._read_later(eqns)
        handed = [v for v in ready if v in later and not last]
        handed.sort(key=lambda v: [o for e in self.site.jaxpr.eqns for o in e.outvars].index(v))
        ends = [
            i
            for i, v in enumerate(results)
            if (v in ready if isinstance(v, core.Var) else False) or (last and self._bare(v))
        ]
        outs = [*handed, *(results[i] for i in ends), *wants]
        needed = [v for e in eqns for v in e.invars] + outs
        reads = list(dict.fromkeys(v for v in needed if isinstance(v, core.Var) and v not in ready))
        jaxpr_in = reads if begun is None else [*reads, begun[0].outvars[0]]
        body = make_jaxpr(eqns, jaxpr_in, outs, self.site.jaxpr)
        names = [self.names[v] for v in reads]
        halves = () if begun is None else begun[2:]
        num_out = len(outs) - len(wants)

        def run(*args: Any) -> list[Any]:
            values = list(args[: len(reads)])
            if begun is not None:
                values.append(_joined(begun[0].primitive.name, begun[1], *args[len(reads) :]))
            found = evaluate(body, values)
            return [*found[:num_out], *then(*found[num_out:])]

        for v in handed:
            self.names[v] = f"value{len(self.names)}"
        makes = (*(self.names[v] for v in handed), *ends, *made)
        self.steps.append(Step(name, run, (*names, *halves), makes))

    def _bare(self, atom: Any) -> bool:
        """Whether a result is an operand as it is, or a literal."""
        return not isinstance(atom, core.Var) or atom in self.site.jaxpr.invars

    def _read_later(self, eqns: Sequence[core.JaxprEqn]) -> set[core.Var]:
        """What equations behind ``eqns`` read, but for the running sum that ends the step."""
        own = {id(e) for e in eqns}
        start = max((i for i, e in enumerate(self.site.jaxpr.eqns) if id(e) in own), default=-1)
        return {v for e in self.site.jaxpr.eqns[start + 1 :] for v in e.invars if isinstance(v, core.Var)}


def _within(name: str, axis: int, reverse: bool, parts: int, x: Any) -> list[Any]:
    """The running sums within each part, and every part's total."""
    seen = x.reshape((*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :]))
    sums = getattr(lax, name)(seen, axis=axis + 1, reverse=reverse)
    return [sums, lax.index_in_dim(sums, 0 if reverse else -1, axis + 1, keepdims=False)]


def _carried(name: str, axis: int, reverse: bool, totals: Any) -> list[Any]:
    """For every part the total of those before it."""
    start = JOINS[name][1]
    none = jnp.asarray(start, totals.dtype) if isinstance(start, float) else neutral(start, totals.dtype)
    upto = getattr(lax, name)(totals, axis=axis, reverse=reverse)
    edge = jnp.broadcast_to(none, (*totals.shape[:axis], 1, *totals.shape[axis + 1 :]))
    if reverse:
        return [lax.concatenate([lax.slice_in_dim(upto, 1, None, axis=axis), edge], axis)]
    return [lax.concatenate([edge, lax.slice_in_dim(upto, 0, -1, axis=axis)], axis)]


def _joined(name: str, axis: int, sums: Any, before: Any) -> Any:
    whole = JOINS[name][0](sums, jnp.expand_dims(before, axis + 1))
    return whole.reshape((*sums.shape[:axis], sums.shape[axis] * sums.shape[axis + 1], *sums.shape[axis + 2 :]))
