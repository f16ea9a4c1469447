"""Interned op bodies, and their backward bodies. Equal fragments (equal layers) share one Body object."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import CUSTOM_VJP, all_equations, evaluate, fingerprint, make_jaxpr, trace_flat
from jscaler.capture.saving import Leaf, Saving, trace_saving, vjp_of
from jscaler.capture.user_bodies import UserBody, holds_user_op
from jscaler.capture.user_op import op_p, traced
from jscaler.capture.user_vjp import reads_of
from jscaler.ir import Body, Op
from jscaler.ir.mask import Combiner

JOIN: dict[Combiner, Callable[..., Any]] = {"add": operator.add, "max": jnp.maximum, "min": jnp.minimum}


@dataclass(frozen=True)
class SavedBodies:
    """A forward that hands out residuals behind its results, and the backward that reads them.

    Attributes:
        residuals: their abstract values.
        kept: which the backward reads, of: the forward's inputs, its results, the residuals, the cotangents.
    """

    forward: Body
    residuals: tuple[Any, ...]
    backward: Body
    kept: tuple[int, ...]


@dataclass
class BodyTable:
    """All bodies of one capture, by program; a memo, filled as needed."""

    bodies: dict[Any, Body] = field(default_factory=dict)
    backwards: dict[Any, tuple[Body, tuple[int, ...]]] = field(default_factory=dict)
    saves: dict[Any, SavedBodies] = field(default_factory=dict)
    simple: dict[Any, Body] = field(default_factory=dict)

    def intern(self, jaxpr: core.Jaxpr) -> Body:
        """The one Body of all jaxprs that equal ``jaxpr``."""
        return self.bodies.setdefault(fingerprint(jaxpr), Body(jaxpr))

    def traced(self, fun: Callable[..., Sequence[Any]], avals: Sequence[Any], key: Any = None) -> Body:
        """The body of ``fun``; traced once for all calls of one ``key``, if there is one, and one ``avals``."""
        if key is None:
            return self.intern(trace_flat(fun, avals))
        key = (key, tuple(avals))
        if key not in self.simple:
            self.simple[key] = self.intern(trace_flat(fun, avals))
        return self.simple[key]

    def join(self, aval: Any, count: int, combiner: Combiner = "add") -> Body:
        """The n-ary add (or maximum, minimum) that joins ``count`` summands, or candidates, of one tensor."""
        both = JOIN[combiner]
        name = "join" if combiner == "add" else combiner
        return self.traced(lambda *parts: [functools.reduce(both, parts)], [aval] * count, key=name)

    def fill(self, aval: Any, value: float) -> Body:
        """A tensor of one value: the seed of a backward pass, or the gradient of an unused parameter."""
        return self.traced(lambda: [jnp.full(aval.shape, value, aval.dtype)], [], key=("fill", aval, repr(value)))

    def concatenated(self, avals: Sequence[Any]) -> Body:
        """Tensors behind each other along their first dim."""
        return self.traced(lambda *parts: [lax.concatenate(parts, 0)], avals, key="concatenate")

    def backward(self, forward: Op, handle: Op) -> tuple[Body, tuple[int, ...]]:
        """The backward body of a forward op, and which of the handle's inputs it reads."""
        assert forward.body is not None
        return self.backward_of(forward.body, handle.gradients, tuple(i for i, _ in handle.cotangents))

    def backward_of(self, body: Body, wrt: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[Body, tuple[int, ...]]:
        """The gradients of a body by its inputs ``wrt``, and which inputs and cotangents of ``outputs`` they read.

        It is ``jax.vjp`` of the whole body (custom derivatives intact), pruned to what the gradients need.
        """
        key = (body, wrt, outputs)
        if key not in self.backwards:
            quiet = _quiet(body.jaxpr)
            if holds_user_op(quiet):
                fun = UserBody(quiet, wrt, outputs).backward()
            else:
                fun = vjp_of(lambda *xs: evaluate(quiet, xs), len(quiet.invars), wrt, outputs)
            avals = [v.aval for v in quiet.invars] + [quiet.outvars[i].aval for i in outputs]
            self.backwards[key] = self._pruned(fun, avals)
        return self.backwards[key]

    def saved(self, forward: Op, handle: Op) -> SavedBodies:
        """The forward body of an op that hands out the residuals of its vjp, and the backward body that reads them."""
        assert forward.body is not None
        return self.saved_of(forward.body, handle.gradients, tuple(i for i, _ in handle.cotangents))

    def saved_of(self, body: Body, wrt: tuple[int, ...], outputs: tuple[int, ...]) -> SavedBodies:
        """A body with residuals, and its gradients from them."""
        key = (body, wrt, outputs)
        if key not in self.saves:
            jaxpr = body.jaxpr
            ins, outs = [v.aval for v in jaxpr.invars], [v.aval for v in jaxpr.outvars]
            if holds_user_op(jaxpr):
                run, fun = UserBody(jaxpr, wrt, outputs).saved()
                made = trace_flat(run, ins)
            else:
                saving = trace_saving(lambda *xs: evaluate(jaxpr, xs), ins, wrt, outputs)
                made, fun = saving.jaxpr, _apply(saving, len(ins), len(outs))
            residuals = tuple(v.aval for v in made.outvars[len(outs) :])
            backward, kept = self._pruned(fun, [*ins, *outs, *residuals, *(outs[i] for i in outputs)])
            self.saves[key] = SavedBodies(self.intern(made), residuals, backward, kept)
        return self.saves[key]

    def _pruned(self, fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> tuple[Body, tuple[int, ...]]:
        """The body of ``fun`` without the inputs that it does not read, and which it reads."""
        traced = trace_flat(fun, avals)
        kept = tuple(sorted(reads_of(traced)))
        pruned = make_jaxpr(traced.eqns, [traced.invars[i] for i in kept], traced.outvars, traced)
        return self.intern(pruned), kept


def filled_with(jaxpr: core.Jaxpr) -> Any | None:
    """The one value of all elements that ``jaxpr`` makes of nothing; None where it does something else."""
    if jaxpr.invars or len(jaxpr.outvars) != 1 or [e.primitive.name for e in jaxpr.eqns] not in ([], ["broadcast_in_dim"]):
        return None
    operand = jaxpr.eqns[0].invars[0] if jaxpr.eqns else jaxpr.outvars[0]
    return operand.val if isinstance(operand, core.Literal) else None


def holds_custom_vjp(jaxpr: core.Jaxpr) -> bool:
    """Whether a body's own derivative has residuals of its own making, so that they are better saved."""
    return any(_is_custom(e) for e in jaxpr.eqns)


def _is_custom(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive is not op_p:
        return eqn.primitive.name in CUSTOM_VJP
    inner = traced(eqn.params["call"], [v.aval for v in eqn.invars])[0]
    return any(e.primitive.name in CUSTOM_VJP for e in all_equations(inner))


def _quiet(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Without what gives no result: a debug print is the forward's alone."""
    return make_jaxpr([e for e in jaxpr.eqns if e.outvars], jaxpr.invars, jaxpr.outvars, jaxpr)


def _apply(saving: Saving, num_inputs: int, num_outputs: int) -> Callable[..., list[Any]]:
    """The gradients as a function of the forward's inputs, results and residuals, and the cotangents."""
    kinds = [("input", num_inputs), ("output", num_outputs), ("residual", len(saving.residuals))]
    places = [Leaf(kind, i) for kind, count in kinds for i in range(count)]  # type: ignore[arg-type]

    def run(*args: Any) -> list[Any]:
        return saving.apply(dict(zip(places, args, strict=False)), args[len(places) :])

    return run
