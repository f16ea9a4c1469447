"""Backward ops read parameters through a fence, with their cotangents; nothing else of the graph changes."""

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler.capture.bodies import BodyTable
from jscaler.capture.refetch import REFETCHED, refetched
from jscaler.capture.residuals import with_backward_bodies


def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("up"):
            h = jnp.tanh(x @ params["up"])
        with jax.named_scope("down"):
            return (h @ params["down"]).sum()

    return jscaler.grad(loss)(params)


def test_backward_ops_read_through_a_fence() -> None:
    params = {"up": np.ones((4, 8), np.float32), "down": np.ones((8, 2), np.float32)}
    graph = jscaler.parallelize("single", devices=1)(step).graph(params, np.ones((3, 4), np.float32))
    whole = with_backward_bodies(graph, BodyTable())
    down = whole.input("params/down")
    made = refetched(whole, {down}, BodyTable())
    added = [op for op in made.ops if op.path not in whole.by_path]
    assert [op.anywhere for op in added] == ["fence"]
    readers = [op for op in made.ops if op.kind == "backward" and down in op.inputs]
    assert readers == added
    (reader,) = [op for op in made.ops if any(t.name.startswith(f"{down.name}{REFETCHED}") for t in op.inputs)]
    cotangents = {t for _, t in reader.cotangents}
    assert cotangents <= set(added[0].outputs)  # so that it waits for them
    assert dict(reader.saved).keys() <= set(added[0].outputs)
    assert [op.outputs for op in made.ops if op not in added] == [op.outputs for op in whole.ops]


def test_nothing_to_fetch() -> None:
    params = {"up": np.ones((4, 8), np.float32), "down": np.ones((8, 2), np.float32)}
    graph = jscaler.parallelize("single", devices=1)(step).graph(params, np.ones((3, 4), np.float32))
    assert refetched(graph, set(), BodyTable()) is graph
