"""Steps of every shape that people write: under ``single`` and ``data_parallel`` they give ``jax.jit``'s numbers."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day

import jscaler

PARAMS = {"w": jax.random.normal(jax.random.key(0), (4, 4)) / 2, "b": jnp.zeros(4)}
BATCH = jax.random.normal(jax.random.key(1), (8, 4))


def predict(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"])


def descend(p: Any, g: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g)


def scalar_used_before_and_after(params: Any, batch: Any) -> Any:
    weight = jnp.sin(params["b"].sum() + 1)
    loss, grads = jscaler.value_and_grad(lambda p: (predict(p, batch) * weight).mean())(params)
    return descend(params, grads), {"loss": loss, "weight": jnp.sqrt(jnp.abs(weight))}


def loss_without_equations(params: Any, batch: Any) -> Any:
    loss, grad = jscaler.value_and_grad(lambda s: s)(batch.mean())
    constant, zeros = jscaler.value_and_grad(lambda p: jnp.float32(1.0))(params)
    return descend(params, zeros), loss - grad, constant


def flag_in_the_loss(params: Any, batch: Any) -> Any:
    def loss(p: Any, x: jax.Array, train: bool) -> jax.Array:
        return (predict(p, x) * 2 if train else predict(p, x)).sum()

    return descend(params, jscaler.grad(loss)(params, batch, True))


def microbatches_by_hand(params: Any, batch: Any) -> Any:
    micro = batch.reshape(2, 4, 4)
    total = jax.tree.map(jnp.zeros_like, params)
    for i in range(2):
        grads = jscaler.grad(lambda p, i=i: predict(p, micro[i]).mean())(params)
        total = jax.tree.map(jnp.add, total, grads)
    return descend(params, total)


def gradients_come_first(params: Any, batch: Any) -> Any:
    loss, grads = jscaler.value_and_grad(lambda p: (predict(p, batch) ** 2).mean())(params)
    return grads, descend(params, grads), loss


def metrics_and_counts(params: Any, batch: Any) -> Any:
    labels = jnp.arange(8) % 4

    def loss(p: Any) -> Any:
        logits = predict(p, batch)
        mask = batch[:, 0] > 0
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(mask, each, 0).sum() / mask.sum(), logits

    (value, logits), grads = jscaler.value_and_grad(loss, has_aux=True)(params)
    return descend(params, grads), value, (logits.argmax(-1) == labels).mean(), jax.lax.top_k(logits, 2)


def two_players(params: Any, batch: Any) -> Any:
    first = descend(params, jscaler.grad(lambda p: (predict(p, predict(p, batch)) ** 2).mean())(params))
    loss, second = jscaler.value_and_grad(lambda p: predict(p, predict(first, batch)).mean())(params)
    return first, descend(params, second), loss


def moving_average(params: Any, batch: Any) -> Any:
    grads = jscaler.grad(lambda p: (predict(p, batch) - predict(params, batch) / 2).sum())(params)
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, params, descend(params, grads))


def loops_and_branches(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x, seen = jax.lax.scan(lambda c, _: (predict(p, c), c.sum()), batch, length=3)
        x = jax.lax.cond(seen.sum() > 0, lambda v: v * 2, lambda v: v - 1, x)
        return (jnp.sort(x, 0) * jnp.cumsum(x, 0)).mean()

    return descend(params, jscaler.grad(loss)(params))


def empty_arrays(params: Any, batch: Any) -> Any:
    nothing = jnp.zeros((8, 0, 4)) * batch[:, None]
    return nothing.reshape(8, 4, 0), nothing.reshape(-1, 2).sum() + batch.sum()


def batch_statistics(params: Any, batch: Any) -> Any:
    net = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False), nn.Dense(4)])
    variables = net.init(jax.random.key(0), jnp.zeros((2, 4)))

    def loss(p: Any) -> Any:
        out, new = net.apply({"params": p, "batch_stats": variables["batch_stats"]}, batch, mutable=["batch_stats"])
        return (out**2).mean(), new

    (value, new), grads = jscaler.value_and_grad(loss, has_aux=True)(variables["params"])
    return value, new, grads


def convolution(params: Any, batch: Any) -> Any:
    net = nn.Conv(3, (3,))
    kernel = net.init(jax.random.key(0), jnp.zeros((1, 4, 1)))
    return jscaler.value_and_grad(lambda k: (net.apply(k, batch[..., None]) ** 2).mean())(kernel)


def remat_and_custom_rules(params: Any, batch: Any) -> Any:
    @jax.custom_vjp
    def scale(x: jax.Array) -> jax.Array:
        return x * 2

    scale.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))  # not the true derivative: it must be kept
    layer = jax.checkpoint(lambda p, x: jax.nn.relu(scale(predict(p, x))))
    return jscaler.value_and_grad(lambda p: layer(p, layer(p, batch)).mean())(params)


STEPS = [
    scalar_used_before_and_after, loss_without_equations, flag_in_the_loss, microbatches_by_hand, gradients_come_first,
    metrics_and_counts, two_players, moving_average, loops_and_branches, empty_arrays, batch_statistics, convolution,
    remat_and_custom_rules,
]  # fmt: skip


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning", "ignore:nothing is split over 4:jscaler.PlanWarning")
@pytest.mark.filterwarnings("ignore:plan .*parallelism is lost:jscaler.PlanWarning")  # of sorts and empty arrays
@pytest.mark.parametrize("step", of_the_day(STEPS), ids=lambda f: f.__name__)
@pytest.mark.parametrize(("plan", "devices"), [("single", 1), ("data_parallel", 4)])
def test_same_numbers_as_jit(step: Callable[..., Any], plan: str, devices: int) -> None:
    ours = jscaler.parallelize(plan, devices=devices)(step)(PARAMS, BATCH)
    theirs = jax.jit(step)(PARAMS, BATCH)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_leaves_whose_paths_read_alike_are_kept_apart() -> None:
    def step(state: Any, batch: jax.Array) -> Any:
        return state["a"]["b"] * 2 + batch, state["a/b"] * 3

    state = {"a": {"b": jnp.ones(4)}, "a/b": jnp.full(4, 5.0)}
    ours = jscaler.parallelize("single", devices=1)(step)(state, jnp.ones(4))
    np.testing.assert_array_equal(ours, step(state, jnp.ones(4)))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_in_a_batch(impl: str) -> None:
    def step(batch: dict[str, jax.Array]) -> Any:
        folded = jax.vmap(jax.random.fold_in)(batch["key"], jnp.arange(8))
        drawn = jax.vmap(lambda k: jax.random.normal(jax.random.split(k)[1], (6,)))(folded)
        return drawn + batch["x"]

    batch = {"key": jax.random.split(jax.random.key(3, impl=impl), 8), "x": jnp.zeros((8, 6))}
    planned = jscaler.parallelize("data_parallel", devices=4)(step)
    if impl == "threefry2x32":
        planned.lower(batch)
    else:  # the bits of several keys are drawn by one op; what stands before and behind it is split
        with pytest.warns(jscaler.PlanWarning, match=r"1 op carries .*\n.*'loss/random_bits' is copied 4 times"):
            planned.lower(batch)
    np.testing.assert_array_equal(planned(batch), jax.jit(step)(batch))


def test_gradients_are_no_state() -> None:
    lowered = jscaler.parallelize("single", devices=1)(gradients_come_first).lower(PARAMS, BATCH)
    assert dict(lowered.graph.next_version) == {2: 0, 3: 1}


def test_a_finished_plan_is_checked_against_devices_and_shapes() -> None:
    plan = jscaler.parallelize("data_parallel", devices=4)(moving_average).lower(PARAMS, BATCH).plan.plan
    with pytest.raises(jscaler.DeviceError, match="the plan 'data_parallel' is for 4 devices, and 8 are given"):
        jscaler.parallelize(plan, devices=8)(moving_average)(PARAMS, BATCH)
    with pytest.raises(jscaler.PlanFitError, match="of size 6 into 4 parts; legal: 1, 2, 3, 6"):
        jscaler.parallelize(plan, devices=4)(moving_average)(PARAMS, BATCH[:6])
    again = jscaler.parallelize(plan, devices=4)(moving_average)(PARAMS, BATCH)
    np.testing.assert_allclose(again["w"], jax.jit(moving_average)(PARAMS, BATCH)["w"], rtol=1e-5)


@pytest.mark.parametrize(("plan", "devices"), [(3, None), ("single", "cpu"), ("single", 0), ("single", [])])
def test_plans_and_devices_that_are_none(plan: Any, devices: Any) -> None:
    with pytest.raises((jscaler.PlanError, jscaler.DeviceError)):
        jscaler.parallelize(plan, devices=devices)(moving_average)(PARAMS, BATCH)


@pytest.mark.filterwarnings("ignore:plan .*side effects of ops that are copied:jscaler.PlanWarning")
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
def test_an_effect_on_an_input_happens() -> None:
    seen: list[tuple[int, ...]] = []

    def step(batch: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(value.shape), batch)
        return batch.sum()

    assert jax.block_until_ready(jscaler.parallelize("data_parallel", devices=2)(step)(jnp.ones(4))) == 4
    jax.effects_barrier()
    assert seen == [(4,), (4,)]  # once on each device, with the whole value
