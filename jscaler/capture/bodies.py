"""Interned op bodies, and their backward bodies. Equal fragments (equal layers) share one Body object."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, fingerprint, make_jaxpr, trace_flat
from jscaler.ir import Body, Op


@dataclass
class BodyTable:
    """All bodies of one capture, by program; a memo, filled as needed."""

    bodies: dict[Any, Body] = field(default_factory=dict)
    backwards: dict[Any, tuple[Body, tuple[int, ...]]] = field(default_factory=dict)

    def intern(self, jaxpr: core.Jaxpr) -> Body:
        """The one Body of all jaxprs that equal ``jaxpr``."""
        return self.bodies.setdefault(fingerprint(jaxpr), Body(jaxpr))

    def traced(self, fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Body:
        return self.intern(trace_flat(fun, avals))

    def join(self, aval: Any, count: int) -> Body:
        """The n-ary add that joins ``count`` gradients of one tensor."""
        return self.traced(lambda *parts: [sum(parts[1:], start=parts[0])], [aval] * count)

    def fill(self, aval: Any, value: float) -> Body:
        """A tensor of one value: the seed of a backward pass, or the gradient of an unused parameter."""
        return self.traced(lambda: [jnp.full(aval.shape, value, aval.dtype)], [])

    def backward(self, forward: Op, handle: Op) -> tuple[Body, tuple[int, ...]]:
        """The backward body of a forward op, and which of the handle's inputs it reads.

        It is ``jax.vjp`` of the whole forward body (custom derivatives intact), pruned to what the gradients need.
        """
        assert forward.body is not None
        outputs = tuple(i for i, _ in handle.cotangents)
        key = (forward.body, handle.gradients, outputs)
        if key not in self.backwards:
            jaxpr = forward.body.jaxpr
            seen = [e for e in jaxpr.eqns if e.outvars]  # a debug print is the forward's alone
            quiet = make_jaxpr(seen, jaxpr.invars, jaxpr.outvars, jaxpr)
            self.backwards[key] = self._differentiate(quiet, handle.gradients, outputs)
        return self.backwards[key]

    def _differentiate(
        self, jaxpr: core.Jaxpr, wrt: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[Body, tuple[int, ...]]:
        num_inputs = len(jaxpr.invars)

        def backward(*args: Any) -> list[Any]:
            inputs, cotangents = args[:num_inputs], args[num_inputs:]

            def selected(*diff: Any) -> list[Any]:
                full = list(inputs)
                for i, value in zip(wrt, diff, strict=True):
                    full[i] = value
                results = evaluate(jaxpr, full)
                return [results[i] for i in outputs]

            _, vjp = jax.vjp(selected, *(inputs[i] for i in wrt))
            return list(vjp(list(cotangents)))

        avals = [v.aval for v in jaxpr.invars] + [jaxpr.outvars[i].aval for i in outputs]
        traced = trace_flat(backward, avals)
        read = {v for e in traced.eqns for v in e.invars if isinstance(v, core.Var)}
        read |= {v for v in traced.outvars if isinstance(v, core.Var)}
        kept = tuple(i for i, v in enumerate(traced.invars) if v in read)
        pruned = make_jaxpr(traced.eqns, [traced.invars[i] for i in kept], traced.outvars, traced)
        return self.intern(pruned), kept
