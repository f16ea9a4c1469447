"""Swin: windows, their shift and its mask, the table of relative positions; and its train step under plans."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from step_numbers import assert_step_like_jit

from models.swin import SIZES, Swin, SwinConfig, image, neighbours, offsets, windows
from models.training import image_train_step, make_image_state

TINY = SwinConfig(hidden=8, heads=4, depths=(2,), window=2, image=4, patch=1, classes=3)


def test_windows_of_an_image_and_back() -> None:
    x = jnp.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    cut = windows(x, 2)
    assert cut.shape == (2, 6, 4, 3)
    np.testing.assert_array_equal(cut[1, 4], x[1, 2:4, 2:4].reshape(4, 3))
    np.testing.assert_array_equal(image(cut, 2, 4), x)


def test_offsets_are_a_row_of_the_table_for_each_way_to_look() -> None:
    index = np.asarray(offsets(3))
    places = list(itertools.product(range(3), repeat=2))
    seen: dict[tuple[int, int], set[int]] = {}
    for (t, (y, x)), (s, (v, u)) in itertools.product(enumerate(places), repeat=2):
        seen.setdefault((y - v, x - u), set()).add(int(index[t, s]))
    assert all(len(rows) == 1 for rows in seen.values())
    assert sorted(row for rows in seen.values() for row in rows) == list(range(25))


@pytest.mark.parametrize(("rows", "columns", "window"), [(4, 4, 2), (8, 12, 4), (6, 6, 3)])
def test_shifted_windows_see_only_true_neighbours(rows: int, columns: int, window: int) -> None:
    """In a window of the rolled image, two patches may see each other if no roll has come between them."""
    y, x = (np.roll(at, (-(window // 2), -(window // 2)), (0, 1)) for at in np.mgrid[:rows, :columns])
    places = np.asarray(jax.jit(windows, static_argnums=1)(np.stack([y, x], -1)[None], window))[0]
    apart = np.abs(places[:, :, None] - places[:, None]).max(-1)
    np.testing.assert_array_equal(jax.jit(neighbours, static_argnums=(0, 1, 2))(rows, columns, window), apart < window)


@pytest.mark.one_day_in(2)
def test_a_plain_block_keeps_windows_apart_and_a_shifted_one_does_not() -> None:
    model = Swin(TINY)
    images = jax.random.normal(jax.random.key(0), (1, 4, 4, 3))
    params = jax.jit(model.init)(jax.random.key(1), images)

    def blocks(images: jax.Array) -> dict[str, Any]:
        _, seen = model.apply(params, images, capture_intermediates=True, mutable=["intermediates"])
        return seen["intermediates"]["stage_0"]["pair_0"]

    run = jax.jit(blocks)
    one, other = run(images), run(images.at[0, 0, 0].add(1))
    blocked = {name: (one[name]["__call__"][0], other[name]["__call__"][0]) for name in ("plain", "shifted")}
    moved = {name: np.asarray(jnp.any(a != b, -1))[0] for name, (a, b) in blocked.items()}
    np.testing.assert_array_equal(moved["plain"], np.pad(np.ones((2, 2), bool), (0, 2)))
    assert moved["shifted"].sum() > 4
    assert not moved["shifted"].all()


@pytest.mark.one_day_in(3)
def test_stacked_and_rematerialised_pairs_are_the_same_model() -> None:
    config = dataclasses.replace(SIZES["nano"], depths=(4,), image=16, window=2)
    images = jax.random.normal(jax.random.key(0), (1, 16, 16, 3))
    params = jax.jit(Swin(config).init)(jax.random.key(1), images)["params"]
    stage = params["stage_0"]
    pairs = jax.tree.map(lambda *p: jnp.stack(p), stage["pair_0"], stage["pair_1"])
    stacked = Swin(dataclasses.replace(config, stacked=True, remat=True))
    ours = jax.jit(stacked.apply)({"params": {**params, "stage_0": {"pairs": pairs}}}, images)
    np.testing.assert_allclose(ours, jax.jit(Swin(config).apply)({"params": params}, images), rtol=1e-5, atol=1e-5)


PLANS = [
    ("single", 1),
    ("data_parallel", 2),
    ("tensor_parallel", 2),
    ("co_shard(2, plan=tensor_parallel())", 2),
    ("co_shard(2, plan=megatron(dp=2, tp=2))", 4),
    ("pipeline(2, 2, plan=co_shard(2, plan=megatron(dp=2, tp=2)))", 8),
]


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(("plan", "devices"), of_the_day(PLANS, 3))
def test_train_step_under_a_plan(plan: str, devices: int) -> None:
    with jax.enable_x64(True):
        config = dataclasses.replace(TINY, dtype=jnp.float64, param_dtype=jnp.float64)
        state = make_image_state(Swin(config), (4, 4, 3), optax.sgd(0.1, momentum=0.9))
        images = jax.random.normal(jax.random.key(1), (8, 4, 4, 3), jnp.float64)
        assert_step_like_jit(image_train_step, state, {"images": images, "labels": jnp.arange(8) % 3}, plan, devices)
