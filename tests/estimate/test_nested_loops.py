"""Loops in loops, as time axes make them: predicted memory against XLA's for a described GPU (marked ``aot``).

The carries are large: sums of gradients over micro-batches, the results of chunks of heads and hidden units.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from bench.predicted import OPTIONS
from jscaler.report.targets import described_devices

LAYERS, DIM, UNITS, BATCH, TOKENS = 4, 512, 2048, 8, 1024
Array = jax.Array
Layer = Callable[[Array, dict[str, Array]], Array]
Loss = Callable[[Any, Array], Array]


def whole(x: Array, p: dict[str, Array]) -> Array:
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def in_parts(parts: int) -> Layer:
    """Hidden units part by part, each computed again in the backward pass."""

    def layer(x: Array, p: dict[str, Array]) -> Array:
        up = jnp.moveaxis(p["up"].reshape(DIM, parts, UNITS // parts), 1, 0)
        down = p["down"].reshape(parts, UNITS // parts, DIM)

        @jax.checkpoint
        def part(sum: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
            return sum + jax.nn.gelu(x @ w[0]) @ w[1], None

        return x + jax.lax.scan(part, jnp.zeros_like(x), (up, down))[0]

    return layer


def stack(layer: Layer, remat: bool = False) -> Loss:
    def loss(params: Any, x: Array) -> Array:
        def body(x: Array, p: dict[str, Array]) -> tuple[Array, None]:
            return layer(x, p), None

        return (jax.lax.scan(jax.checkpoint(body) if remat else body, x, params)[0] ** 2).mean()

    return loss


def microbatches(count: int, inner: Loss) -> Loss:
    """The mean of ``inner`` over parts of the batch: its gradients are summed in carries of the backward loop."""

    def loss(params: Any, x: Array) -> Array:
        parts = x.reshape(count, BATCH // count, TOKENS, DIM)
        return jax.lax.scan(lambda total, part: (total + inner(params, part), None), jnp.float32(0), parts)[0] / count

    return loss


def accumulated(count: int, inner: Loss) -> Callable[[Any, Array], Any]:
    """The same by hand, gradients inside of the loop, which plans see as one op."""

    def gradients(params: Any, x: Array) -> Any:
        def one(sums: Any, part: Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.grad(inner)(params, part)), None

        start = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(one, start, x.reshape(count, BATCH // count, TOKENS, DIM))[0]

    return gradients


def of(loss: Loss) -> Callable[[Any, Array], Any]:
    return lambda params, x: jscaler.grad(loss)(params, x)


@pytest.mark.aot
@pytest.mark.parametrize(
    "gradients",
    [
        of(stack(whole, remat=True)),
        of(stack(in_parts(4))),
        of(microbatches(4, stack(whole))),
        of(microbatches(4, stack(in_parts(4), remat=True))),
        accumulated(4, stack(in_parts(4))),
    ],
    ids=["layers again", "layers × parts", "microbatches × layers", "microbatches × layers × parts", "by hand"],
)
def test_loops_in_loops_hold_what_xla_holds(gradients: Callable[[Any, Array], Any]) -> None:
    def step(state: Any, x: Array) -> Any:
        found = gradients(state["params"], x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], found)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}

    shapes = {"up": (LAYERS, DIM, UNITS), "down": (LAYERS, UNITS, DIM)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    state, x = {"params": params, "moments": params}, jax.ShapeDtypeStruct((BATCH, TOKENS, DIM), "float32")
    devices = described_devices("1xH100-80GB")
    lowered = jscaler.parallelize("single", devices=devices, donate_argnums=0)(step).lower(state, x)
    predicted = jscaler.cost(lowered, None, "1xH100-80GB").memory
    compiled = lowered.lowered.compile(compiler_options=OPTIONS).memory_analysis()
    beside = predicted.peak - predicted.arguments
    assert abs(beside / compiled.temp_size_in_bytes - 1) <= 0.15, (beside, compiled.temp_size_in_bytes)
