"""Forward passes as rows of units, for the tests of stages: small models, and a planner that has captured one."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler.ir import Nest
from jscaler.ir.loop import flat
from jscaler.plans.balance import Unit
from jscaler.primitives import Planner

Loss = Callable[[Any, Any], jax.Array]


def planner_of(loss: Loss, params: Any, batch: Any, devices: int = 8) -> Planner:
    """A planner of the step that takes the gradient of ``loss`` and goes down it."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = jscaler.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    return Planner(jscaler.parallelize("single", devices=1)(step).graph(params, batch), devices)


def units_of(graph: Planner) -> list[Unit]:
    """The forward pass: its ops, and the iterations of its loops."""
    units = []
    for item in graph.tree:
        if next(flat([item])).kind == "forward":
            count = item.loop.length if isinstance(item, Nest) else 1
            units += [Unit(item, i, count) for i in range(count)]
    return units


def shape(*dims: int) -> Any:
    return jax.ShapeDtypeStruct(dims, "float32")


def row_of(widths: Sequence[int], skips: Sequence[tuple[int, int]] = ()) -> tuple[Loss, Any]:
    """Products in a row, and what leaps over some: the loss, and the parameters. No op is called after its layer."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        values = [x]
        for number, w in enumerate(params):
            h = values[-1] @ w
            for start, stop in skips:
                if stop == number + 1:
                    h = h + values[start].sum()
            values.append(jnp.tanh(h))
        return values[-1].sum()

    return loss, [shape(a, b) for a, b in itertools.pairwise(widths)]


def draw_row(seed: int) -> tuple[Loss, Any, Any]:
    """Two to six products of random widths, and what leaps over some; the loss, the parameters and the batch.

    No tensor leaps twice, and the batch does not: what several ops read alike, or can make, would count nowhere.
    """
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 7))
    widths = [int(width) for width in rng.choice([8, 64, 512], layers + 1)]
    starts = [start for start in range(1, layers - 1) if rng.random() < 0.5]
    skips = [(start, int(rng.integers(start + 2, layers + 1))) for start in starts]
    loss, params = row_of(widths, skips)
    return loss, params, shape(256, widths[0])
