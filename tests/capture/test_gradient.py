"""``jscaler.value_and_grad`` and ``grad`` equal JAX's, under every transformation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.capture.gradient import value_and_grad_p

x = np.linspace(0.1, 1.2, 6, dtype=np.float32).reshape(2, 3)
y = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
params = {"w": x, "layers": [y, np.float32(0.5)]}


def loss(p: Any, b: Any) -> jax.Array:
    return jnp.sum(jnp.sin(p) * b) ** 2


def tree_loss(p: Any, b: Any) -> jax.Array:
    return jnp.tanh(p["w"] * b).mean() * p["layers"][1] + p["layers"][0].sum()


def assert_same(ours: Any, theirs: Any) -> None:
    """Same tree, shapes, dtypes and numbers."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def both(use: Callable[[Any], Any]) -> None:
    """``use(module)`` gives the same with jscaler's functions as with JAX's."""
    assert_same(use(jscaler), use(jax))


@pytest.mark.smoke
@pytest.mark.parametrize("argnums", [0, 1, (0,), (1,), (0, 1), (1, 0), [0, 1]], ids=str)
def test_argnums(argnums: Any) -> None:
    both(lambda m: m.value_and_grad(loss, argnums)(x, y))
    both(lambda m: m.grad(loss, argnums)(x, y))


@pytest.mark.parametrize("argnums", [-1, (0, -1), (-2,)], ids=str)
def test_argnums_from_the_end(argnums: Any) -> None:
    both(lambda m: m.grad(loss, argnums)(x, y))


def test_trees() -> None:
    both(lambda m: m.value_and_grad(tree_loss)(params, y))
    both(lambda m: m.grad(tree_loss, (1, 0))(params, y))


def test_aux() -> None:
    def with_aux(p: Any, b: Any) -> Any:
        return loss(p, b), {"mean": p.mean(), "ids": jnp.arange(3), "none": None, "flag": b > 0}

    both(lambda m: m.value_and_grad(with_aux, has_aux=True)(x, y))
    both(lambda m: m.grad(with_aux, 1, has_aux=True)(x, y))


def test_keyword_arguments() -> None:
    both(lambda m: m.value_and_grad(loss)(x, b=y))
    both(lambda m: m.grad(lambda p, *, scale, b: (p * scale * b["b"]).sum())(x, b={"b": y}, scale=2.0))


def test_arguments_that_are_no_arrays() -> None:
    def pick(p: Any, name: str, functions: Any, none: None) -> jax.Array:
        assert none is None
        return functions[name](p).sum()

    functions = {"sin": jnp.sin, "cos": jnp.cos}
    both(lambda m: m.grad(pick)(x, "cos", functions, None))


