"""Bodies of ops that hold a user's op: its backward, and its forward with residuals, stay one equation each.

Such a body is the user's equation, behind copies of the input-free equations (an iota, a mask) that it reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jscaler.capture.jaxprs import evaluate, make_jaxpr, shape, shape_struct
from jscaler.capture.saving import Leaf
from jscaler.capture.user_op import OpCall, op_p
from jscaler.capture.user_vjp import saved_calls, vjp_call


class UserBody:
    """A body around the one equation of a user's op, to be differentiated by inputs ``wrt`` at results ``outputs``."""

    def __init__(self, jaxpr: core.Jaxpr, wrt: Sequence[int], outputs: Sequence[int]):
        (self.eqn,) = (e for e in jaxpr.eqns if e.primitive is op_p)
        self.results: list[Any] = list(jaxpr.outvars)  # each is a result of the equation
        self.jaxpr = jaxpr
        self.wrt = tuple(wrt)
        call: OpCall = self.eqn.params["call"]
        self.call = call
        variables = [jaxpr.invars[i] for i in wrt]
        # the operands, and results of the equation, that the gradients flow through
        self.inner_wrt = tuple(i for i, v in enumerate(self.eqn.invars) if any(v is w for w in variables))
        self.inner_outputs = tuple(self.eqn.outvars.index(self.results[i]) for i in outputs)
        self.structs = [shape_struct(v.aval) for v in self.eqn.invars]
        self.rule = call.matched([shape(v) for v in self.eqn.invars], [shape(v) for v in self.eqn.outvars])

    def backward(self) -> Callable[..., list[Any]]:
        """The gradients as a function of the body's inputs and the cotangents."""
        call = vjp_call(self.call, self.structs, self.rule, self.inner_wrt, self.inner_outputs)

        def run(*args: Any) -> list[Any]:
            full = [*self._operands(args[: len(self.jaxpr.invars)]), *args[len(self.jaxpr.invars) :]]
            return self._joined(op_p.bind(*(full[i] for i in call.reads), call=call))

        return run

    def saved(self) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
        """The forward with residuals; the gradients as a function of its inputs, results, residuals, and the cotangents."""
        saving, applied = saved_calls(self.call, self.structs, self.rule, self.inner_wrt, self.inner_outputs)
        count = len(self.eqn.outvars)
        # results that nobody else reads are handed out like residuals
        handed = [*range(count, len(saving.rule.results))]
        handed += [leaf.index for leaf in applied.reads if leaf.kind == "output" and not self._is_result(leaf.index)]

        def forward(*inputs: Any) -> list[Any]:
            results = op_p.bind(*self._operands(inputs), call=saving)
            named = dict(zip(self.eqn.outvars, results, strict=False))
            return [*(named[v] for v in self.results), *(results[i] for i in handed)]

        def backward(*args: Any) -> list[Any]:
            inputs, rest = args[: len(self.jaxpr.invars)], args[len(self.jaxpr.invars) :]
            num_outs = len(self.jaxpr.outvars)
            places = [self.eqn.outvars.index(v) for v in self.results] + handed
            results = dict(zip(places, rest, strict=False))
            operands = self._operands(inputs)
            table = {"input": (operands, 0), "output": (results, 0), "residual": (results, count)}

            def value(leaf: Leaf) -> Any:
                values, start = table[leaf.kind]
                return values[start + leaf.index]

            cotangents = rest[num_outs + len(handed) :]
            return self._joined(op_p.bind(*map(value, applied.reads), *cotangents, call=applied))

        return forward, backward

    def _is_result(self, index: int) -> bool:
        return any(v is self.eqn.outvars[index] for v in self.jaxpr.outvars)

    def _operands(self, inputs: Sequence[Any]) -> list[Any]:
        """The values that the equation reads."""
        before = [e for e in self.jaxpr.eqns if e is not self.eqn and e.outvars]
        reads: list[Any] = list(self.eqn.invars)
        return evaluate(make_jaxpr(before, self.jaxpr.invars, reads, self.jaxpr), inputs)

    def _joined(self, gradients: Sequence[Any]) -> list[Any]:
        """One gradient per input, where an input may be several operands."""
        totals: dict[core.Var, Any] = {}
        for i, gradient in zip(self.inner_wrt, gradients, strict=True):
            var = self.eqn.invars[i]
            assert isinstance(var, core.Var)
            totals[var] = totals[var] + gradient if var in totals else gradient
        return [totals[self.jaxpr.invars[i]] for i in self.wrt]


def holds_user_op(jaxpr: core.Jaxpr) -> bool:
    """Whether a body is one around a user's op: one such equation, and others that depend on nothing."""
    others = [e for e in jaxpr.eqns if e.primitive is not op_p]
    made = {v for e in others for v in e.outvars}
    free = all(v in made for e in others for v in e.invars if isinstance(v, core.Var))
    return len(others) + 1 == len(jaxpr.eqns) and free
