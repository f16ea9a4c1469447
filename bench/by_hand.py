"""What a plan is measured against: co-shard of a GPT's layers and accumulation of gradients, written by hand in JAX.

Co-shard runs the heads of an attention and the hidden units of an MLP in groups, one after another on one device: a
``lax.scan`` over groups of the weights, each computed again in the backward pass. (Lin et al., SuperScaler, 2023.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Weights = dict[str, Any]


def layer(params: Weights, x: jax.Array, parts: int) -> jax.Array:  # b s d -> b s d
    """`models.gpt.Block` without dropout, by the parameters of one, in ``parts`` groups of heads and of hidden units."""
    attention, mlp = params["attn"], params["mlp"]
    inward = [attention[name][what] for name in ("query", "key", "value") for what in ("kernel", "bias")]
    heads = in_parts(_heads, parts, [1, 0] * 3 + [0], _norm(params["norm1"], x), [*inward, attention["out"]["kernel"]])
    x = x + heads + attention["out"]["bias"]
    weights = [mlp["up"]["kernel"], mlp["up"]["bias"], mlp["down"]["kernel"]]
    return x + in_parts(_hidden, parts, [1, 0, 0], _norm(params["norm2"], x), weights) + mlp["down"]["bias"]


def in_parts(
    fun: Callable[..., jax.Array], parts: int, dims: Sequence[int], x: jax.Array, weights: Sequence[jax.Array]
) -> jax.Array:
    """The sum of ``fun(x, *part)`` over ``parts`` parts of the weights, each cut along its dim."""

    def cut(weight: jax.Array, dim: int) -> jax.Array:
        shape = weight.shape
        return jnp.moveaxis(weight.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]), dim, 0)

    again = jax.checkpoint(lambda total, part: (total + fun(x, *part), None), prevent_cse=False)
    groups = [cut(weight, dim) for weight, dim in zip(weights, dims, strict=True)]
    return jax.lax.scan(again, jnp.zeros_like(x), groups)[0]


def _norm(params: Weights, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(-1, keepdims=True)
    scaled = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean) + 1e-6) * params["scale"]
    return ((wide - mean) * scaled + params["bias"]).astype(x.dtype)


def _heads(x: jax.Array, *weights: jax.Array) -> jax.Array:
    wq, bq, wk, bk, wv, bv, out = weights
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) + b for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
    scores = scores.astype(jnp.promote_types(x.dtype, jnp.float32))
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores).astype(x.dtype), v)
    return jnp.einsum("bshk,hkd->bsd", mixed, out)


def _hidden(x: jax.Array, up: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ up + bias) @ down


def accumulated(
    loss_fn: Callable[[Any, Any], jax.Array], microbatches: int, params: Any, batch: Any, dtype: Any = jnp.float32
) -> tuple[jax.Array, Any]:
    """Mean loss and gradients over equal micro-batches, one after another: sums in ``dtype``, carried by a scan."""

    def add(sums: Any, rows: Any) -> tuple[Any, None]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, rows)
        return jax.tree.map(lambda s, g: s + g.astype(s.dtype) / microbatches, sums, (loss, gradients)), None

    def zeros(p: jax.Array) -> jax.Array:
        return jnp.zeros(p.shape, jnp.promote_types(p.dtype, dtype))

    cut = jax.tree.map(lambda a: a.reshape(microbatches, a.shape[0] // microbatches, *a.shape[1:]), batch)
    (loss, gradients), _ = jax.lax.scan(add, (jnp.zeros((), dtype), jax.tree.map(zeros, params)), cut)
    return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)
