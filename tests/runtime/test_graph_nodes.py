"""nnx objects as arguments of a step: their arrays are leaves, what the step changes comes back into the same objects."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from of_the_day import of_the_day
from step_numbers import assert_trees_close

import jscaler

X = jax.random.normal(jax.random.key(0), (8, 3))
PLANS = [("single", 1), ("data_parallel", 4)]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.up

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.again(self.drop(self.norm(jnp.tanh(self.up(x)))))


def make(optimizer: bool = True) -> Any:
    model = Net(nnx.Rngs(0))
    return (model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)) if optimizer else model


def step_with(nnx_grad: Any) -> Any:
    def train_step(model: Net, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        loss, grads = nnx_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return train_step


@pytest.mark.parametrize(("plan", "devices"), of_the_day(PLANS, 2))
@pytest.mark.parametrize("donate", [(), ("model", "optimizer")])
def test_a_train_step_changes_the_caller_s_objects_as_nnx_jit_does(plan: str, devices: int, donate: Any) -> None:
    ours, theirs = make(), make()
    step = jscaler.parallelize(plan, devices=devices, donate_argnames=donate)(step_with(jscaler.nnx.value_and_grad))
    expected = nnx.jit(step_with(nnx.value_and_grad))
    for _ in range(3):
        np.testing.assert_allclose(step(*ours, X), expected(*theirs, X), rtol=1e-5)
    assert_trees_close(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))
    assert ours[0].again is ours[0].up
    assert len(ours[0].up.kernel[...].sharding.device_set) == devices


def test_leaves_are_named_by_their_paths_and_state_is_what_changes() -> None:
    model, optimizer = make()
    lowered = jscaler.parallelize("single", devices=1)(step_with(jscaler.nnx.value_and_grad)).lower(model, optimizer, X)
    names = [t.name for t in lowered.graph.inputs]
    assert {"model/again/kernel", "model/norm/mean", "model/drop/rngs/count", "optimizer/opt_state/0/mu/norm/scale"} <= set(
        names
    )
    versions = {lowered.graph.output_names[o]: names[i] for o, i in lowered.graph.next_version.items()}
    assert all(new == old for new, old in versions.items())
    unchanged = set(names) - set(versions.values())
    assert unchanged == {"model/drop/rngs/key", "batch"}


def test_in_containers_and_by_keyword() -> None:
    @jscaler.parallelize("single", devices=1)
    def step(both: Any, scale: jax.Array) -> jax.Array:
        model, kept = both["objects"]
        model.bias[...] += scale
        return model(kept)

    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    step(scale=jnp.ones(()), both={"objects": (model, X)})
    np.testing.assert_array_equal(model.bias[...], 1)


def test_static_attributes_decide_about_recompilation() -> None:
    traced: list[bool] = []

    @jscaler.parallelize("single", devices=1)
    def forward(model: Net, batch: jax.Array) -> jax.Array:
        traced.append(model.drop.deterministic)
        return model(batch)

    model = make(optimizer=False)
    for mode in (model.train, model.eval, model.eval, model.train):
        mode()
        forward(model, X)
    assert traced == [False, True]


def test_a_shared_object_in_two_arguments_is_one() -> None:
    @jscaler.parallelize("single", devices=1)
    def step(second: nnx.Linear, first: nnx.Linear, batch: jax.Array) -> jax.Array:
        first.bias[...] += 1
        second.bias[...] += 2
        return second(batch)

    model, other = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2))
    step(model, model, X)
    np.testing.assert_array_equal(model.bias[...], 3)
    step(model, other, X)
    np.testing.assert_array_equal(model.bias[...], 5)
    np.testing.assert_array_equal(other.bias[...], 1)


def test_mistakes() -> None:
    def adds(model: Net, batch: jax.Array) -> jax.Array:
        model.extra = nnx.Param(batch)
        return batch

    with pytest.raises(jscaler.CaptureError, match="the step changes the structure of an nnx object"):
        jscaler.parallelize("single", devices=1)(adds)(make(optimizer=False), X)
    with pytest.raises(jscaler.CaptureError, match="holds an nnx Net deep inside a dict"):
        jscaler.parallelize("single", devices=1)(lambda tree: X)({"a": {"b": {"c": make(optimizer=False)}}})
    with pytest.raises(jscaler.CaptureError, match="'result' holds an nnx Net"):
        jscaler.parallelize("single", devices=1)(lambda model: model)(make(optimizer=False))
