"""Every set of splits of a dot and of a softmax over eight devices, nested in any order, on devices in any order."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import Replicate, Split

DEVICES = np.array([5, 2, 7, 0, 3, 6, 1, 4]).reshape(2, 2, 2)


def dots(x: jax.Array, w: jax.Array, count: int) -> list[jax.Array]:
    found = []
    for i in range(count):
        with jax.named_scope(f"op{i}"):
            found.append((x + i) @ w)
    return found


def softmaxes(x: jax.Array, w: jax.Array, count: int) -> list[jax.Array]:
    found = []
    for i in range(count):
        with jax.named_scope(f"op{i}"):
            y = jnp.exp((x * i) - (x * i).max(1, keepdims=True))
            found.append(y / y.sum(1, keepdims=True))
    return found


def policy(ways: Sequence[tuple[str, ...]]) -> Callable[[Any, np.ndarray], None]:
    """Op i is split by ``ways[i]``: three algorithms of two parts each, assigned whole or cell by cell."""
    rng = np.random.default_rng(0)

    def nested(graph: Any, devices: np.ndarray) -> None:
        for i, way in enumerate(ways):
            order = DEVICES.transpose(rng.permutation(3))
            for op in graph.select(f"op{i}/*", kind=None):
                has = graph.rule(op).factors
                algorithms = [Split(f, 2) if f in has and has[f].splittable else Replicate(2) for f in way]
                grid = graph.op_trans(op, *algorithms[:2])
                grid = graph.op_trans(grid, algorithms[2])  # a grid is split further
                if i % 3:
                    graph.op_assign(grid, order)
                    continue
                graph.op_assign(grid[1], order[1])
                for cell in np.ndindex(2, 2):
                    graph.op_assign(grid[(0, *cell)], int(order[(0, *cell)]))

    return nested


@pytest.mark.parametrize(("fun", "factors"), [(dots, "abc-"), (softmaxes, "ab-")], ids=["dot", "softmax"])
def test_every_set_of_factors(fun: Callable[..., Any], factors: str) -> None:
    """``-`` is a copy; ``a a a`` cuts one factor into eight, ``a - b`` copies between two factors."""
    rng = np.random.default_rng(1)
    ways = [tuple(rng.permutation(way).tolist()) for way in itertools.combinations_with_replacement(factors, 3)]
    with jax.enable_x64(True):
        x, w = (jax.random.normal(jax.random.key(i), (8, 8)) for i in (0, 1))

        def step(x: jax.Array, w: jax.Array) -> list[jax.Array]:
            return fun(x, w, len(ways))

        split = jscaler.parallelize(policy(ways), devices=8)(step)
        jscaler.verify(split.lower(x, w))
        for way, ours, theirs in zip(ways, split(x, w), step(x, w), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13, err_msg=str(way))
