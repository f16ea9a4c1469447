"""Gradients that do not stand at the top level of a step: inside a loss, a checkpoint, a loop or a branch.

Inside of a loss (a gradient penalty, forces of an energy) one is a part of the forward program, as JAX's own is. What
stands in a loop or a branch of the step has no forward program that a plan could split, and is refused with what to write
instead.
"""

import functools
from typing import Any, NoReturn

from jax.extend import core

from jscaler.capture.gradient import apply, value_and_grad_p
from jscaler.capture.jaxprs import (
    Inliner,
    Program,
    all_equations,
    flatten,
    like_program,
    map_programs,
    open_jaxpr,
    trace_flat,
)
from jscaler.errors import CaptureError
from jscaler.ir.op import user_line

REMEDIES = {
    "scan": "micro-batches are the plan's, pipeline(stages, {length}) or accumulate({length}) of a step that takes one "
    "gradient of the whole batch, rows are jax.vmap of the gradient, and a series of steps is a loop in Python around one",
    "while": "a series of steps is a loop in Python around a step with one gradient",
    "cond": "take the gradient in front of the cond and choose what to do with it behind, or put the cond into the loss",
}
ELSEWHERE = "take it at the top level of the step"


def holds_gradients(eqn: core.JaxprEqn) -> bool:
    """Whether a gradient stands inside of ``eqn``."""
    return any(map(_holds, core.jaxprs_in_params(eqn.params)))


def _holds(program: Any) -> bool:
    return any(e.primitive is value_and_grad_p for e in all_equations(open_jaxpr(program)[0]))


def refuse(eqn: core.JaxprEqn) -> NoReturn:
    """Raises CaptureError: ``eqn`` is a loop, a branch or another construct of the step that holds a gradient."""
    jaxprs = (open_jaxpr(each)[0] for each in core.jaxprs_in_params(eqn.params))
    inside = next(e for jaxpr in jaxprs for e in all_equations(jaxpr) if e.primitive is value_and_grad_p)
    name = eqn.primitive.name
    length = eqn.params.get("length", "")
    times = f" of {length} iterations" if name == "scan" else ""
    remedy = REMEDIES.get(name, ELSEWHERE).format(length=length)
    raise CaptureError(
        f"the step calls jscaler.value_and_grad at {user_line(inside.source_info)} inside a {name}{times} at "
        f"{user_line(eqn.source_info)}, where no plan reaches its ops: {remedy}"
    )


class WithPlainGradients(Inliner):
    """Opens the program of a loss: gradients in it, at any depth, are the equations that they stand for."""

    def called(self, eqn: core.JaxprEqn) -> tuple[core.Jaxpr, list[Any]] | None:
        if eqn.primitive is value_and_grad_p:
            return trace_flat(functools.partial(apply, **eqn.params), [v.aval for v in eqn.invars]), []
        return super().called(eqn)

    def parameter(self, value: Any) -> Any:
        return map_programs(_with_plain_gradients, super().parameter(value))


def _with_plain_gradients(program: Program) -> Program:
    if not _holds(program):
        return program
    return like_program(program, flatten(*open_jaxpr(program), WithPlainGradients()))
