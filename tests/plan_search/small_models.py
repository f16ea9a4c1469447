"""Small train steps, and clusters whose links alone take time."""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from jscaler.clusters import Cluster
from jscaler.clusters.device import DEVICE_KINDS, Peak
from jscaler.clusters.link import Link
from jscaler.ir import Graph
from jscaler.spaces import any_split, one_of

FAST = dataclasses.replace(DEVICE_KINDS["A100-80GB"], reached=None, bandwidth=1e30, peak=Peak(*[1e30] * 7))
BETWEEN = 1e9


def links_alone(hosts: int, devices_per_host: int, between: float = BETWEEN, inside: float = 1e9) -> Cluster:
    """Bytes take time, and nothing else; ``between`` is the bandwidth that each device has to other hosts."""
    links = Link(1e-15, inside), Link(1e-15, between * devices_per_host)
    return Cluster("links alone", hosts, devices_per_host, *links, 1 << 50, FAST)


def graph_of(step: Any, *args: Any) -> Graph:
    return jscaler.parallelize("single", devices=1)(step).graph(*args)


def mlp(layers: int, batch: int, hidden: int) -> Graph:
    """Square layers without biases, as in Alpa's tests of its solver."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x - y) ** 2)

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, x, y)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    rows = jax.ShapeDtypeStruct((batch, hidden), jnp.float32)
    return graph_of(step, [jax.ShapeDtypeStruct((hidden, hidden), jnp.float32)] * layers, rows, rows)


def drawn(seed: int, most: int = 4) -> Graph:
    """A step of a few ops that are drawn: products with parameters and with each other, sums, what is read twice."""
    rng = random.Random(seed)
    rows, width = rng.choice([(12, 24), (48, 12), (24, 24)])
    kinds = [rng.choice(["dot", "dot", "tied", "turn", "gate", "norm"]) for _ in range(rng.randint(min(2, most), most))]

    def loss(params: Any, x: Any, y: Any) -> Any:
        first = x
        for number, kind in enumerate(kinds):
            w = params[0 if kind == "tied" else number]
            with jax.named_scope(f"op{number}"):
                if kind in ("dot", "tied"):
                    x = jnp.tanh(x @ w)
                elif kind == "turn":
                    x = (x.T @ first) @ w if x.shape[0] == first.shape[0] else x @ w
                    x = x[:rows] if x.shape[0] > rows else jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))
                elif kind == "gate":
                    x = x * (first @ w) + x
                else:
                    x = x / (1 + jnp.sum(x * x, axis=-1, keepdims=True))
        return jnp.mean((x - y) ** 2)

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, x, y)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    shape = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return graph_of(step, [jax.ShapeDtypeStruct((width, width), jnp.float32)] * len(kinds), shape, shape)


def splits_products(graph: Any, devices: Any) -> None:
    """Products are no copies; else a program that computes for nothing would copy all."""
    for op in graph.forward():
        graph.op_trans(op, any_split(copies="never" if "dot" in op.path else "any"))
    graph.shard("*", one_of(None, "zero1", "zero3"))
