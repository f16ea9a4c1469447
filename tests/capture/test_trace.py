"""A trace is flat: calls inlined, gradient calls opened, each equation tagged with the call it belongs to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jscaler
from jscaler.capture.gradient import value_and_grad_p
from jscaler.capture.trace import Trace, trace_step

x = np.ones((2, 3), np.float32)


def trace(fun: Any, *args: Any) -> Trace:
    return trace_step(lambda *leaves: jax.tree.leaves(fun(*leaves)), [jax.typeof(a) for a in args])


def names(step: Trace, call: int | None) -> list[str]:
    return [t.eqn.primitive.name for t in step.equations if t.call == call]


@pytest.mark.smoke
def test_equations_are_tagged_with_their_gradient_call() -> None:
    def step(p: jax.Array) -> Any:
        value, g = jscaler.value_and_grad(lambda q: jnp.sin(q).sum())(p * 2)
        return jscaler.value_and_grad(lambda q: jnp.cos(q).sum())(p - g), jnp.exp(value)

    found = trace(step, x)
    assert names(found, None) == ["mul", "sub", "exp"]
    assert names(found, 0) == ["sin", "reduce_sum"]
    assert names(found, 1) == ["cos", "reduce_sum"]
    assert len(found.calls) == 2


def test_gradients_are_produced_by_no_equation() -> None:
    found = trace(jscaler.grad(lambda q: jnp.sin(q).sum()), x)
    produced = {v for t in found.equations for v in t.eqn.outvars}
    (call,) = found.calls
    assert call.loss in produced
    assert not produced & set(call.gradients)
    assert found.outvars == call.gradients
    assert call.wrt == found.invars


def test_aux_of_the_loss_is_read_from_the_forward_program() -> None:
    def loss(q: jax.Array) -> Any:
        return q.sum(), jnp.sin(q)

    found = trace(lambda p: jscaler.value_and_grad(loss, has_aux=True)(p)[0][1] * 2, x)
    (outside,) = [t.eqn for t in found.equations if t.call is None]
    (sine,) = [t.eqn for t in found.equations if t.eqn.primitive.name == "sin"]
    assert outside.invars[0] is sine.outvars[0]


def test_what_a_loss_differentiates_and_closes_over_is_kept_apart() -> None:
    found = trace(lambda p: jscaler.grad(lambda q: (q * p).sum())(p), x)
    (call,) = found.calls
    assert call.wrt != found.invars
    (product,) = [t.eqn for t in found.equations if t.eqn.primitive.name == "mul"]
    assert set(product.invars) == {*call.wrt, *found.invars}


def test_calls_are_opened_everywhere_and_custom_derivatives_stay() -> None:
    found = trace(lambda p: jax.jit(jscaler.grad(jax.jit(lambda q: jax.nn.relu(jax.jit(jnp.sin)(q)).sum())))(p), x)
    assert names(found, 0) == ["sin", "custom_jvp_call", "reduce_sum"]


def test_arrays_that_are_closed_over_become_constants_once() -> None:
    held = jnp.arange(3.0)
    found = trace(lambda p: jscaler.grad(lambda q: (q * held + held).sum())(p) * held, x)
    assert [value is held for _, value in found.constants] == [True]


def test_no_gradient_primitive_is_left() -> None:
    found = trace(jscaler.value_and_grad(lambda q: (q**2).sum()), x)
    assert all(t.eqn.primitive is not value_and_grad_p for t in found.equations)


def test_every_variable_is_defined_before_it_is_read() -> None:
    found = trace(lambda p: jscaler.value_and_grad(lambda q: (q * p).sum())(p), x)
    defined = {*found.invars, *(v for v, _ in found.constants), *(g for c in found.calls for g in c.gradients)}
    for tagged in found.equations:
        assert {v for v in tagged.eqn.invars if isinstance(v, core.Var)} <= defined
        defined |= set(tagged.eqn.outvars)