def test_an_undifferentiated_argument_may_be_of_any_dtype() -> None:
    def pick(p: Any, i: Any, key: Any, flag: Any) -> jax.Array:
        return (p[i] * jax.random.normal(key, (3,)) * flag).sum()

    both(lambda m: m.grad(pick)(x, np.int32(1), jax.random.key(0), True))
    both(lambda m: jax.jit(m.grad(pick))(x, 1, jax.random.key(0), True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype: Any) -> None:
    both(lambda m: m.value_and_grad(lambda p: (p * p).sum())(jnp.asarray(x, dtype)))


def test_a_python_number_stays_weak() -> None:
    for outer in (lambda f: f, jax.jit):
        both(lambda m, outer=outer: outer(m.value_and_grad(lambda p: p**2))(3.0))
        both(lambda m, outer=outer: outer(lambda p: m.grad(lambda p: p**2)(p) * jnp.ones(2, jnp.bfloat16))(3.0))


def test_jit() -> None:
    both(lambda m: jax.jit(m.value_and_grad(tree_loss))(params, y))
    both(lambda m: m.value_and_grad(jax.jit(tree_loss))(params, y))


def test_vmap() -> None:
    both(lambda m: jax.vmap(m.grad(loss))(x, y))
    both(lambda m: jax.vmap(m.value_and_grad(loss), (0, None))(x, y[0]))
    both(lambda m: jax.jit(jax.vmap(m.grad(loss), (1, 1), 1))(x, y))
    both(lambda m: jax.vmap(jax.vmap(m.grad(lambda p, b: p * b)))(x, y))


def test_vmap_with_an_axis_name() -> None:
    def centred(p: Any, b: Any) -> jax.Array:
        return ((p - jax.lax.pmean(p, "batch")) * b).sum()

    both(lambda m: jax.vmap(m.value_and_grad(centred), axis_name="batch")(x, y))


def test_scan_and_cond() -> None:
    def descend(m: Any, p: Any, _: Any) -> Any:
        value, g = m.value_and_grad(loss)(p, y)
        return jax.lax.cond(value > 0, lambda p: p - 0.01 * g, lambda p: p + m.grad(loss)(p, y), p), value

    both(lambda m: jax.lax.scan(functools.partial(descend, m), x, None, 3))


def test_a_helper_that_was_jitted_before() -> None:
    def use(m: Any) -> Any:
        helper = jax.jit(m.value_and_grad(loss))
        helper(x, y)
        return jax.jit(lambda p: helper(p, y)[1] * 2)(x)

    both(use)


@pytest.mark.smoke
def test_a_helper_jitted_before_is_still_seen_by_a_capture() -> None:
    helper = jax.jit(jscaler.value_and_grad(loss))
    helper(x, y)
    graph = jscaler.parallelize("single", devices=1)(lambda p: helper(p, y)).graph(x)
    assert len(graph.backward()) > 0


def test_grad_of_grad() -> None:
    both(lambda m: m.grad(lambda p: (m.grad(loss)(p, y) ** 2).sum())(x))
    both(lambda m: jax.grad(lambda p: (m.grad(loss)(p, y) ** 2).sum())(x))
    both(lambda m: jax.jit(jax.hessian(m.grad(lambda p: (p**3).sum())))(x[0]))
    both(lambda m: jax.jvp(lambda p: m.value_and_grad(loss)(p, y), (x,), (y,)))
    both(lambda m: jax.jacfwd(m.grad(loss))(x, y))


def test_closing_over_arrays_and_tracers() -> None:
    array = jnp.asarray(y)
    both(lambda m: m.grad(lambda p: (p * array).sum())(x))

    def step(m: Any, p: Any, b: Any) -> Any:
        scaled = b * 2
        return m.value_and_grad(lambda q: (q * scaled * p).sum())(p)

    both(lambda m: jax.jit(functools.partial(step, m))(x, y))
    both(lambda m: jax.vmap(functools.partial(step, m))(x, y))
    both(lambda m: jax.grad(lambda p: step(m, p, y)[0])(x))


def test_custom_derivatives_stay() -> None:
    both(lambda m: m.grad(lambda p: jax.nn.relu(p - p).sum())(x))
    both(lambda m: jax.jit(m.grad(lambda p: jax.nn.relu(p - p).sum()))(x))


def test_a_loss_that_ignores_its_argument() -> None:
    both(lambda m: m.value_and_grad(lambda p: jnp.float32(3))(x))
    both(lambda m: jax.jit(m.value_and_grad(lambda p, b: b.sum()))(params, y))


def test_it_keeps_the_name_and_the_docstring() -> None:
    def named(p: Any) -> Any:
        """A loss."""

    assert jscaler.grad(named).__name__ == "named"
    assert jscaler.value_and_grad(named).__doc__ == "A loss."


def test_what_is_closed_over_is_an_operand() -> None:
    jaxpr = jax.make_jaxpr(lambda p, b: jscaler.grad(lambda q: (q * b).sum())(p))(x, y)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive is value_and_grad_p]
    assert set(eqn.invars) == set(jaxpr.jaxpr.invars)


@pytest.mark.parametrize(
    ("fun", "args", "argnums", "message"),
    [
        (lambda p: p["a"].sum(), ({"a": np.arange(3)},), 0, r"args\[0\]\['a'\] is int"),
        (lambda p: 1.0, ({"b": "text"},), 0, r"args\[0\]\['b'\] is str: gradients are taken of real floating-point"),
        (lambda p: p.real.sum(), (x + 1j,), 0, r"args\[0\] is complex64"),
        (lambda p: p, (x,), 0, r"needs a real scalar from the loss function; it returned float32\[2,3\]"),
        (lambda p: (p > 0).all(), (x,), 0, r"needs a real scalar from the loss function; it returned bool\[\]"),
        (lambda p: p.sum() * 1j, (x,), 0, r"needs a real scalar"),
        (lambda p: p.sum(), (x,), 1, r"argnums \[1\] with 1 positional arguments; legal: 0 to 0"),
        (lambda p, q: p.sum(), (x, x), (0, 5), r"argnums \[5\] with 2 positional arguments"),
    ],
)
def test_mistakes(fun: Any, args: Any, argnums: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        jscaler.value_and_grad(fun, argnums)(*args)


def test_a_pair_without_has_aux() -> None:
    with pytest.raises(TypeError, match="real scalar from the loss function"):
        jscaler.value_and_grad(lambda p: (p.sum(), 1))(x)


def test_has_aux_without_a_pair() -> None:
    with pytest.raises(TypeError, match="aux"):
        jscaler.value_and_grad(lambda p: p.sum(), has_aux=True)(x)
