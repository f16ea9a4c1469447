"""Tools on jaxprs: inlining keeps the meaning, dead equations go, equal programs have equal fingerprints."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jscaler.capture.inner_jaxprs import forwarded
from jscaler.capture.jaxprs import (
    CALLS,
    Inliner,
    evaluate,
    fingerprint,
    flatten,
    inline,
    literal_key,
    live_equations,
    make_jaxpr,
    shape_struct,
    trace_flat,
)

x = np.linspace(0.1, 1.2, 6, dtype=np.float32).reshape(2, 3)
aval = jax.typeof(x)


def names(jaxpr: Any) -> list[str]:
    return [e.primitive.name for e in jaxpr.eqns]


@jax.custom_vjp
def cube(x: jax.Array) -> jax.Array:
    return x**3


cube.defvjp(lambda x: (cube(x), x), lambda x, g: (g * 3 * x**2,))

FUNCTIONS = {
    "jit": lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + y)(x),
    "custom jvp": lambda x: jax.nn.relu(x - 0.5),
    "custom vjp": lambda x: cube(x),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "nested": jax.jit(jax.checkpoint(lambda x: jax.nn.silu(cube(x)))),
    "same variable twice": lambda x: jax.jit(lambda a, b: a * b)(x, x),
    "a result that is an operand": lambda x: jax.jit(lambda y: (y, y * 2))(x)[0],
    "a constant": lambda x: jax.jit(lambda y: y + np.arange(3, dtype=np.float32))(x),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", FUNCTIONS)
def test_inlining_opens_every_call_and_keeps_the_meaning(name: str) -> None:
    fun = FUNCTIONS[name]
    flat = inline(trace_flat(lambda x: [fun(x)], [aval]))
    assert not [inner for e in flat.eqns for inner in core.jaxprs_in_params(e.params)]
    np.testing.assert_allclose(evaluate(flat, [x])[0], fun(x), rtol=1e-6)


def test_plain_calls_open_and_custom_derivatives_stay() -> None:
    traced = trace_flat(lambda x: [jax.jit(jax.nn.relu)(x) + cube(x)], [aval])
    assert not CALLS & set(names(traced))
    assert {"custom_jvp_call", "custom_vjp_call"} <= set(names(traced))


def test_a_jaxpr_without_calls_is_itself() -> None:
    jaxpr = trace_flat(lambda x: [jnp.sin(x)], [aval])
    assert inline(jaxpr) is jaxpr


def test_dead_equations_are_dropped_and_effects_are_kept() -> None:
    def noisy(x: jax.Array) -> list[jax.Array]:
        jnp.cos(x)
        jax.debug.callback(lambda v: None, jnp.sin(x))
        return [jnp.exp(x)]

    kept = names(trace_flat(noisy, [aval]))
    assert "cos" not in kept
    assert kept[0] == "sin"
    assert kept[-1] == "exp"


def test_live_equations_keep_what_results_need() -> None:
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(jnp.exp(x))))(x).jaxpr
    assert [e.primitive.name for e in live_equations(jaxpr.eqns, jaxpr.outvars[1:])] == ["exp", "cos"]


def test_literals_are_known_by_value_and_type() -> None:
    """Zeros of four bytes have the same bytes."""
    made = [core.Literal(np.zeros((), kind), jax.typeof(np.zeros((), kind))) for kind in ("float32", "int32", "uint32")]
    assert len({literal_key(one) for one in made}) == 3
    assert literal_key(made[0]) == literal_key(core.Literal(np.float32(0), made[0].aval))


def test_a_closed_over_array_becomes_a_literal() -> None:
    held = jnp.arange(3.0)
    jaxpr = trace_flat(lambda x: [x + held], [aval])
    assert not jaxpr.constvars
    np.testing.assert_allclose(evaluate(jaxpr, [x])[0], x + held)


def test_weak_types_survive() -> None:
    assert shape_struct(jax.typeof(1.0)).weak_type
    assert trace_flat(lambda x: [x], [jax.typeof(1.0)]).invars[0].aval.weak_type


def same(f: Any, g: Any, *avals: Any) -> bool:
    given = avals or (aval,)
    return fingerprint(trace_flat(f, given)) == fingerprint(trace_flat(g, given))


EQUAL = {
    "plain": lambda x: [jnp.sin(x) * 2],
    "relu": lambda x: [jax.nn.relu(x)],
    "gelu": lambda x: [jax.nn.gelu(x)],
    "softmax": lambda x: [jax.nn.softmax(x)],
    "custom vjp": lambda x: [cube(x)],
    "remat": lambda x: [jax.checkpoint(jnp.sin)(x)],
    "scan": lambda x: [jax.lax.map(jnp.sin, x)],
    "cond": lambda x: [jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)],
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_programs_have_equal_fingerprints(name: str) -> None:
    """Traced twice, as in two equal layers."""
    assert same(EQUAL[name], lambda y: EQUAL[name](y))


def test_equal_functions_with_other_derivatives_are_other_programs() -> None:
    @jax.custom_vjp
    def odd(x: jax.Array) -> jax.Array:
        return x**3

    odd.defvjp(lambda x: (odd(x), x), lambda x, g: (g * 7 * x,))
    assert not same(lambda x: [cube(x)], lambda x: [odd(x)])


@pytest.mark.parametrize(
    ("f", "g"),
    [
        (lambda x: [jnp.sin(x)], lambda x: [jnp.cos(x)]),
        (lambda x: [x * 2], lambda x: [x * 3]),
        (lambda x: [x * 0.0], lambda x: [x * -0.0]),
        (lambda x: [x.sum(0)], lambda x: [x.sum(1)]),
        (lambda x: [x, x], lambda x: [x]),
        (lambda x: [x - x * 2], lambda x: [x * 2 - x]),
        (lambda x: [jax.lax.map(jnp.sin, x)], lambda x: [jax.lax.map(jnp.cos, x)]),
        (lambda x: [jax.checkpoint(jnp.sin)(x)], lambda x: [jax.checkpoint(jnp.cos)(x)]),
    ],
)
def test_different_programs_do_not(f: Any, g: Any) -> None:
    assert not same(f, g)


def test_shapes_and_dtypes_are_part_of_the_fingerprint() -> None:
    f = lambda x: [x * 2]  # noqa: E731
    prints = {
        fingerprint(trace_flat(f, [jax.ShapeDtypeStruct(s, d)])) for s in ((2,), (3,)) for d in (np.float32, np.int32)
    }
    assert len(prints) == 4


def test_what_an_equation_hands_on_is_its_operand() -> None:
    """A checkpoint in the body of a scan returns weights and a carry, as ``nnx.remat`` does; JAX does not see it."""

    def layer(carry: Any, w: jax.Array) -> Any:
        y, kept, w = jax.checkpoint(lambda y, kept, w: (jnp.tanh(y @ w), kept, w))(*carry, w)
        return (y, kept), (w, w[0])

    def f(x: jax.Array, kept: jax.Array, ws: jax.Array) -> Any:
        return jax.lax.scan(layer, (x, kept), ws)

    args = x[:, :2], x, np.ones((3, 2, 2), np.float32)
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    (scan,) = jaxpr.eqns
    names = dict(zip(jaxpr.invars, ("x", "kept", "ws"), strict=True))
    handed = {result: names[scan.invars[operand]] for result, operand in forwarded(scan).items()}
    assert handed == {1: "kept", 2: "ws"}
    opened = flatten(jaxpr, [], Inliner())
    assert [v in opened.invars for v in opened.outvars] == [False, True, True, False]
    for ours, theirs in zip(evaluate(opened, args), jax.tree.leaves(jax.jit(f)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_what_a_custom_derivative_hands_on_is_its_result() -> None:
    """A gradient is turned round there."""
    turned = jax.custom_vjp(lambda x: x)
    turned.defvjp(lambda x: (x, None), lambda _, g: (-g,))
    scan = jax.make_jaxpr(lambda c, ws: jax.lax.scan(lambda c, w: (jax.checkpoint(turned)(c), w), c, ws))(x, x).jaxpr.eqns[
        0
    ]
    assert 0 not in forwarded(scan)
    assert forwarded(jax.make_jaxpr(turned)(x).jaxpr.eqns[0]) == {}


def test_a_carry_that_moves_to_another_place_is_not_handed_on() -> None:
    swap = jax.make_jaxpr(lambda a, b: jax.lax.scan(lambda c, _: ((c[1], c[0]), c[0]), (a, b), None, 3))(x, x)
    assert forwarded(swap.jaxpr.eqns[0]) == {}


def test_make_jaxpr_takes_other_numbers_of_arguments() -> None:
    jaxpr = jax.make_jaxpr(lambda x, y: (jnp.sin(x), y))(x, x).jaxpr
    part = make_jaxpr(jaxpr.eqns, jaxpr.invars[:1], jaxpr.outvars[:1], jaxpr)
    np.testing.assert_allclose(jax.jit(lambda a: evaluate(part, [a]))(x)[0], np.sin(x), rtol=1e-6)
