"""Operations of products: against XLA's own count, and by hand where XLA counts a loop once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jscaler.capture.jaxprs import trace_flat
from jscaler.xla_model.flops import Flops, flops_of
from jscaler.xla_model.work import work_of


def ours(fun, *args) -> float:
    return work_of(trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), args)).flops


CASES = {
    "dot": (lambda a, b: a @ b, ((48, 32), (32, 16))),
    "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), ((3, 8, 16), (3, 16, 24))),
    "two contracted": (lambda a, b: jnp.einsum("bshk,hkd->bsd", a, b), ((2, 8, 4, 16), (4, 16, 32))),
    "vector": (lambda a, b: a @ b, ((32,), (32, 16))),
    "convolution": (
        lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        ((2, 10, 10, 3), (3, 3, 3, 8)),
    ),
    "grouped": (
        lambda a, b: lax.conv_general_dilated(
            a, b, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        ),
        ((2, 9, 9, 4), (3, 3, 2, 8)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_counted_as_xla_counts_them(name: str) -> None:
    fun, shapes = CASES[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    counted = jax.jit(fun).lower(*args).cost_analysis()
    assert counted is not None
    assert ours(fun, *args) == counted["flops"]


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def fun(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    args = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((5, 16, 16), jnp.float32)
    assert ours(fun, *args) == 5 * 2 * 8 * 16 * 16


def test_a_kernel_counts_for_each_cell_of_its_grid() -> None:
    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...]) @ y[...]

    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        rows, whole = pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))
        shape = jax.ShapeDtypeStruct((32, 16), jnp.float32)
        return pl.pallas_call(kernel, shape, grid=(4,), in_specs=[rows, whole], out_specs=rows)(x, y)

    (eqn,) = jax.make_jaxpr(fun)(jnp.ones((32, 16)), jnp.ones((16, 16))).eqns
    assert flops_of(eqn) == Flops(2.0 * 32 * 16 * 16, "float32")


def test_loops_of_a_kernel_count_as_often_as_they_run_or_as_its_author_says() -> None:
    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = lax.fori_loop(0, 3, lambda i, total: total @ y[...], x[...])

    def fun(x: jax.Array, y: jax.Array, said: pl.CostEstimate | None) -> jax.Array:
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 16), jnp.float32), cost_estimate=said)(x, y)

    said = pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
    for one, flops in ((None, 3 * 2.0 * 8 * 16 * 16), (said, 1000.0)):
        (eqn,) = jax.make_jaxpr(functools.partial(fun, said=one))(jnp.ones((8, 16)), jnp.ones((16, 16))).eqns
        assert flops_of(eqn) == Flops(flops, "float32")


def test_of_the_branches_of_a_cond_the_larger_counts() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert ours(fun, jax.ShapeDtypeStruct((8, 8), jnp.float32)) == 2 * 2 * 8**3


def test_a_program_that_is_called_twice_counts_twice() -> None:
    @jax.custom_jvp
    def f(x: jax.Array) -> jax.Array:
        return x @ x

    f.defjvp(lambda x, t: (f(*x), t[0]))
    jaxpr = trace_flat(lambda x, y: [f(x) + f(y)], [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2)
    assert [e.primitive.name for e in jaxpr.eqns].count("custom_jvp_call") == 2
    assert work_of(jaxpr).flops == 2 * 2 * 8**3


def test_equations_that_others_have_done_cost_nothing() -> None:
    jaxpr = trace_flat(lambda x: [(x @ x) @ x], [jax.ShapeDtypeStruct((8, 8), np.float32)])
    first, both = work_of(jaxpr, [False, True]), work_of(jaxpr)
    assert (first.flops, both.flops) == (2 * 8**3, 4 * 8**3)
    assert (first.read, first.written) == (2 * 256, 256)
    assert work_of(jaxpr, [False, False]).kernels == ()
