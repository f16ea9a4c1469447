"""Accumulation by hand is the train step, and a plan can stand beside it."""

import jax
import numpy as np
import pytest

from bench import overhead
from models.gpt import SIZES, GPTConfig

OPTIONS = {"xla_backend_optimization_level": 0}  # nothing is timed


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", GPTConfig(hidden=8, layers=1, heads=2, sequence=8))


@pytest.mark.one_day_in(2)
def test_accumulation_by_hand_is_the_train_step() -> None:
    step, by_hand, make = overhead._accumulating("tiny", 8)
    arguments = make()
    losses = [
        jax.jit(fun).lower(*arguments).compile(OPTIONS)(*arguments)[1]["loss"]
        for fun in (lambda *xs: step(*xs, value_and_grad=jax.value_and_grad), by_hand)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_memory_row() -> None:
    row = overhead.accumulation_memory("tiny", "single", 8, jax.devices()[0], "cpu", OPTIONS)
    assert row["memory_ratio"] > 1  # of the whole batch
    assert row["bounds"] == {"memory_ratio": 1.02}


@pytest.mark.one_day_in(2)
def test_time_row() -> None:
    row = overhead.accumulation("tiny", "single", 8, rounds=2)
    assert row["case"] == "gpt-tiny, single against a scan by hand"
    assert row["time_ratio"] > 0
    assert row["flops_ratio"] == 1
