"""What is the batch of a step that calls none of its inputs so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing

import jscaler
from jscaler import plans
from jscaler.plans.batch import batch_leaves
from jscaler.plans.batch_size import batch_size

PARAMS = {"w": jnp.ones((4, 4)) * 0.3, "b": jnp.zeros(4)}
X, Y = jax.random.normal(jax.random.key(0), (8, 4)), jnp.arange(8) % 4


def step_of(value_and_grad: Any) -> Any:
    def train(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> Any:
        def loss_of(p: Any) -> jax.Array:
            kept = jax.random.bernoulli(key, 0.8, images.shape)
            logits = (images * kept) @ p["w"] + p["b"]
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))

        loss, grads = value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    return train


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
@pytest.mark.parametrize("plan", ["data_parallel()", "zero3()", "accumulate(4)"])
def test_what_is_no_state_is_the_batch(plan: str, key: jax.Array) -> None:
    train = jscaler.parallelize(plan, devices=2)(step_of(jscaler.value_and_grad))
    graph = train.graph(PARAMS, X, Y, key)
    assert [t.name for t in batch_leaves(graph)] == ["images", "labels"]
    assert batch_size(graph) == 8
    want = jax.jit(step_of(jax.value_and_grad))(PARAMS, X, Y, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), train(PARAMS, X, Y, key), want)


def test_a_step_with_several_that_may_be_the_batch() -> None:
    def train(params: Any, images: jax.Array, queue: jax.Array) -> Any:
        loss, grads = jscaler.value_and_grad(lambda p: jnp.sum(images @ p["w"]) + jnp.sum(queue @ p["w"]))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    step = jscaler.parallelize(plans.data_parallel(), devices=2)(train)
    with pytest.raises(jscaler.UnknownNameError, match=r"known: images: f32\[8,4\], queue: f32\[6,4\]"):
        step(PARAMS, X, jnp.ones((6, 4)))
    named = jscaler.parallelize(plans.data_parallel("images"), devices=2)(train)
    assert np.isfinite(named(PARAMS, X, jnp.ones((6, 4)))[1])


def test_positions_and_what_is_said_of_words_are_no_batch() -> None:
    """Tokens' dim 1 is the positions', and a table's words are those of a parameter."""

    def train(params: Any, tokens: jax.Array, positions: jax.Array, weights: jax.Array) -> Any:
        def loss_of(p: Any) -> jax.Array:
            hidden = p["words"][tokens] + jnp.sin(positions)[:, None]
            logits = hidden @ p["words"].T * weights
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

        loss, grads = jscaler.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    given = {"words": jnp.ones((10, 4))}, jnp.ones((8, 6), jnp.int32), jnp.arange(6.0), jnp.ones(10)
    graph = jscaler.parallelize("single", devices=1)(train).graph(*given)
    assert [t.name for t in batch_leaves(graph)] == ["tokens"]
    assert batch_size(graph) == 8


def test_a_name_that_nothing_carries_is_no_default() -> None:
    step = jscaler.parallelize(plans.data_parallel("pictures"), devices=2)(step_of(jscaler.value_and_grad))
    with pytest.raises(jscaler.UnknownNameError, match=r"no input named 'pictures'.*known: images: f32\[8,4\], labels"):
        step(PARAMS, X, Y, jax.random.key(0))


def test_an_evaluation_tells_parameters_from_data_by_their_rows() -> None:
    run = jscaler.parallelize(plans.data_parallel(), devices=2)(lambda params, images: images @ params["w"] + params["b"])
    graph = run.graph({"w": jnp.ones((4, 6)), "b": jnp.ones(6)}, X)
    assert [t.name for t in batch_leaves(graph)] == ["images"]


@losing
def test_images_may_have_any_name() -> None:
    params = {"kernel": jax.random.normal(jax.random.key(1), (3, 3, 2, 2)), "bias": jnp.ones(2)}

    def conv(params: Any, pictures: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(pictures, params["kernel"], (1, 1), "SAME", dimension_numbers=dims)
        made = made + params["bias"]
        return jax.lax.reduce_window(made, -jnp.inf, jax.lax.max, (1, 8, 8, 1), (1, 8, 8, 1), "VALID")

    pictures = jax.random.normal(jax.random.key(2), (4, 8, 8, 2))
    for plan in (plans.spatial(), plans.spatial(grid=(2, 2)), plans.spatial(dp=2)):
        got = jscaler.parallelize(plan, devices=4)(conv)(params, pictures)
        np.testing.assert_allclose(got, conv(params, pictures), rtol=1e-5, atol=1e-5)


def test_labels_of_rows_behind_time_leave_the_batch_open() -> None:
    """Time comes first in the data, and labels have a row for each of the other dim."""

    def train(params: Any, sounds: jax.Array, labels: jax.Array) -> Any:
        def loss_of(p: Any) -> jax.Array:
            return ((jnp.tanh(sounds @ p["w"]).mean(0).sum(-1) - labels) ** 2).mean()

        loss, grads = jscaler.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    step = jscaler.parallelize(plans.data_parallel(), devices=2)(train)
    with pytest.raises(jscaler.UnknownNameError, match=r"known: sounds: f32\[6,8,4\], labels: f32\[8\]"):
        step({"w": PARAMS["w"]}, jnp.ones((6, 8, 4)), jnp.ones(8))
