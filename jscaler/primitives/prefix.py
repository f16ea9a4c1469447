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
from jscaler.lax_primitives import known
from jscaler.rules.expansion import Site, Step, Value
from jscaler.rules.neutral import neutral


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
        >>> def policy(graph, devices):
        ...     graph.op_assign(graph.op_trans("loss/cumsum", Prefix("a", 4)), devices)  # its steps come from expand
        >>> jscaler.parallelize(policy, devices=4)(jnp.cumsum)(jnp.ones(65536))[-1]
        Array(65536., dtype=float32)
    """

    factor: str | tuple[str, int]
    parts: int

    def expand(self, site: Site) -> Sequence[Step] | None:
        """The steps that stand for an op: the equations up to each running sum, its totals, and so on.

        Args:
            site: the op, its program over whole arrays, and where the factor is in it.

        Returns:
            The steps; None where no running sum goes along the factor.
        """
        writer = _Writer(site)
        for eqn in site.jaxpr.eqns:
            axis = eqn.params["axis"] if known(eqn.primitive).running else None
            if axis is not None and axis == site.dim(eqn.invars[0]):
                writer.walk(eqn, axis)
            else:
                writer.eqns.append(eqn)
        return writer.finish() if writer.count else None


class _Writer:
    """Collects equations until a running sum ends a step; the next step completes it."""

    def __init__(self, site: Site):
        self.site = site
        self.eqns: list[core.JaxprEqn] = []
        self.steps: list[Step] = []
        self.count = 0
        self.names: dict[core.Var, Value] = {v: i for i, v in enumerate(site.jaxpr.invars)}
        # of the running sum that the next step completes: its equation, axis, and the names of its two halves
        self.open: tuple[core.JaxprEqn, int, str, str] | None = None

    def walk(self, eqn: core.JaxprEqn, axis: int) -> None:
        """End a step with the halves of a running sum, and add the step that sums up the totals."""
        tag = str(self.count or "")
        self.count += 1
        within = functools.partial(_within, eqn, axis, self.site.parts)
        self._close(f"within{tag}", eqn.invars[0], within, (f"local{tag}", f"totals{tag}"))
        carry = functools.partial(_carried, eqn, axis)
        self.steps.append(Step(f"carry{tag}", carry, (f"totals{tag}",), (f"before{tag}",)))
        self.open = (eqn, axis, f"local{tag}", f"before{tag}")

    def finish(self) -> list[Step]:
        self._close("add", None, None, ())
        return self.steps

    def _close(self, name: str, walked: Any, within: Callable[[Any], Any] | None, halves: tuple[str, ...]) -> None:
        """A step of the equations so far, behind the running sum that is open; it ends with ``within(walked)``."""
        begun, eqns = self.open, self.eqns
        self.eqns, self.open = [], None
        completed = [] if begun is None else [begun[0].outvars[0]]
        made = [*completed, *(v for e in eqns for v in e.outvars)]
        handed, results = self._handed_on(eqns, made, walked), self._results(made, within is None)
        outs = [*handed, *(v for _, v in results)]
        wanted = [*(v for e in eqns for v in e.invars), *outs, *([] if within is None else [walked])]
        reads = list(dict.fromkeys(v for v in wanted if isinstance(v, core.Var) and v not in made))
        body = make_jaxpr(eqns, [*reads, *completed], [*outs, *([] if within is None else [walked])], self.site.jaxpr)

        def run(*args: Any) -> list[Any]:
            values = list(args[: len(reads)])
            if begun is not None:
                values.append(_joined(begun[0], begun[1], *args[len(reads) :]))
            found = evaluate(body, values)
            return found if within is None else [*found[:-1], *within(found[-1])]

        read_names = tuple(self.names[v] for v in reads)
        self.names.update({v: f"value{len(self.names) + i}" for i, v in enumerate(handed)})
        makes = (*(self.names[v] for v in handed), *(i for i, _ in results), *halves)
        self.steps.append(Step(name, run, (*read_names, *(begun[2:] if begun is not None else ())), makes))

    def _handed_on(self, eqns: Sequence[core.JaxprEqn], made: Sequence[core.Var], walked: Any) -> list[core.Var]:
        """What this step makes and equations of later steps read."""
        done = {id(e) for e in eqns}
        seen = max((i for i, e in enumerate(self.site.jaxpr.eqns) if id(e) in done), default=-1)
        behind = self.site.jaxpr.eqns[seen + 1 :]
        ending = next((e for e in behind if known(e.primitive).running and e.invars[0] is walked), None)
        later = {v for e in behind if e is not ending for v in e.invars if isinstance(v, core.Var)}
        return [v for v in made if v in later]

    def _results(self, made: Sequence[core.Var], last: bool) -> list[tuple[int, Any]]:
        """The results of the op that this step makes; the last one also hands out operands and literals."""
        found = []
        for i, v in enumerate(self.site.jaxpr.outvars):
            bare = not isinstance(v, core.Var) or v in self.site.jaxpr.invars
            if last if bare else v in made:
                found.append((i, v))
        return found


def _running(eqn: core.JaxprEqn) -> tuple[Callable[[Any, Any], Any], Combiner | float]:
    running = known(eqn.primitive).running
    assert running is not None
    return running


def _within(eqn: core.JaxprEqn, axis: int, parts: int, x: Any) -> list[Any]:
    """The running sums within each part, and every part's total."""
    seen = x.reshape((*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :]))
    sums = eqn.primitive.bind(seen, **eqn.params | {"axis": axis + 1})
    return [sums, lax.index_in_dim(sums, 0 if eqn.params["reverse"] else -1, axis + 1, keepdims=False)]


def _carried(eqn: core.JaxprEqn, axis: int, totals: Any) -> list[Any]:
    """For every part the total of those before it."""
    _, start = _running(eqn)
    none = neutral(start, totals.dtype) if isinstance(start, str) else jnp.asarray(start, totals.dtype)
    upto = eqn.primitive.bind(totals, **eqn.params | {"axis": axis})
    edge = jnp.broadcast_to(none, (*totals.shape[:axis], 1, *totals.shape[axis + 1 :]))
    if eqn.params["reverse"]:
        return [lax.concatenate([lax.slice_in_dim(upto, 1, None, axis=axis), edge], axis)]
    return [lax.concatenate([edge, lax.slice_in_dim(upto, 0, -1, axis=axis)], axis)]


def _joined(eqn: core.JaxprEqn, axis: int, sums: Any, before: Any) -> Any:
    join, _ = _running(eqn)
    whole = join(sums, jnp.expand_dims(before, axis + 1))
    return whole.reshape((*sums.shape[:axis], sums.shape[axis] * sums.shape[axis + 1], *sums.shape[axis + 2 :]))
