"""Equal layers that are written out, as one: what is left is a graph whose dataflow is that of a chain."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler.estimate.prices.folded import folded
from jscaler.ir import Graph
from jscaler.stages import Captured

LAYERS = 7


def chain(state: Any, batch: Any, skip: bool = False, widths: bool = False) -> Any:
    """Layers of two products; with a tensor that a layer much later reads, or of unequal sizes."""

    def loss(params: Any) -> Any:
        hidden = batch @ params["first"]
        early = hidden
        for up, down in zip(params["up"], params["down"], strict=True):
            early, hidden = hidden, hidden + jnp.tanh(hidden @ up) @ down + (early if skip else 0.0)
        return jnp.mean((hidden @ params["last"]) ** 2)

    value, gradients = jscaler.value_and_grad(loss)(state)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / norm, state, gradients), value


def graph(skip: bool = False, widths: tuple[int, ...] = (16,) * LAYERS) -> Graph:
    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    state = {"first": of(4, 8), "last": of(8, 2), "up": [of(8, w) for w in widths], "down": [of(w, 8) for w in widths]}
    step = jscaler.parallelize("single")(lambda state, batch: chain(state, batch, skip))
    return step.graph(state, of(32, 4))


def test_one_layer_stands_for_many() -> None:
    long = graph()
    found = folded(Captured.of(long))
    short = found.graph
    assert len(short.ops) < len(long.ops)
    assert len(found.stands_for) == len(set(found.stands_for) - set(short.by_path) - {t.name for t in short.inputs})
    assert {*found.stands_for.values()} <= {*short.by_path} | {t.name for t in short.inputs}
    made = {*short.inputs, *(c for c, _ in short.constants), *(t for op in short.ops for t in op.outputs)}
    assert all(t in made for op in short.ops for t in op.inputs)
    position = {t: n for n, op in enumerate(short.ops) for t in op.outputs}
    assert all(position.get(t, -1) < n for n, op in enumerate(short.ops) for t in op.inputs)
    for kind in ("forward", "backward", "update"):  # each op of the long graph is counted once
        assert sum(map(found.count, short.of_kind(kind))) == len(long.of_kind(kind))
    arguments = sum(found.counts.get(t.name, 1) * t.nbytes for t in short.inputs)
    assert arguments == sum(t.nbytes for t in long.inputs)
    assert all(short.inputs[i].shape == short.outputs[o].shape for o, i in short.next_version.items())


@pytest.mark.parametrize("odd", [graph(skip=True), graph(widths=(16, 24) * 4), graph(widths=(16,) * 3)])
def test_what_is_no_chain_of_equal_layers_stays(odd: Graph) -> None:
    found = folded(Captured.of(odd))
    assert found.graph is odd
    assert not found.stands_for
    assert not found.counts


def test_runs_of_as_many_layers_are_told_apart() -> None:
    long = graph(widths=(16,) * LAYERS + (24,) * LAYERS)
    found = folded(Captured.of(long))
    of_run = {run: {op.path for op in found.graph.ops if found.run(op) == run} for run in set(found.runs.values())}
    assert len(of_run) == 2
    assert not set.intersection(*of_run.values())
    assert sum(map(found.count, found.graph.of_kind("backward"))) == len(long.of_kind("backward"))
