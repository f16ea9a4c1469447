"""Causal attention in one kernel forwards and two backwards, by Pallas: the matrix of scores is never stored.

(Dao, FlashAttention-2, 2023, arXiv 2307.08691.) On a GPU Triton compiles the kernels; on CPU they are interpreted. What
lies above the diagonal is skipped block by block, which a kernel's loops do not show, so each says what it costs.

Shapes: b batch, s queries and keys, h heads, k head size. Scores, sums and accumulators are float32.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import jscaler
from jscaler.errors import DataError

BLOCK = 64  # queries of a program, and keys of a step of its loop


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _scores(q: jax.Array, k: jax.Array, above: Any) -> jax.Array:
    """Of a block of queries and one of keys that starts ``above`` rows further down the sequence."""
    rows, columns = jnp.arange(len(q))[:, None], jnp.arange(len(k))[None, :] + above
    return jnp.where(columns <= rows, _dot(q, k.T) / math.sqrt(q.shape[1]), -jnp.inf)


def _forward_kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, lse_ref: Any) -> None:
    block, i = q_ref.shape[0], pl.program_id(2)
    q = q_ref[...]

    def step(j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        keys = pl.ds(j * block, block)
        scores = _scores(q, k_ref[keys, :], (j - i) * block)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
        mixed = _dot(weights.astype(q.dtype), v_ref[keys, :])
        return new_top, total * shrink + weights.sum(axis=1), out * shrink[:, None] + mixed

    start = (jnp.full(block, -jnp.inf), jnp.zeros(block), jnp.zeros(q.shape, jnp.float32))
    top, total, out = jax.lax.fori_loop(0, i + 1, step, start)
    out_ref[...] = (out / total[:, None]).astype(q.dtype)
    lse_ref[...] = top + jnp.log(total)


def _keys_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, do_ref: Any, lse_ref: Any, delta_ref: Any, dk_ref: Any, dv_ref: Any
) -> None:
    block, j = k_ref.shape[0], pl.program_id(2)
    k, v = k_ref[...], v_ref[...]

    def step(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dk, dv = carry
        queries = pl.ds(i * block, block)
        q, do = q_ref[queries, :], do_ref[queries, :]
        weights = jnp.exp(_scores(q, k, (j - i) * block) - lse_ref[queries][:, None])
        dscores = weights * (_dot(do, v.T) - delta_ref[queries][:, None]) / math.sqrt(k.shape[1])
        return dk + _dot(dscores.astype(k.dtype).T, q), dv + _dot(weights.astype(k.dtype).T, do)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(j, q_ref.shape[0] // block, step, (zeros, zeros))
    dk_ref[...], dv_ref[...] = dk.astype(k.dtype), dv.astype(k.dtype)


def _queries_kernel(q_ref: Any, k_ref: Any, v_ref: Any, do_ref: Any, lse_ref: Any, delta_ref: Any, dq_ref: Any) -> None:
    block, i = q_ref.shape[0], pl.program_id(2)
    q, do, lse, delta = q_ref[...], do_ref[...], lse_ref[...], delta_ref[...]

    def step(j: Any, dq: jax.Array) -> jax.Array:
        keys = pl.ds(j * block, block)
        k = k_ref[keys, :]
        weights = jnp.exp(_scores(q, k, (j - i) * block) - lse[:, None])
        dscores = weights * (_dot(do, v_ref[keys, :].T) - delta[:, None]) / math.sqrt(q.shape[1])
        return dq + _dot(dscores.astype(q.dtype), k)

    dq_ref[...] = jax.lax.fori_loop(0, i + 1, step, jnp.zeros(q.shape, jnp.float32)).astype(q.dtype)


def _call(
    kernel: Callable[..., None], products: int, blocked: Sequence[bool], args: Sequence[jax.Array], outs: Sequence[Any]
) -> Any:
    """``kernel`` for every row, head and block.

    Args:
        products: matrix products of a block of queries and a block of keys.
        blocked: of each operand, and then of each result, whether a program sees its block alone.
    """
    b, s, h, d = args[0].shape
    block = min(BLOCK, s)
    if s % block:
        raise DataError(
            f"{s} tokens are no multiple of {block}, the kernel's block; pad the sequence, or leave flash=True out"
        )

    def spec(x: Any, alone: bool) -> pl.BlockSpec:
        if len(x.shape) == 4:  # b s h k
            return pl.BlockSpec((None, block if alone else s, None, d), lambda r, n, i: (r, i if alone else 0, n, 0))
        return pl.BlockSpec((None, None, block if alone else s), lambda r, n, i: (r, n, i if alone else 0))  # b h s

    specs = [spec(x, alone) for x, alone in zip((*args, *outs), blocked, strict=True)]
    pairs = s * (s + block) // 2  # of queries and keys in blocks that are not skipped
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*args, *outs))
    return pl.pallas_call(
        kernel,
        grid=(b, h, s // block),
        in_specs=specs[: len(args)],
        out_specs=specs[len(args) :],
        out_shape=list(outs),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * b * h * pairs * d, transcendentals=b * h * pairs, bytes_accessed=nbytes
        ),
        interpret=jax.default_backend() == "cpu",
        compiler_params=triton.CompilerParams(),
    )(*args)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    b, s, h, _ = q.shape
    outs = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((b, h, s), jnp.float32)]
    return _call(_forward_kernel, 2, (True, False, False, True, True), (q, k, v), outs)


@jax.custom_vjp
def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:  # b s h k, thrice -> b s h k
    return _forward(q, k, v)[0]


def _saving(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, lse = _forward(q, k, v)
    return out, (q, k, v, out, lse)


def _backward(saved: tuple[jax.Array, ...], do: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, out, lse = saved
    delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1).transpose(0, 2, 1)  # b h s
    args, like = (q, k, v, do, lse, delta), jax.ShapeDtypeStruct(q.shape, q.dtype)
    dk, dv = _call(_keys_kernel, 4, (False, True, True, False, False, False, True, True), args, [like, like])
    (dq,) = _call(_queries_kernel, 3, (True, False, False, True, True, True, True), args, [like])
    return dq, dk, dv


flash.defvjp(_saving, _backward)

attention = jscaler.op("b s h k, b s h k, b s h k -> b s h k", blocked="s k")(flash)
