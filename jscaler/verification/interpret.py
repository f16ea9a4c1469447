"""Interpret the jaxpr of a per-device function on all devices in lockstep: what does each hold after each equation?

A value is *concrete* (numpy, stacked over the devices: what comes from ``axis_index`` and constants) or *symbolic* (cells
that say which element of the PTensor they hold, and which of its summands). Symbolic values may be moved, joined and
exchanged; any other equation that reads them is an error that names it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from jscaler.capture.jaxprs import CALLS, CUSTOM_CALLS, dtype, inner_jaxpr, open_jaxpr, shape
from jscaler.errors import VerificationError
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import known
from jscaler.verification import collectives
from jscaler.verification.cell_moves import beyond, choose, concrete, move_of, operands
from jscaler.verification.collectives_in_branches import Branches, Entered, entered
from jscaler.verification.symbols import Broken, Leaves, Patterns, Symbolic

Value = np.ndarray | Symbolic
NUMERIC: dict[Combiner, Callable[..., np.ndarray]] = {"add": np.add, "max": np.maximum, "min": np.minimum}


class Interpreter:
    """Runs local jaxprs on all devices of a mesh.

    Args:
        sizes: the mesh's axes in order, and their sizes; positions are row-major.
        patterns: the table of patterns, shared by all that is compared.

    Attributes:
        passed: the collectives run so far, by name.
    """

    def __init__(self, sizes: Mapping[str, int], patterns: Patterns):
        self.sizes = dict(sizes)
        self.count = math.prod(sizes.values())
        self.patterns = patterns
        self.passed: list[str] = []
        self._active = np.ones(self.count, bool)  # in branches: the devices that take them
        self._replies: Any = None  # in branches that meet: results of the collectives so far

    def run(self, jaxpr: core.Jaxpr, args: Sequence[Value]) -> list[Value]:
        """Results of ``jaxpr``, whose constants come first in ``args``."""
        env: dict[core.Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))
        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [self._read(env, a) for a in eqn.invars], jaxpr)
            made = [r.shape[1:] for r in results]
            assert made == [shape(v) for v in eqn.outvars], f"{place(eqn)} makes {made}"
            env.update(zip(eqn.outvars, results, strict=True))
        return [self._read(env, a) for a in jaxpr.outvars]

    def constant(self, value: Any) -> np.ndarray:
        """A value that all devices have."""
        array = np.asarray(value)
        return np.broadcast_to(array[None], (self.count, *array.shape))

    def _read(self, env: Mapping[core.Var, Value], atom: Any) -> Value:
        if isinstance(atom, core.Literal):
            return self.constant(np.asarray(atom.val, dtype(atom)))
        return env[atom]

    def _equation(self, eqn: core.JaxprEqn, args: list[Value], jaxpr: core.Jaxpr) -> Sequence[Value]:
        name = eqn.primitive.name
        if name in CALLS or name in CUSTOM_CALLS:
            inner, consts = inner_jaxpr(eqn)
            return self.run(inner, [*map(self.constant, consts), *args])
        if name == "cond":
            return self._cond(eqn, args)
        if name == "axis_index":
            lines = collectives.groups_of(self.sizes, eqn.params, lambda: place(eqn))
            return [collectives.place_of(lines).astype(np.int32)]
        if name in collectives.COLLECTIVES:
            return self._collective(eqn, args)
        if not any(isinstance(a, Symbolic) for a in args):
            return self._concrete(eqn, args, jaxpr)
        return self._symbolic(eqn, args)

    def _concrete(self, eqn: core.JaxprEqn, args: Sequence[Any], jaxpr: core.Jaxpr) -> Sequence[Value]:
        try:
            return concrete(eqn, args, self.count, jaxpr)
        except Exception as error:
            raise VerificationError(f"{place(eqn)} cannot be worked out: {error}") from error

    def _symbolic(self, eqn: core.JaxprEqn, args: list[Value]) -> Sequence[Value]:
        seen = known(eqn.primitive).seen
        if not seen:
            raise VerificationError(f"{place(eqn)} works on data under way; a program of exchanges only moves and joins it")
        if seen in ("same", "moves"):
            return self._move(eqn, args)
        by_kind = {"joins": self._join, "sums": self._sum, "casts": self._convert, "scales": self._scale}
        return [by_kind[seen](eqn, *args)]

    def _join(self, eqn: core.JaxprEqn, *args: Value) -> Symbolic:
        a, b = (self._lift(v, shape(eqn.outvars[0])) for v in args)
        return self.patterns.join(a, b, _combiner(eqn), lambda: place(eqn))

    def _sum(self, eqn: core.JaxprEqn, value: Value) -> Value:
        return functools.reduce(lambda v, axis: self._fold(eqn, v, axis), sorted(eqn.params["axes"])[::-1], value)

    def _move(self, eqn: core.JaxprEqn, args: list[Value]) -> list[Value]:
        data, index = operands(eqn, args)
        if any(isinstance(i, Symbolic) for i in index):
            raise VerificationError(f"{place(eqn)} takes its indices from data under way")
        cells = [self._lift(d) for d in data]
        outside = np.flatnonzero(beyond(eqn, [c.element for c in cells], index) & self._active)
        if len(
            outside
        ):  # XLA shifts it back; but the one of JAX 0.10 merges two such slices into one that it shifts otherwise
            raise VerificationError(f"{place(eqn)} reaches beyond its array on devices {outside.tolist()}")
        rule = move_of(eqn.primitive)
        elements = rule(eqn, [c.element for c in cells], index)
        return [Symbolic(*pair) for pair in zip(elements, rule(eqn, [c.pattern for c in cells], index), strict=True)]

    def _lift(self, value: Value, sizes: tuple[int, ...] | None = None) -> Symbolic:
        """A concrete value as constant cells; a scalar may stand for an array of ``sizes``."""
        cells = value if isinstance(value, Symbolic) else self.patterns.constants(value)
        if sizes is None or cells.shape[1:] == sizes:
            return cells
        assert len(cells.shape) == 1
        return cells.map(lambda x: np.broadcast_to(x.reshape(-1, *[1] * len(sizes)), (self.count, *sizes)))

    def _fold(self, eqn: core.JaxprEqn, value: Value, axis: int) -> Symbolic:
        cells = self._lift(value)
        parts = [cells.map(lambda x, i=i: np.take(x, i, axis + 1)) for i in range(cells.shape[axis + 1])]
        return functools.reduce(lambda a, b: self.patterns.join(a, b, _combiner(eqn), lambda: place(eqn)), parts)

    def _convert(self, eqn: core.JaxprEqn, value: Value) -> Symbolic:
        """A conversion keeps values and their order; one that rounds to whole numbers keeps no sums."""
        cells = self._lift(value)
        old, new = dtype(eqn.invars[0]), dtype(eqn.outvars[0])
        to_bool = new == jnp.bool_ and old != jnp.bool_
        if not to_bool and (jnp.issubdtype(new, jnp.inexact) or not jnp.issubdtype(old, jnp.inexact)):
            return cells

        def converted(number: int) -> int:
            pattern = self.patterns[number]
            if not isinstance(pattern, Leaves):
                return number
            summed = pattern.combiner == "add" or any(s.combiner == "add" for path, _ in pattern.counts for s in path)
            return self.patterns.number(Broken(f"a summand made {new}, {place(eqn)}")) if summed else number

        return Symbolic(cells.element, self.patterns.mapped(converted, cells.pattern))

    def _scale(self, eqn: core.JaxprEqn, a: Value, b: Value) -> Symbolic:
        """Multiplied by one, data stays what it is."""
        cells, factor = (a, b) if isinstance(a, Symbolic) else (b, a)
        broken = self.patterns.number(Broken(f"a value that is multiplied, {place(eqn)}"))
        cells = self._lift(cells, shape(eqn.outvars[0]))
        if isinstance(factor, Symbolic):
            return Symbolic(cells.element, np.broadcast_to(np.int32(broken), cells.shape))
        ones = np.broadcast_to((factor == 1).reshape(factor.shape + (1,) * (len(cells.shape) - factor.ndim)), cells.shape)
        return Symbolic(
            cells.element, choose(ones.astype(int), [np.broadcast_to(np.int32(broken), cells.shape), cells.pattern])
        )

    # -- collectives

    def _collective(self, eqn: core.JaxprEqn, args: list[Value]) -> list[Value]:
        if self._replies is not None:
            reply = next(self._replies, None)
            if reply is None:
                raise Entered(eqn, args)
            return reply
        self.passed.append(eqn.primitive.name)
        return [self._exchange(eqn, value) for value in args]

    def _exchange(self, eqn: core.JaxprEqn, value: Value) -> Value:
        name, params = eqn.primitive.name, eqn.params
        groups = collectives.groups_of(self.sizes, params, lambda: place(eqn))
        if name in collectives.REDUCTIONS:
            combiner = collectives.REDUCTIONS[name]
            result = collectives.reduced(
                lambda at: move(value, lambda x: collectives.take(x, at)),
                lambda a, b: self._joined(a, b, combiner, eqn),
                groups,
            )
            deal = functools.partial(collectives.scatter, groups=groups, params=params)
            return move(result, deal if name == "reduce_scatter" else lambda x: collectives.to_members(groups, x))
        if name == "ppermute":
            collectives.check_order(self.sizes, params, lambda: place(eqn))
            sources = collectives.sources_of(groups, params["perm"], lambda: place(eqn))
            return self._permute(value, sources, dtype(eqn.invars[0]))
        return move(value, lambda x: getattr(collectives, name)(x, groups, params))

    def _joined(self, a: Value, b: Value, combiner: Combiner, eqn: core.JaxprEqn) -> Value:
        if isinstance(a, Symbolic) and isinstance(b, Symbolic):
            return self.patterns.join(a, b, combiner, lambda: place(eqn))
        return NUMERIC[combiner](a, b)

    def _permute(self, value: Value, sources: np.ndarray, of: Any) -> Value:
        """Devices that receive nothing hold zeros."""
        zeros = np.zeros((1,) * len(value.shape), of)
        if not isinstance(value, Symbolic):
            return collectives.ppermute(value, sources, zeros)
        nothing = self.patterns.constants(zeros)
        return Symbolic(
            collectives.ppermute(value.element, sources, nothing.element),
            collectives.ppermute(value.pattern, sources, nothing.pattern),
        )

    # -- branches

    def _cond(self, eqn: core.JaxprEqn, args: list[Value]) -> list[Value]:
        index, *rest = args
        if isinstance(index, Symbolic):
            raise VerificationError(f"{place(eqn)} branches on data under way")
        jaxprs = [open_jaxpr(b) for b in eqn.params["branches"]]
        which = np.clip(index.astype(int), 0, len(jaxprs) - 1)
        taken = sorted(set(which[self._active].tolist()))

        def calls(t: int) -> tuple[core.Jaxpr, list[Value]]:
            return jaxprs[t][0], [*map(self.constant, jaxprs[t][1]), *rest]

        if len(taken) == 1:
            return self.run(*calls(taken[0]))
        branches = Branches({t: entered(jaxprs[t][0], self.sizes, place) for t in taken}, which, self._active)
        if not branches.meet(place(eqn)):
            return self._merged({t: self._within(which == t, *calls(t)) for t in taken}, which)
        if self._replies is not None:
            raise VerificationError(f"{place(eqn)}: collectives in branches of branches that meet are not understood")
        return self._together({t: calls(t) for t in taken}, which)

    def _within(self, devices: np.ndarray, jaxpr: core.Jaxpr, args: Sequence[Value]) -> list[Value]:
        """Run a branch for the devices that take it; what the others get means nothing."""
        outside = self._active
        self._active = outside & devices
        results = self.run(jaxpr, args)
        self._active = outside
        return results

    def _together(self, calls: Mapping[int, tuple[core.Jaxpr, list[Value]]], which: np.ndarray) -> list[Value]:
        """Run branches whose collectives meet: each up to its next collective, again and again, with what it returned."""
        replies: list[list[Value]] = []
        while True:
            ends: dict[int, list[Value] | Entered] = {}
            for t, call in calls.items():
                inner = Interpreter(self.sizes, self.patterns)
                inner._replies = iter(replies)
                try:
                    ends[t] = inner._within(self._active & (which == t), *call)
                except Entered as at:
                    ends[t] = at
            waiting = {t: e for t, e in ends.items() if isinstance(e, Entered)}
            if not waiting:
                return self._merged({t: e for t, e in ends.items() if not isinstance(e, Entered)}, which)
            first, *others = waiting.values()
            if len(waiting) < len(calls) or any(e.eqn.primitive != first.eqn.primitive for e in others):
                raise VerificationError(f"{place(first.eqn)}: the devices of other branches do not come to it")
            replies.append(self._collective(first.eqn, self._merged({t: e.operands for t, e in waiting.items()}, which)))

    def _merged(self, results: Mapping[int, Sequence[Value]], which: np.ndarray) -> list[Value]:
        """Each device's own branch's results."""
        merged: list[Value] = []
        place_in = np.minimum(np.searchsorted(sorted(results), which), len(results) - 1)
        for values in zip(*(results[t] for t in sorted(results)), strict=True):
            if all(isinstance(v, np.ndarray) for v in values):
                merged.append(_rows(place_in, values))  # type: ignore[arg-type]
                continue
            cells = [self._lift(v) for v in values]
            merged.append(
                Symbolic(_rows(place_in, [c.element for c in cells]), _rows(place_in, [c.pattern for c in cells]))
            )
        return merged


def _combiner(eqn: core.JaxprEqn) -> Combiner:
    combiner = known(eqn.primitive).combiner
    assert combiner is not None, eqn
    return combiner


def _rows(which: np.ndarray, cases: Sequence[np.ndarray]) -> np.ndarray:
    return choose(np.broadcast_to(which.reshape(-1, *[1] * (cases[0].ndim - 1)), cases[0].shape), cases)


def move(value: Value, fun: Callable[[np.ndarray], np.ndarray]) -> Value:
    """Move a value's cells, or its numbers."""
    return value.map(fun) if isinstance(value, Symbolic) else fun(value)


def place(eqn: core.JaxprEqn) -> str:
    """``psum over x0 at collectives.py:46``: an equation and its source line."""
    axes = (
        f" over {', '.join(map(str, collectives.axes_of(eqn.params)))}"
        if eqn.primitive.name in collectives.COLLECTIVES
        else ""
    )
    return f"{eqn.primitive.name}{axes} at {source_info_util.summarize(eqn.source_info)}"
