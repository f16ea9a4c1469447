"""Spatial parallelism: one device's numbers for nets of convolutions, pooling and normalisation, forward and backward."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_steps import TX, Step, assert_same_numbers, collectives, made_once, planned, train_step

from jscaler.errors import PlanError, SplitError, UnknownNameError
from jscaler.plans import by_name, spatial
from models.convnet import ConvConfig, ConvNet
from models.training import ImageState, image_train_step

KINDS = {"dtype": jnp.float64, "param_dtype": jnp.float64}


@pytest.fixture(autouse=True)
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Windows(nn.Module):
    """Every way of looking at neighbours: strides, overlap, dilation, groups, a transposed convolution, pools in a row."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(4, (3, 3), name="plain", **KINDS)(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), padding="SAME")
        x = nn.avg_pool(x, (3, 3), (1, 1), padding="SAME")  # windows of windows: the op is cut between them
        x = nn.Conv(4, (3, 3), strides=2, name="strided", **KINDS)(x)
        x = nn.ConvTranspose(4, (3, 3), strides=(2, 2), name="transposed", **KINDS)(jnp.tanh(x))
        x = nn.Conv(4, (5, 5), kernel_dilation=2, feature_group_count=4, name="deep", **KINDS)(x)
        return nn.Dense(3, name="head", **KINDS)(x.mean((1, 2)))


@made_once
def windows(size: int = 16) -> tuple[Step, tuple[Any, Any]]:
    draws = np.random.default_rng(0)
    image = draws.normal(size=(2, size, size, 3))
    params = jax.eval_shape(Windows().init, jax.random.key(0), image, True)["params"]
    params = jax.tree.map(lambda p: jnp.asarray(draws.normal(size=p.shape) * 0.3, p.dtype), params)
    return train_step(Windows()), ({"params": params, "opt": TX.init(params)}, {"x": image, "labels": np.array([0, 2])})


@made_once
def normalised() -> tuple[Step, tuple[Any, Any]]:
    """Convolutions with batch normalisation, whose running statistics are state."""

    def step(state: Any, batch: Any) -> Any:
        net, metrics = image_train_step(state["net"], batch)
        return {"net": net}, metrics["loss"]

    draws = np.random.default_rng(0)
    images = draws.normal(size=(4, 8, 8, 3))
    model = ConvNet(ConvConfig(hidden=4, layers=2, image=8, classes=3, **KINDS))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    variables = jax.tree.map(lambda p: jnp.asarray(draws.uniform(0.1, 1, p.shape)), variables)
    state = ImageState.create(apply_fn=model.apply, tx=TX, **variables)
    return step, ({"net": state}, {"images": images, "labels": np.arange(4) % 3})


@pytest.mark.smoke
@pytest.mark.parametrize(("devices", "plan"), [(4, {}), (4, {"grid": (2, 2)}), (8, {"dp": 2, "grid": (2, 2)})], ids=str)
def test_windows(devices: int, plan: dict[str, Any]) -> None:
    assert_same_numbers(spatial("batch/x", **plan), windows, devices)


def test_statistics_over_space_are_one_device_s() -> None:
    assert_same_numbers(by_name("spatial(grid=(2, 2))"), normalised, 4)


def test_images_stay_where_they_are() -> None:
    """Edges travel, and sums over the image: gradients of parameters, and what the head reads."""
    plan = planned(spatial("batch/x", grid=(2, 2)), windows(), 4)
    assert {kind for kind, _ in collectives(plan)} == {"all_reduce"}
    assert all(len(tensor.shape) < 4 or "kernel" in tensor.name for _, tensor in collectives(plan))
    read = [task.tensor.name for task in plan.program.halos]
    assert read[0] == "batch/x"
    assert len(read) == len({(t.tensor, t.edges) for t in plan.program.halos}) >= 8
    assert "halo" in plan.explain()


def test_small_feature_maps_are_left_to_be_filled_in() -> None:
    """16 rows are 4 after two strides: on 8 devices those ops are copied."""
    plan = planned(spatial("batch/x"), windows(), 8)
    split = {path for path, laid in plan.completed.ops.items() if laid.placement.factors}
    assert "plain/conv" in split
    assert "strided/conv" not in split


@pytest.mark.parametrize(
    ("plan", "size", "error", "message"),
    [
        ({}, 20, SplitError, r"'batch/x' cannot split factor 'dim 1' of size 20 into 8 parts; legal: 1, 2, 4"),
        ({"image": "pixels"}, 16, UnknownNameError, r"no input named 'pixels'; pass spatial\(image=...\)"),
        ({"grid": (2, 2)}, 16, PlanError, r"spatial: .* is a grid of 4 devices, and 8 are given"),
        ({"grid": (1, 1, 1, 8)}, 16, PlanError, "'batch/x' of shape .* has no dim 4"),
    ],
)
def test_mistakes(plan: dict[str, Any], size: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(spatial(**{"image": "batch/x", **plan}), windows(size), 8)


def test_a_grid_has_parts() -> None:
    with pytest.raises(PlanError, match=r"grid is the numbers of parts of each spatial dim, e.g. \(2, 2\), not \(\)"):
        spatial(grid=())
