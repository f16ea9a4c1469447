"""Functions with rules, and a step around one of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler

Array = Any


@jscaler.op("b s h, h o -> b s o")
def project(x: Array, kernel: Array) -> Array:
    return x @ kernel


def scores(q: Array, k: Array) -> Array:
    return jnp.einsum("bshd,bthd->bhst", q, k)


@jax.custom_vjp
def attend(q: Array, k: Array, v: Array) -> Array:
    """Its primal is a softmax; what its derivative runs forward is not, and hands out the log-sum-exp too."""
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores(q, k)), v)


def attend_forward(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    s = scores(q, k)
    lse = jnp.log(jnp.sum(jnp.exp(s), -1))
    out = jnp.einsum("bhst,bthd->bshd", jnp.exp(s - lse[..., None]), v)
    return out, (q, k, v, out, lse)


def attend_backward(saved: Any, dout: Array) -> tuple[Array, ...]:
    q, k, v, out, lse = saved
    p = jnp.exp(scores(q, k) - lse[..., None])
    ds = p * (scores(dout, v) - jnp.einsum("bshd,bshd->bhs", dout, out)[..., None])
    return (
        jnp.einsum("bhst,bthd->bshd", ds, k),
        jnp.einsum("bhst,bshd->bthd", ds, q),
        jnp.einsum("bhst,bshd->bthd", p, dout),
    )


attend.defvjp(attend_forward, attend_backward)
attend_op = jscaler.op("b s h d, b t h d, b t h d -> b s h d", blocked="t d")(attend)


@jax.custom_vjp
def wrong(x: Array) -> Array:
    """tanh, with a derivative that is wrong on purpose, so that one can see that it is kept."""
    return jnp.tanh(x)


wrong.defvjp(lambda x: (jnp.tanh(x), (jnp.cos(x), x)), lambda saved, g: (100 * g * saved[0] + saved[1],))
wrong_op = jscaler.op("... -> ...")(wrong)


def make_params(rng: np.random.Generator, dtype: Any = np.float64) -> dict[str, Any]:
    shapes = {"q": (6, 4, 2), "k": (6, 4, 2), "v": (6, 4, 2), "o": (4, 2, 6)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def attention_step(attention: Callable[..., Array]) -> Callable[..., Any]:
    """Gradient descent on projections around ``attention``; ops dot, dot.1, dot.2, the attention, dot.3."""

    def loss(params: dict[str, Array], x: Array) -> Array:
        q, k, v = (jnp.einsum("bsm,mhd->bshd", x, params[n]) for n in "qkv")
        return (jnp.einsum("bshd,hdm->bsm", attention(q, k, v), params["o"]) ** 2).mean()

    def step(params: dict[str, Array], x: Array) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    return step
