"""``@jscaler.op``: the function under plain JAX, one op under a plan, split as its rule says, forward and backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing
from of_the_day import of_the_day
from user_ops import attend, attend_op, attention_step, make_params, project, wrong_op

import jscaler
from jscaler import CaptureError, RuleError, Split

rng = np.random.default_rng(3)
x, kernel = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 5))


def plain(x: Any, kernel: Any) -> Any:
    return x @ kernel


def both(transform: Callable[..., Any], *args: Any) -> None:
    for ours, theirs in zip(
        jax.tree.leaves(transform(project)(*args)), jax.tree.leaves(transform(plain)(*args)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "transform",
    of_the_day(
        [
            lambda f: f,
            jax.jit,
            lambda f: jax.grad(lambda x, k: jnp.sin(f(x, k)).sum(), (0, 1)),
            lambda f: jax.jit(jax.grad(lambda x, k: jnp.sin(f(x, k)).sum(), 1)),
            lambda f: lambda x, k: jax.jvp(f, (x, k), (k.sum() * x, k)),
            lambda f: lambda x, k: jax.linear_transpose(lambda y: f(y, k), x)(jnp.ones((2, 3, 5), x.dtype)),
            lambda f: lambda x, k: jax.linear_transpose(lambda w: f(x, w), k)(jnp.ones((2, 3, 5), x.dtype)),
            lambda f: jax.hessian(lambda x, k: (f(x, k) ** 3).sum(), 1),
            lambda f: lambda x, k: jax.vmap(f, (None, 0))(x, jnp.stack([k, 2 * k])),
            lambda f: lambda x, k: jax.jit(jax.vmap(jax.grad(lambda k, x: f(x[None], k).sum()), (None, 0)))(k, x),
            lambda f: jax.checkpoint(f),
            lambda f: lambda x, k: jax.lax.map(lambda row: f(row[None], k), x),
        ],
        2,
    ),
)
def test_under_plain_jax_it_is_the_function(transform: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        both(transform, jnp.asarray(x), jnp.asarray(kernel))


def test_a_custom_derivative_is_kept_under_plain_jax() -> None:
    gradient = jax.grad(lambda x: wrong_op(x).sum())(jnp.ones(3))
    np.testing.assert_allclose(gradient, 100 * np.cos(1) + 1, rtol=1e-6)


def test_integer_operands_have_no_gradient() -> None:
    take = jscaler.op("v d, n -> n d", blocked="v")(lambda table, ids: table[ids])
    gradient = jax.grad(lambda table: take(table, jnp.array([1, 1, 0])).sum())(jnp.ones((4, 2)))
    np.testing.assert_array_equal(gradient, [[1, 1], [2, 2], [0, 0], [0, 0]])


def test_several_results_and_static_arguments() -> None:
    @jscaler.op("n (h d) -> n h d, n h")
    def heads(x: Any, *, h: int, scale: float = 1.0) -> Any:
        y = x.reshape(x.shape[0], h, -1) * scale
        return y, y.sum(-1)

    y, total = jax.jit(lambda x: heads(x, h=3, scale=2.0))(jnp.ones((2, 12)))
    assert y.shape == (2, 3, 4)
    np.testing.assert_allclose(total, 8)
    with pytest.raises(TypeError, match="'heads': arrays go by position; keyword arguments are static and hashable"):
        heads(jnp.ones((2, 12)), h=3, scale=jnp.ones(3))


def test_errors_name_the_function_the_operand_and_the_sizes() -> None:
    with pytest.raises(RuleError, match="'project': factor 'h' has size 4 at operand 0, dim 2 and 5 at operand 1, dim 0"):
        project(x, kernel.T)
    with pytest.raises(RuleError, match="'project' has 1 operands and the rule has 2"):
        project(x)
    cut = jscaler.op("n -> n")(lambda x: x[1:])
    with pytest.raises(RuleError, match="factor 'n' has size 4 at operand 0, dim 0 and 3 at result 0, dim 0"):
        jax.jit(cut)(jnp.ones(4))
    with pytest.raises(RuleError, match="'<lambda>': result 0 has shape"):
        jscaler.op("n ->")(lambda x: x)(jnp.ones(4))  # outside of jit too
    with pytest.raises(TypeError, match=r"'project': argument 1 is a str, and no array: .* static values by keyword"):
        project(x, "kernel")
    for value in (None, {"y": 1}):
        with pytest.raises(TypeError, match=f"result 0 is a {type(value).__name__}, and no array"):
            jscaler.op("n -> n")(lambda x, value=value: value)(jnp.ones(4))


def test_a_traced_value_that_is_no_argument_is_refused() -> None:
    def loss(k: Any) -> Any:
        return jscaler.op("b s h -> b s o")(lambda x: x @ k)(x).sum()

    with pytest.raises(CaptureError, match=r"reads a traced value f.*\[4,5\] that is not an argument"):
        jax.jit(loss)(kernel)


def policy(path: str, *factors: str, parts: int = 2) -> Callable[..., Any]:
    def split(graph: Any, devices: np.ndarray) -> None:
        cells = graph.op_trans(graph.select(path)[0], *(Split(f, parts) for f in factors))
        graph.op_assign(cells, devices.reshape((parts,) * len(factors)))

    return split


def test_it_is_one_op_whose_factors_are_the_words() -> None:
    with jax.enable_x64(True):
        step = jscaler.parallelize("single", devices=1)(attention_step(attend_op))
        graph = step.graph(make_params(rng), rng.normal(size=(2, 4, 6)))
    (op,) = graph.select("*attend")
    assert op.body is not None
    assert [e.primitive.name for e in op.body.jaxpr.eqns] == ["jscaler_op"]
    assert str(graph.rule(op)) == "b s h d, b t h d, b t h d -> b s h d"
    assert graph.rule(op).factors["t"].reason == "at attend its rule says that it cannot be split"


@losing
@pytest.mark.parametrize(("factors", "devices"), of_the_day([(("h",), 4), (("s",), 2), (("b", "h"), 4)], 2))
@pytest.mark.parametrize("mode", ["saved", "inputs"])
def test_split_it_gives_one_device_s_numbers(factors: tuple[str, ...], devices: int, mode: Any) -> None:
    split = policy("*attend", *factors, parts=devices if len(factors) == 1 else 2)

    def whole(graph: Any, places: np.ndarray) -> None:
        graph.residuals(graph.select("*attend")[0], mode)
        split(graph, places)

    with jax.enable_x64(True):
        params, tokens = make_params(np.random.default_rng(0)), np.random.default_rng(1).normal(size=(2, 4, 6))
        expected = jax.jit(attention_step(attend))(params, tokens)
        lowered = jscaler.parallelize(whole, devices=devices)(attention_step(attend_op)).lower(params, tokens)
        jscaler.verify(lowered)
        ours = lowered.compile()(params, tokens)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def train(fun: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        value, grads = jscaler.value_and_grad(lambda p: (fun(x, p["kernel"]) ** 2).mean())(params)
        return {"kernel": params["kernel"] - grads["kernel"]}, value

    return step


@pytest.mark.parametrize(
    ("fun", "factor"),
    [
        (project, "h"),
        (project, "o"),
        (jscaler.op("b s h, h o -> b s o", linear="each")(plain), "h"),
        # the mask that it reads is made of nothing, and copied into its op
        (
            lambda x, k: jscaler.op("b s h, h o, s -> b s o")(lambda x, k, m: x @ k * m[:, None])(
                x, k, jnp.arange(4.0) % 3
            ),
            "s",
        ),
        # one array as two operands: its gradients add up
        (lambda x, k: jscaler.op("b s h, h o, h o -> b s o")(lambda x, k, w: x @ (k * w))(x, k, k), "o"),
        # a keyword with a factor's name is the part's size
        (
            lambda x, k: jscaler.op("b s h, h (g e) -> b s g e")(
                lambda x, k, *, g: jnp.einsum("bsh,hge->bsge", x, k.reshape(k.shape[0], g, -1))
            )(x, k, g=2).reshape(2, 4, 6),
            "g",
        ),
    ],
)
def test_a_product_split_along_each_kind_of_factor(fun: Callable[..., Any], factor: str) -> None:
    local = np.random.default_rng(5)
    with jax.enable_x64(True):
        params, data = {"kernel": local.normal(size=(4, 6))}, local.normal(size=(2, 4, 4))
        expected = jax.jit(train(fun))(params, data)

        def split(graph: Any, devices: np.ndarray) -> None:
            (op,) = (o for o in graph.forward() if [e.primitive.name for e in o.body.jaxpr.eqns][-1] == "jscaler_op")
            graph.op_assign(graph.op_trans(op, Split(factor, 2)), devices)

        ours = jscaler.parallelize(split, devices=2)(train(fun))(params, data)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_a_part_of_another_shape_than_the_rule_says_is_an_error() -> None:
    lying = jscaler.op("b s h, h o -> b s o")(lambda x, k: jnp.broadcast_to((x @ k)[:1], (2, *x.shape[1:2], k.shape[1])))
    with pytest.raises(RuleError, match=r"result 0 of a part of '<lambda>' has shape \(2, 4, 6\), and the rule says"):
        jscaler.parallelize(policy("*lambda>", "b"), devices=2)(train(lying)).lower(
            {"kernel": np.ones((4, 6), np.float32)}, np.ones((2, 4, 4), np.float32)
        )


def test_a_function_that_fails_at_part_shapes_is_named() -> None:
    square = jscaler.op("b h -> b h")(lambda x: x @ jnp.ones((4, 4)))

    def policy(graph: Any, devices: np.ndarray) -> None:
        (op,) = (op for op in graph.ops if op.name == "<lambda>")
        graph.op_assign(graph.op_trans(op, Split("h", 2)), devices)

    with pytest.raises(
        RuleError, match=r"'<lambda>' fails on parts of shapes \[2, 2\] \('h' in 2 parts\): .*; it must work at"
    ):
        jscaler.parallelize(policy, devices=2)(square).lower(jnp.ones((2, 4)))
