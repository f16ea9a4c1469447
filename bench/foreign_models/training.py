"""What a foreign model brings along: a train step, its arguments, and how the state goes from one step to the next.

Momentum without clipping: a gradient that is n times too large shows, and no element's rounding is divided by itself.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from flax.training import train_state

# where a train step takes its gradients from, for the run that owes nothing to jscaler
PLAIN = types.SimpleNamespace(value_and_grad=jax.value_and_grad, nnx=nnx)
BATCH = 8


@dataclass(frozen=True)
class Foreign:
    """A model's train step.

    Attributes:
        step: of the module whose ``value_and_grad`` or ``nnx.value_and_grad`` it is to call, a train step.
        arguments: fresh ones.
        following: the arguments of the next call, of these and the result.
        state: the arrays that are trained or moved, of the arguments.
        jit: the plain decorator.
    """

    step: Callable[[Any], Callable[..., Any]]
    arguments: Callable[[], tuple[Any, ...]]
    following: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    state: Callable[[tuple[Any, ...]], Any]
    jit: Callable[..., Any]


class State(train_state.TrainState):
    """Flax's train state, the key that random layers draw from, and the variables that no gradient moves."""

    key: jax.Array
    rest: Any = struct.field(default_factory=dict)


def optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.05, momentum=0.9)


def linen_state(model: nn.Module, *inputs: Any, **keywords: Any) -> State:
    """A fresh state of ``model``, whose variables are made for ``inputs``."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = dict(jax.jit(functools.partial(model.init, **keywords))(keys, *inputs))
    params = variables.pop("params")
    return State.create(apply_fn=model.apply, params=params, tx=optimizer(), key=jax.random.key(2), rest=variables)


def trained(loss: Callable[..., Any], state: State, batch: Any) -> Foreign:
    """A model with ``loss(state, params, batch, key) -> (loss, rest)``; ``rest`` replaces the state's own."""

    def step(by: Any) -> Callable[..., Any]:
        def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
            key = jax.random.fold_in(state.key, state.step)
            (value, rest), grads = by.value_and_grad(lambda p: loss(state, p, batch, key), has_aux=True)(state.params)
            return state.apply_gradients(grads=grads, rest=rest), {"loss": value}

        return train_step

    return Foreign(
        step,
        arguments=lambda: (state, batch),
        following=lambda given, result: (result[0], *given[1:]),
        state=lambda given: (given[0].params, given[0].opt_state, given[0].rest),
        jit=jax.jit,
    )


def trained_nnx(loss: Callable[..., jax.Array], make: Callable[[nnx.Rngs], nnx.Module], batch: Any) -> Foreign:
    """An nnx model with ``loss(model, batch)``, which the step changes in place, and its optimizer with it."""

    def step(by: Any) -> Callable[..., Any]:
        def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, jax.Array]:
            value, grads = by.nnx.value_and_grad(loss)(model, batch)
            optimizer.update(model, grads)
            return {"loss": value}

        return train_step

    tx = optimizer()  # one: its functions are part of the tree of the arguments

    def arguments() -> tuple[Any, ...]:
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), batch

    return Foreign(
        step,
        arguments,
        following=lambda given, _: given,
        state=lambda given: (nnx.state(given[0], nnx.Not(nnx.RngState)), nnx.state(given[1])),
        jit=nnx.jit,
    )


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(*shape: int, below: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, below)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Of the values that count."""
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1)
