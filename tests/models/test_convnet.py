"""The convolutional net: shapes, running statistics, and the train step under plans."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from step_numbers import assert_step_like_jit

from models.convnet import ConvConfig, ConvNet
from models.training import image_train_step, make_image_state

CONFIG = ConvConfig(hidden=4, layers=2, image=8, classes=3)


def batch_of(config: ConvConfig, size: int = 4) -> dict[str, jax.Array]:
    images = jax.random.normal(jax.random.key(1), (size, config.image, config.image, 3), config.dtype or jnp.float32)
    return {"images": images + 1, "labels": jnp.arange(size) % config.classes}


def test_each_stage_halves_the_image() -> None:
    model, batch = ConvNet(CONFIG), batch_of(CONFIG)
    variables = jax.jit(model.init)(jax.random.key(0), batch["images"])
    out, seen = model.apply(variables, batch["images"], capture_intermediates=True, mutable=["intermediates"])
    shapes = {k: v["__call__"][0].shape for k, v in seen["intermediates"].items() if k != "__call__"}
    assert shapes == {"stem": (4, 8, 8, 4), "down_1": (4, 2, 2, 8), "same_1": (4, 2, 2, 8), "head": (4, 3)}
    assert out.shape == (4, 3)


def test_statistics_are_those_of_the_whole_batch_and_image() -> None:
    model, batch = ConvNet(CONFIG), batch_of(CONFIG)
    variables = jax.jit(model.init)(jax.random.key(0), batch["images"])
    _, seen = model.apply(
        variables, batch["images"], train=True, capture_intermediates=True, mutable=["intermediates", "batch_stats"]
    )
    convolved = seen["intermediates"]["stem"]["conv"]["__call__"][0]
    moved = seen["batch_stats"]["stem"]["norm"]
    np.testing.assert_allclose(moved["mean"], 0.1 * convolved.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved["var"], 0.9 + 0.1 * convolved.var((0, 1, 2)), rtol=1e-4)


@pytest.mark.parametrize(
    ("plan", "devices", "dtype"), of_the_day([("single", 1, "float32"), ("data_parallel", 4, "float64")], 2)
)
def test_train_step_under_a_plan(plan: str, devices: int, dtype: Any) -> None:
    with jax.enable_x64(dtype == "float64"):
        kind = jnp.dtype(dtype)
        config = dataclasses.replace(CONFIG, dtype=kind, param_dtype=kind)
        state = make_image_state(ConvNet(config), (8, 8, 3), optax.sgd(0.1, momentum=0.9))
        stats = jax.tree.map(lambda x: x.astype(kind), state.batch_stats)
        assert_step_like_jit(image_train_step, state.replace(batch_stats=stats), batch_of(config), plan, devices)
