"""What factors are: dims of arguments and of parameters, beside the letters of each op's rule."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import Split, SplitError, UnknownNameError
from jscaler.ir import Graph

ROWS, LENGTH, WIDTH, HIDDEN, LAYERS = 4, 6, 8, 10, 3


def attend(params: Any, tokens: jax.Array) -> jax.Array:
    """Two layers with their own kernels, and a stack of layers."""
    x = params["table"][tokens]
    for number in range(2):
        with jax.named_scope(f"layer_{number}"):
            layer = params[f"layer_{number}"]
            with jax.named_scope("up"):
                h = jnp.tanh(x @ layer["up"]["kernel"])
            with jax.named_scope("down"):
                x = x + h @ layer["down"]["kernel"]
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["stack"])
    with jax.named_scope("attend"):
        return jnp.einsum("bsd,btd->bst", x, x)


def step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return (attend(params, batch["tokens"]) ** 2).mean()

    grads = jscaler.grad(loss)(params)
    norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    return jax.tree.map(lambda p, g: p - g / norm, params, grads)


def arguments() -> Any:
    shape = jax.ShapeDtypeStruct
    layer = {"up": {"kernel": shape((WIDTH, HIDDEN), "float32")}, "down": {"kernel": shape((HIDDEN, WIDTH), "float32")}}
    stack = shape((LAYERS, WIDTH, WIDTH), "float32")
    params = {"table": shape((32, WIDTH), "float32"), "layer_0": layer, "layer_1": layer, "stack": stack}
    return params, {"tokens": shape((ROWS, LENGTH), "int32")}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return jscaler.parallelize("single", devices=1)(step).graph(*arguments())


@pytest.mark.smoke
def test_factors_are_dims_of_arguments_and_else_of_parameters(graph: Graph) -> None:
    for layer in range(2):
        op = graph[f"layer_{layer}/up/dot"]
        assert str(graph.rule(op)) == "a b c, c d -> a b d"
        assert graph.factors_text(op) == "a=tokens[0] b=tokens[1] c=table[1] d=up.kernel[1]"
        assert graph.factors_text(op, ["d"]) == "d=up.kernel[1]"
    (inside,) = [op for op in graph.forward() if op.loop and op.name == "dot"]
    assert set(graph.named_factors[inside.path].values()) == {"tokens[0]", "tokens[1]", "table[1]"}


def test_a_backward_handle_has_its_forwards_names(graph: Graph) -> None:
    (op,) = [op for op in graph.forward() if op.path.startswith("attend/") and op.name == "dot"]
    assert sorted(graph.named_factors[op.path].values()) == ["table[1]", "tokens[0]", "tokens[1]"]
    assert op.backward is not None
    assert graph.named_factors[op.backward.path] == graph.named_factors[op.path]


def test_it_agrees_with_factor_of(graph: Graph) -> None:
    for dim in range(2):
        for op, factor in graph.factor_of("batch/tokens", dim).items():
            assert graph.named_factors[op.path][factor] == f"tokens[{dim}]", op.path


def test_gradients_are_of_their_parameters_dims(graph: Graph) -> None:
    sums = [op for op in graph.update() if op.name.startswith("reduce_sum")]
    names = {name for op in sums for name in graph.named_factors[op.path].values()}
    assert {"table[0]", "table[1]", "up.kernel[1]", "stack[0]"} <= names


def test_they_are_printed_and_told_in_errors(graph: Graph) -> None:
    told = "a=tokens[0] b=tokens[1] c=table[1] d=up.kernel[1]"
    (line,) = [line for line in str(graph).splitlines() if line.startswith("layer_1/up/dot ")]
    assert line.endswith(told)

    def policy(graph: Any, devices: np.ndarray) -> None:
        with pytest.raises(
            SplitError, match=r"split factor 'd' of size 10 into 3 parts; legal: 1, 2, 5, 10.*; 'd' is up.kernel\[1\]$"
        ):
            graph.op_trans("layer_0/up/dot", Split("d", 3))
        with pytest.raises(UnknownNameError) as caught:
            graph.op_trans("layer_0/up/dot", Split("z", 2))
        assert str(caught.value).endswith(f"known: a, b, c, d; they are {told}")
        for path, factor in (("layer_0/up/dot", "d"), ("layer_0/up/tanh", "c"), ("layer_0/down/dot", "c")):
            graph.op_assign(graph.op_trans(path, Split(factor, 2)), devices)

    plan = jscaler.parallelize(policy, devices=2)(step).lower(*arguments()).plan
    rows = [row for row in plan.report.ops if row.kind == "forward" and row.origin == "policy"]
    assert [row.factors for row in rows] == ["d=up.kernel[1]", "c=up.kernel[1]", "c=up.kernel[1]"]
    assert plan.explain(["ops"]).count("c=up.kernel[1]") >= 2
