"""Training in few bits: the parameters that are trained, and their moments, stay in 32 (master weights).

A step casts the parameters for its loss. Where it differentiates says what the gradients are: with respect to the cast
parameters (``of="cast"``), they come in few bits, and are cast for the update; with respect to the master
(``of="master"``), the cast is part of the loss, and autodiff casts what comes back. In float16 the loss is scaled, so that
small gradients do not vanish, and a step whose gradients are not finite changes nothing but the scale.
(Micikevicius et al., Mixed Precision Training, ICLR 2018.)
"""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import dynamic_scale, train_state

import jscaler


class MasterState(train_state.TrainState):
    """Flax's train state, whose parameters are the master; ``scale`` is what float16 multiplies its loss with."""

    scale: dynamic_scale.DynamicScale | None = None


def classification_loss(apply_fn: Callable[..., Any], params: Any, batch: Any) -> jax.Array:
    """The mean cross entropy of what the model makes of ``batch["x"]``."""
    logits = jnp.asarray(apply_fn({"params": params}, batch["x"]))
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def make_master_state(
    model: nn.Module, example: Any, optimizer: optax.GradientTransformation, scale: float | None = None, seed: int = 0
) -> MasterState:
    """Fresh float32 parameters and moments.

    Args:
        model: computes in the dtype that its parameters have.
        example: what it is initialised with; a tuple, if that is more than one array.
        scale: the loss scale to start at; None for none.
    """
    params = jax.jit(model.init)(jax.random.key(seed), *(example if isinstance(example, tuple) else (example,)))["params"]
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    start = None
    if scale is not None:
        start = dynamic_scale.DynamicScale(scale=jnp.float32(scale), fin_steps=jnp.int32(0))  # type: ignore[arg-type]
    return MasterState.create(apply_fn=model.apply, params=params, tx=optimizer, scale=start)


def master_step(
    state: MasterState,
    batch: dict[str, Any],
    dtype: Any = jnp.bfloat16,
    of: Literal["cast", "master"] = "cast",
    factor: float = 1.0,
    loss: Callable[..., jax.Array] = classification_loss,
    value_and_grad: Callable[..., Any] = jscaler.value_and_grad,
) -> tuple[MasterState, dict[str, jax.Array]]:
    """One step on ``batch``; returns the next state and the mean loss.

    Args:
        dtype: of the parameters in the loss.
        of: what it differentiates with respect to.
        factor: of the loss, where the state has no scale of its own.
        loss: ``loss(apply_fn, params, batch)``, such as `models.training.translation_loss`.
    """
    times = factor if state.scale is None else state.scale.scale

    def loss_fn(params: Any) -> jax.Array:
        return loss(state.apply_fn, low(params, dtype), batch) * times

    value, grads = value_and_grad(loss_fn)(low(state.params, dtype) if of == "cast" else state.params)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype) / times, grads, state.params)
    done = state.apply_gradients(grads=grads)
    if state.scale is not None:
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        done = jax.tree.map(lambda new, old: jnp.where(finite, new, old), done, state)
        done = done.replace(scale=next_scale(state.scale, finite))
    return done, {"loss": value / times}


def low(params: Any, dtype: Any) -> Any:
    """``params`` in ``dtype``."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def next_scale(scale: dynamic_scale.DynamicScale, finite: jax.Array) -> dynamic_scale.DynamicScale:
    """The scale after a step: halved where a gradient was not finite, doubled after a run of steps in which all were."""
    grow = scale.fin_steps == scale.growth_interval
    larger = jnp.where(grow, scale.scale * scale.growth_factor, scale.scale)
    steps = jnp.where(grow | ~finite, 0, scale.fin_steps + 1)
    return scale.replace(scale=jnp.where(finite, larger, scale.scale * scale.backoff_factor), fin_steps=steps)
