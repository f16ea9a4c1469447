"""Planning puts off full collections of garbage, and leaves the collector as it was."""

import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler.collector import NEVER, no_full_collections

W, X = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ w)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Those of this process, others than Python's own."""
    before = gc.get_threshold()
    gc.set_threshold(650, 11, 9)
    yield 650, 11, 9
    gc.set_threshold(*before)


def test_plans_are_made_without_full_collections(thresholds: tuple[int, int, int]) -> None:
    seen: list[tuple[int, int, int]] = []

    def within(graph: Any, devices: Any) -> None:
        seen.append(gc.get_threshold())

    def policy(graph: Any, devices: Any) -> None:
        seen.append(gc.get_threshold())
        jscaler.parallelize(within, devices=2)(step).lower(W, X)
        seen.append(gc.get_threshold())  # a plan within a plan does not end it

    lowered = jscaler.parallelize(policy, devices=2)(step).lower(W, X)
    assert seen == [(650, 11, NEVER)] * 3
    assert gc.get_threshold() == thresholds
    jscaler.cost(lowered.captured.graph, within, "8xH100")
    assert seen[3:] == [(650, 11, NEVER)]
    assert gc.get_threshold() == thresholds


def test_the_collector_is_as_it_was_after_an_error(thresholds: tuple[int, int, int]) -> None:
    def policy(graph: Any, devices: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jscaler.parallelize(policy, devices=2)(step).lower(W, X)
    assert gc.get_threshold() == thresholds


def test_two_that_overlap_leave_it_as_it_was(thresholds: tuple[int, int, int]) -> None:
    first, second = no_full_collections(), no_full_collections()  # of two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


@pytest.mark.one_day_in(2)
def test_young_collections_go_on_and_full_ones_do_not() -> None:
    seen = {0: 0, 1: 0, 2: 0}

    def count(phase: str, info: dict[str, int]) -> None:
        seen[info["generation"]] += phase == "start"

    gc.collect()
    gc.callbacks.append(count)
    try:
        with no_full_collections():
            kept = [[] for _ in range(400_000)]  # enough for fifty of the middle generation
    finally:
        gc.callbacks.remove(count)
    assert len(kept) == 400_000
    assert seen[0] > 100
    assert seen[1] > 10
    assert seen[2] == 0
