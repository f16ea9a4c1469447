"""The chain as a whole: captured, planned, lowered and run, against ``jax.jit`` of the undecorated step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from of_the_day import of_the_day

import jscaler


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(16, name="up")(x))
        x = nn.Dropout(0.2, deterministic=False)(x)
        return nn.Dense(4, name="down")(x)


def make_state() -> TrainState:
    net = Net()
    params = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, 8)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx)


def make_batch() -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(2), (16, 8)), "y": jnp.arange(16) % 4}


def train_step(state: TrainState, batch: dict[str, jax.Array], key: jax.Array):
    key = jax.random.fold_in(key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jscaler.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("plan", "devices"), of_the_day([("single", 1), ("single", 4), ("data_parallel", 4), ("data_parallel", 8)], 2)
)
def test_three_steps_equal_one_device(plan: str, devices: int) -> None:
    key = jax.random.key(3)
    step = jscaler.parallelize(plan, devices=devices, donate_argnames="state")(train_step)
    reference = jax.jit(train_step)
    ours, theirs = make_state(), make_state()
    for _ in range(3):
        ours, metrics = step(ours, make_batch(), key)
        theirs, expected = reference(theirs, make_batch(), key)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
