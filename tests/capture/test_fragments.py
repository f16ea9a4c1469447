"""Fragments: one scope, ended by a contraction, never a cycle, dependencies first, input-free equations copied."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.extend import core

import jscaler
from jscaler.capture.fragments import Fragment, fragments
from jscaler.capture.trace import trace_step
from jscaler.lax_primitives import contracts, named

x = np.ones((4, 4), np.float32)


def found(fun: Any, *args: Any) -> list[Fragment]:
    step = trace_step(lambda *leaves: jax.tree.leaves(fun(*leaves)), [jax.typeof(a) for a in args])
    return fragments(step)[0]


def names(several: list[Fragment]) -> list[list[str]]:
    return [[e.primitive.name for _, e in f.eqns] for f in several]


@pytest.mark.smoke
def test_neighbours_of_one_scope_are_one_fragment_and_a_contraction_ends_it() -> None:
    def mlp(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            h = jnp.sin(x) * 2 @ w
        with jax.named_scope("down"):
            return jnp.tanh(h + 1) @ w

    assert names(found(mlp, x, x)) == [["sin", "mul", "dot_general"], ["add", "tanh", "dot_general"]]


def test_another_scope_is_another_fragment() -> None:
    def two(x: jax.Array) -> jax.Array:
        with jax.named_scope("a"):
            x = jnp.sin(x) + 1
        with jax.named_scope("b"):
            return jnp.cos(x) + 1

    assert [(f.scope, n) for f, n in zip(found(two, x), names(found(two, x)), strict=True)] == [
        ("a", ["sin", "add"]), ("b", ["cos", "add"]),
    ]  # fmt: skip


def test_what_reads_a_contraction_comes_after_it() -> None:
    assert names(found(lambda x: jnp.tanh(x @ x) @ x, x)) == [["dot_general"], ["tanh", "dot_general"]]


def test_a_reduction_to_a_scalar_ends_a_fragment() -> None:
    assert names(found(lambda x: jnp.exp((x * 2).sum()), x)) == [["mul", "reduce_sum"], ["exp"]]
    assert names(found(lambda x: x / x.sum(), x)) == [["reduce_sum"], ["div"]]
    assert names(found(lambda x: x / x.sum(0), x)) == [["reduce_sum", "broadcast_in_dim", "div"]]


def test_a_cast_or_mask_with_one_reader_joins_it() -> None:
    def scoped(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("dense"):
            return x @ w.astype(jnp.bfloat16).astype(jnp.float32).T

    assert names(found(scoped, x, x)) == [["convert_element_type", "convert_element_type", "transpose", "dot_general"]]


def test_what_depends_on_no_input_belongs_to_no_fragment() -> None:
    def masked(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x, 0.0) * jnp.arange(4)

    step = trace_step(lambda v: [masked(v)], [jax.typeof(x)])
    several, generated = fragments(step)
    assert "iota" in {e.primitive.name for e in generated.values()}
    assert "iota" not in {n for f in names(several) for n in f}


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sin(lax.scan(lambda c, r: (c + r, c), x[0], x * 2)[1]),
        lambda x: jnp.sin(lax.cond(x.sum() > 0, jnp.cos, jnp.tanh, x * 2)),
        lambda x: jnp.sin(lax.while_loop(lambda v: v.sum() < 9, lambda v: v * 2, x + 1)),
        lambda x: jnp.sin(jax.checkpoint(lambda v: jnp.cos(jnp.cos(v)))(x + 1)),
    ],
    ids=["scan", "cond", "while", "remat"],
)
def test_constructs_stay_alone(fun: Any) -> None:
    for fragment in names(found(fun, x)):
        assert not any(named(name).role == "alone" for name in fragment) or len(fragment) == 1


def test_forward_and_update_never_mix() -> None:
    def step(p: jax.Array) -> jax.Array:
        return p - 0.1 * jscaler.grad(lambda q: (q * 2).sum())(p * 3)

    assert [f.call for f in found(step, x)] == [None, 0, None]


def test_an_update_comes_after_the_forward_program() -> None:
    def step(p: jax.Array) -> Any:
        value, g = jscaler.value_and_grad(lambda q: jnp.sin(jnp.sin(q) @ q).sum())(p)
        return p - 0.1 * g, value

    calls = [f.call for f in found(step, x)]
    assert calls == sorted(calls, key=lambda c: c is None)


# Random programs: scopes come and go, results are read again much later. The worst case for a grouping.

STEPS = (
    lambda a, b: a @ b,
    lambda a, b: jnp.tanh(a),
    lambda a, b: a + b,
    lambda a, b: a * b.sum(),
    lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32),
    lambda a, b: jnp.where(jnp.arange(4) > 1, a, b),
    lambda a, b: jax.checkpoint(jnp.sin)(a),
    lambda a, b: a[0] * b,
)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)), max_size=12
    )
)
def test_random_programs_have_no_cycle_and_lose_no_equation(chosen: list[tuple[int, int, int, int]]) -> None:
    def program(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        pool = [x, w]
        for step, i, j, scope in chosen:
            with jax.named_scope(f"scope_{scope}"):
                pool.append(STEPS[step](pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]))
        return pool[-3:]

    step = trace_step(program, [jax.typeof(x)] * 2)
    several, generated = fragments(step)
    defined = {*step.invars, *generated}
    for fragment in several:
        inside: set[core.Var] = set()
        for _, eqn in fragment.eqns:
            assert {v for v in eqn.invars if isinstance(v, core.Var)} <= defined | inside
            inside |= set(eqn.outvars)
        defined |= inside
        contractions = [i for i, (_, e) in enumerate(fragment.eqns) if contracts([e])]
        assert contractions in ([], [len(fragment.eqns) - 1])
    eqns = [id(e) for f in several for _, e in f.eqns] + [id(e) for e in {id(e): e for e in generated.values()}.values()]
    assert sorted(eqns) == sorted(id(t.eqn) for t in step.equations)


def test_what_prepares_a_call_is_no_part_of_the_update() -> None:
    def step(p: jax.Array, x: jax.Array) -> Any:
        loss, g = jscaler.value_and_grad(lambda low: (x.astype(low.dtype) @ low).sum().astype(jnp.float32))(
            p.astype("bfloat16")
        )
        return p - g.astype(p.dtype) - 0.1 * p, loss

    casts = [f for f in found(step, x, x) if f.call is None and f.eqns[0][1].outvars[0].aval.dtype == jnp.bfloat16]  # type: ignore[union-attr]
    assert names(casts) == [["convert_element_type"]]


def test_terms_of_an_update_are_part_of_it_and_what_two_read_is_not() -> None:
    def step(p: jax.Array, m: jax.Array, n: jax.Array) -> Any:
        g = jscaler.grad(lambda p: (p * p).sum())(p)
        both = n * n
        return p - 0.1 * (0.9 * m + g) - 0.01 * p - both, g.sum() * both

    behind = names([f for f in found(step, x, x, x) if f.call is None])
    assert [own.count("mul") for own in behind if "sub" in own] == [3]
    assert ["mul"] in behind


def test_an_evaluation_behind_an_update_is_no_part_of_it() -> None:
    def step(p: jax.Array, m: jax.Array, x: jax.Array) -> Any:
        g = jscaler.grad(lambda p: (x @ p).sum())(p)
        m = 0.9 * m + g
        return p - m, m, x @ (p - m)

    several = [f for f in found(step, x, x, x) if f.call is None]
    assert [n for f in names(several) for n in f if "dot_general" in f] == ["dot_general"]
