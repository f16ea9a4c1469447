"""Train steps of the models, written as for one device: what `jscaler train` runs."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state

import jscaler


class TrainState(train_state.TrainState):
    """Flax's train state with the key that dropout draws from."""

    key: jax.Array


def make_optimizer(learning_rate: float = 1e-3, warmup: int = 10, steps: int = 1000) -> optax.GradientTransformation:
    """Adam with decoupled weight decay, warm-up and cosine decay, behind a clip by global norm."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def make_state(
    model: nn.Module, tokens: int | Sequence[tuple[int, ...]], optimizer: optax.GradientTransformation,
    seed: int | jax.Array = 0,
) -> TrainState:  # fmt: skip
    """Fresh parameters and optimizer state.

    Args:
        tokens: how long a sequence is; or, of a model with several inputs of tokens, their shapes without the batch.
        seed: it may be a key.
    """
    init_key, dropout_key = jax.random.split(jax.random.key(seed) if isinstance(seed, int) else seed)
    shapes = [(tokens,)] if isinstance(tokens, int) else tokens
    params = jax.jit(model.init)(init_key, *(jnp.zeros((1, *shape), jnp.int32) for shape in shapes))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, key=dropout_key)


def balanced_train_step(
    state: TrainState, batch: dict[str, Any], value_and_grad: Callable[..., Any] = jscaler.value_and_grad
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`train_step` of a model that sows auxiliary losses (`models.moe`): they are trained on too, and returned beside."""
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        variables, rngs = {"params": params}, {"dropout": key}
        logits, sown = state.apply_fn(variables, batch["tokens"], train=True, rngs=rngs, mutable=["losses"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        auxiliary = sum(jax.tree.leaves(sown["losses"]))
        return loss + auxiliary, {"loss": loss, "auxiliary": jnp.asarray(auxiliary)}

    (_, metrics), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), metrics


def language_loss(apply_fn: Callable[..., Any], params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
    """The mean cross entropy of ``batch`` (tokens and labels, b s).

    Args:
        key: what dropout draws from; None for none.
    """
    rngs = None if key is None else {"dropout": key}
    logits = apply_fn({"params": params}, batch["tokens"], train=key is not None, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def translation_loss(apply_fn: Callable[..., Any], params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
    """The mean cross entropy of ``batch``: source b s, and tokens and labels b t, which are the target and what follows.

    Args:
        key: what dropout draws from; None for none.
    """
    rngs = None if key is None else {"dropout": key}
    logits = apply_fn({"params": params}, batch["source"], batch["tokens"], train=key is not None, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def evoformer_loss(apply_fn: Callable[..., Any], params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
    """Twice the cross entropy of masked tokens of an alignment, and 0.3 times that of pairs' distances.

    Args:
        batch: ``msa`` (b s i) with masked tokens, the ``target`` sequence (b i), ``labels`` (b s i) with what ``weights``
            (b s i; one in the mean) say that it is judged by, and ``distances`` (b i j) of pairs, as numbers of bins.
        key: what dropout draws from; None for none.
    """
    rngs = None if key is None else {"dropout": key}
    tokens, distances = apply_fn({"params": params}, batch["msa"], batch["target"], train=key is not None, rngs=rngs)
    of_tokens = optax.softmax_cross_entropy_with_integer_labels(tokens, batch["labels"])
    of_pairs = optax.softmax_cross_entropy_with_integer_labels(distances, batch["distances"])
    return 2 * jnp.mean(of_tokens * batch["weights"]) + 0.3 * jnp.mean(of_pairs)


def train_step_on(loss: Callable[..., jax.Array]) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """A train step on ``loss(apply_fn, params, batch, key)``, which is called with ``(state, batch)``.

    It returns the next state and the mean loss. As ``value_and_grad`` it takes JAX's own, too, for a baseline that owes
    nothing to jscaler.
    """

    def step(
        state: TrainState, batch: dict[str, Any], value_and_grad: Callable[..., Any] = jscaler.value_and_grad
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        value, grads = value_and_grad(lambda params: loss(state.apply_fn, params, batch, key))(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


train_step = train_step_on(language_loss)  # of models.gpt
translation_train_step = train_step_on(translation_loss)  # of models.mbart
evoformer_train_step = train_step_on(evoformer_loss)  # of models.evoformer, which recycles


def evaluation_of(loss: Callable[..., jax.Array]) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """The step of an evaluation on ``loss``, without dropout; it changes nothing."""
    return lambda state, batch: {"loss": loss(state.apply_fn, state.params, batch)}


def nnx_language_loss(model: Any, batch: Any) -> jax.Array:
    """The mean cross entropy of ``batch`` (tokens and labels, b s) by an nnx ``model``."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["labels"]).mean()


def nnx_train_step(
    state: tuple[Any, Any], batch: dict[str, Any], value_and_grad: Callable[..., Any] = jscaler.nnx.value_and_grad
) -> dict[str, jax.Array]:
    """One step of a state that is an nnx model and its ``nnx.Optimizer``: both are changed in place."""
    model, optimizer = state
    loss, grads = value_and_grad(nnx_language_loss)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss}


def nnx_evaluation(state: tuple[Any, Any], batch: dict[str, Any]) -> dict[str, jax.Array]:
    """The mean loss of ``batch``; it changes nothing."""
    return {"loss": nnx_language_loss(state[0], batch)}


class ImageState(train_state.TrainState):
    """Flax's train state with the running statistics of batch normalisation, if the model has any."""

    batch_stats: Any = struct.field(default_factory=dict)


def make_image_state(
    model: nn.Module, images: tuple[int, ...], optimizer: optax.GradientTransformation, seed: int | jax.Array = 0
) -> ImageState:
    """Fresh parameters, statistics and optimizer state for images of shape ``images`` (h w c); ``seed`` may be a key."""
    key = jax.random.key(seed) if isinstance(seed, int) else seed
    variables = jax.jit(model.init)(key, jnp.zeros((1, *images), jnp.float32))
    return ImageState.create(apply_fn=model.apply, tx=optimizer, **variables)


def image_train_step(
    state: ImageState, batch: dict[str, Any], value_and_grad: Callable[..., Any] = jscaler.value_and_grad
) -> tuple[ImageState, dict[str, jax.Array]]:
    """One step on ``batch`` (images b h w c, labels b); the next state has the statistics that this batch moved."""

    def loss_fn(params: Any) -> tuple[jax.Array, tuple[Any, jax.Array]]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, moved = state.apply_fn(variables, batch["images"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, (moved.get("batch_stats", {}), jnp.mean(jnp.argmax(logits, -1) == batch["labels"]))

    (loss, (batch_stats, accuracy)), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss, "accuracy": accuracy}


def image_evaluation(state: ImageState, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """The mean loss of ``batch`` and the share that is right, by the running statistics."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["images"], train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["labels"])}
