"""The train step of a language model: what `jscaler train` runs, written as for one device."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import jscaler


class TrainState(train_state.TrainState):
    """Flax's train state with the key that dropout draws from."""

    key: jax.Array


def make_optimizer(learning_rate: float = 1e-3, warmup: int = 10, steps: int = 1000) -> optax.GradientTransformation:
    """Adam with decoupled weight decay, warm-up and cosine decay, behind a clip by global norm."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def make_state(model: nn.Module, sequence: int, optimizer: optax.GradientTransformation, seed: int = 0) -> TrainState:
    """Fresh parameters and optimizer state."""
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    params = jax.jit(model.init)(init_key, jnp.zeros((1, sequence), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, key=dropout_key)


def train_step(
    state: TrainState, batch: dict[str, Any], value_and_grad: Callable[..., Any] = jscaler.value_and_grad
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step on ``batch`` (tokens and labels, b s); returns the next state and the mean loss.

    ``value_and_grad`` may be JAX's own, for a baseline that owes nothing to jscaler.
    """
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"], train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}
