"""A scan in a loss that counts data beside a loss: the counts have a scan of their own, in front."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.ir import Graph

ROWS, STEPS, DIM = 4, 3, 2


def graph_of(chunk: Callable[..., Any], init: Any) -> Graph:
    """Of the sum over chunks of a loss, by what is carried beside it."""

    def step(w: jax.Array, batch: Any) -> Any:
        def loss(w: jax.Array) -> Any:
            first, second = jax.lax.scan(lambda c, own: (chunk(w, c, own), None), init, (batch["x"], batch["labels"]))[0]
            return first / second.astype(jnp.float32)

        return jscaler.value_and_grad(loss)(w)

    batch = {"x": jnp.ones((STEPS, ROWS, DIM)), "labels": jnp.zeros((STEPS, ROWS), jnp.int32)}
    batch = {name: x.swapaxes(0, 1) for name, x in batch.items()}
    swapped = lambda w, batch: step(w, {name: x.swapaxes(0, 1) for name, x in batch.items()})  # noqa: E731
    return jscaler.parallelize("single", devices=1)(swapped).graph(jnp.ones((DIM, DIM)), batch)


def carried(graph: Graph) -> list[int]:
    """How many values each forward loop carries."""
    return [len(loop.carries) for loop in graph.loops.values() if loop.forward is None]


def counted(w: jax.Array, carry: Any, own: Any) -> Any:
    return carry[0] + (own[0] @ w).sum(), carry[1] + (own[1] == 0).sum()


def numbered(w: jax.Array, carry: Any, own: Any) -> Any:
    """The loss reads the count so far, and keeps it."""
    return carry[0] + (own[0] @ w).sum() * carry[1], carry[1] + (own[1] == 0).sum()


def learned(w: jax.Array, carry: Any, own: Any) -> Any:
    return carry[0] + (own[0] @ w).sum(), carry[1] + ((own[0] @ w) > 0).sum()


@pytest.mark.parametrize("chunk", [counted, jax.checkpoint(counted)], ids=["plain", "checkpoint"])
def test_a_count_has_a_scan_of_its_own(chunk: Callable[..., Any]) -> None:
    graph = graph_of(chunk, (0.0, 0))
    (count,) = (op for op in graph.ops if op.name == "scan")
    assert [t.name for t in count.inputs] == ["batch/labels"] or count.inputs[0].dtype == np.int32
    assert carried(graph) == [1]


def test_a_count_that_the_loss_reads_is_in_both() -> None:
    graph = graph_of(numbered, (0.0, 0))
    assert [op.name for op in graph.ops].count("scan") == 1
    assert carried(graph) == [2]


def test_a_count_of_what_the_model_makes_stays() -> None:
    graph = graph_of(learned, (0.0, 0))
    assert not [op for op in graph.ops if op.name == "scan"]
    assert carried(graph) == [2]
