"""Backward ops read parameters through a fence, with their cotangents; nothing else of the graph changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler.capture.bodies import BodyTable
from jscaler.capture.refetch import REFETCHED, refetched
from jscaler.capture.residuals import with_backward_bodies
from tests.step_numbers import assert_step_like_jit


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


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("plan", of_the_day(["zero3()", "tensor_parallel()", "megatron(dp=2, tp=2, zero=3)"], 3))
def test_each_turn_fetches_for_itself(plan: str) -> None:
    """Chimera's micro-batches take turns on the groups; what they read lies in parts, or is a table that is read twice."""
    draws = np.random.default_rng(0)
    table = {"table": draws.normal(size=(16, 8))}
    params = table | {f"w{i}": draws.normal(size=(8, 8)) / 3 for i in range(4)}
    batch = {"tokens": draws.integers(0, 16, (8, 3)), "labels": draws.integers(0, 16, (8, 3))}

    def train_step(params: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        def loss(params: Any) -> jax.Array:
            x = jnp.asarray(params["table"])[batch["tokens"]]
            for i in range(4):
                with jax.named_scope(f"layer_{i}"):
                    x = jnp.tanh(x @ params[f"w{i}"])
            with jax.named_scope("head"):
                scores = jax.nn.log_softmax(x @ params["table"].T)
                return -jnp.take_along_axis(scores, batch["labels"][..., None], -1).mean()

        value, gradients = value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    devices = 8 if "megatron" in plan else 4
    assert_step_like_jit(train_step, params, batch, f"pipeline(2, 4, 'chimera', plan={plan})", devices, steps=1)
