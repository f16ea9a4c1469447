"""Accumulation by hand is the train step, and a plan can stand beside it."""

import jax
import numpy as np
import pytest

from bench import overhead
from models.gpt import SIZES, GPTConfig
from models.llama import SIZES as LLAMAS
from models.llama import LlamaConfig

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


@pytest.mark.one_day_in(3)
def test_a_state_in_nnx_is_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = LlamaConfig(hidden=8, layers=1, heads=2, groups=1, units=8, sequence=8)
    monkeypatch.setitem(LLAMAS, "tiny", tiny)
    row = overhead.measure("llama", "tiny", 8, rounds=2, repeats=1)
    assert row["case"] == "llama-tiny, plan single"
    assert row["flops_ratio"] <= 1.01


@pytest.mark.one_day_in(2)
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
