"""A cast of a summed gradient, last in a backward loop over layers, runs behind the loop: micro-batches keep one loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.ir import Graph


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64)


def of_a_stack(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> Any:
        return x + jnp.tanh(x @ wide(p["up"]) + wide(p["bias"])) @ wide(p["down"]), None

    return jax.lax.scan(layer, x, params["layers"])[0]


def shared_by_layers(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, up: jax.Array) -> Any:
        return jnp.tanh((x @ wide(up)) * wide(params["gain"])), None

    return jax.lax.scan(layer, of_a_stack(params, x), params["square"])[0]


def of_a_stack_of_stacks(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> Any:
        layers, square = p
        return of_a_stack({"layers": layers}, x @ wide(square)), None

    halves = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), params["layers"])
    return jax.lax.scan(layer, x, (halves, params["square"][:2]))[0]


def made(model: Callable[[Any, jax.Array], jax.Array]) -> tuple[Any, Any, jax.Array]:
    draws = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(draws.normal(size=shape) / 2, jnp.float32)

    layers = {"up": draw(4, 6, 8), "bias": draw(4, 8), "down": draw(4, 8, 6)}
    params = {"layers": layers, "square": draw(4, 6, 6), "gain": draw(6)}

    def step(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        return value_and_grad(lambda p: jnp.mean(model(p, x) ** 2))(params)

    return step, params, jnp.asarray(draws.normal(size=(8, 6)))


def over_microbatches(graph: Graph) -> list[str]:
    return [name for name, loop in graph.loops.items() if loop.time]


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("plan", ["accumulate(4, data_parallel('x'), batch='x')", "pipeline(2, 4, batch='x')"])
@pytest.mark.parametrize("model", [of_a_stack, shared_by_layers, of_a_stack_of_stacks])
def test_numbers_of_one_device_in_one_loop_over_microbatches(model: Any, plan: str) -> None:
    with jax.enable_x64(True):
        step, params, x = made(model)
        lowered = jscaler.parallelize(plan, devices=2)(step).lower(params, x)
        jscaler.verify(lowered)
        graph = lowered.plan.graph
        assert len(over_microbatches(graph)) == 1
        tails = [loop for name, loop in graph.loops.items() if name.endswith("/tail")]
        assert tails
        assert {x.slice.dtype.name for tail in tails for x in tail.xs} == {"float64"}, "summed before they are rounded"
        ours, theirs = lowered.compile()(params, x), jax.jit(lambda *a: step(*a, jax.value_and_grad))(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-8), ours, theirs)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(ours[1])} == {"float32"}
