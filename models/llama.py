"""Llama in Flax nnx: rotary positions, RMSNorm, SwiGLU, grouped queries, a tied head or its own. Reads bytes by default.

Shapes: b batch, s and t sequence, d hidden, h query heads, g key and value heads, r queries of one of these, k head size,
u hidden units of the MLP, v vocabulary.

Touvron et al., LLaMA, 2023, and Llama 2, 2023; Grattafiori et al., The Llama 3 Herd of Models, 2024; Su et al., RoFormer,
2021 (rotary positions); Shazeer, GLU Variants Improve Transformer, 2020; Ainslie et al., GQA, 2023.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.gpt_nnx import stacked


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama.

    ``groups`` is how many heads keys and values have. ``theta`` is the base of the rotary frequencies. A ``tied`` head is
    the embedding. ``stacked`` layers are one scan whose parameters have the layer as dim 0; ``remat`` computes each block
    again in the backward pass. ``dtype`` is what it computes in; parameters are ``param_dtype``.
    """

    hidden: int
    layers: int
    heads: int
    groups: int
    units: int
    sequence: int
    vocabulary: int = 256
    tied: bool = False
    theta: float = 5e5
    dtype: Any = None
    param_dtype: Any = jnp.float32
    stacked: bool = False
    remat: bool = False


# 7b and 13b are Llama 2, 8b and 70b Llama 3, 1b and 3b Llama 3.2: their published sizes.
SIZES = {
    "nano": LlamaConfig(hidden=64, layers=2, heads=4, groups=2, units=176, sequence=64),
    "mini": LlamaConfig(hidden=192, layers=6, heads=6, groups=2, units=512, sequence=128, tied=True),
    "1b": LlamaConfig(2048, 16, heads=32, groups=8, units=8192, sequence=8192, vocabulary=128256, tied=True),
    "3b": LlamaConfig(3072, 28, heads=24, groups=8, units=8192, sequence=8192, vocabulary=128256, tied=True),
    "7b": LlamaConfig(4096, 32, heads=32, groups=32, units=11008, sequence=4096, vocabulary=32000, theta=1e4),
    "8b": LlamaConfig(4096, 32, heads=32, groups=8, units=14336, sequence=8192, vocabulary=128256),
    "13b": LlamaConfig(5120, 40, heads=40, groups=40, units=13824, sequence=4096, vocabulary=32000, theta=1e4),
    "70b": LlamaConfig(8192, 80, heads=64, groups=8, units=28672, sequence=8192, vocabulary=128256),
}


def _kinds(config: LlamaConfig, rngs: nnx.Rngs) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}


def rotary(x: jax.Array, theta: float) -> jax.Array:  # b s h k -> b s h k
    """Turn each pair of a head's numbers by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        size = config.hidden // config.heads
        kinds = {"use_bias": False, **_kinds(config, rngs)}
        self.theta = config.theta
        self.query = nnx.LinearGeneral(config.hidden, (config.heads, size), **kinds)
        self.key, self.value = (nnx.LinearGeneral(config.hidden, (config.groups, size), **kinds) for _ in range(2))
        self.out = nnx.LinearGeneral((config.heads, size), config.hidden, axis=(-2, -1), **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        q, k, v = rotary(self.query(x), self.theta), rotary(self.key(x), self.theta), self.value(x)
        b, s, h, size = q.shape
        grouped = q.reshape(b, s, k.shape[2], -1, size)  # b s g r k
        scores = jnp.einsum("bsgrk,btgk->bgrst", grouped, k) / jnp.sqrt(size).astype(q.dtype)
        causal = jnp.tril(jnp.ones((s, s), bool))
        scores = jnp.where(causal, scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), -1e9)
        mixed = jnp.einsum("bgrst,btgk->bsgrk", nnx.softmax(scores).astype(q.dtype), v)
        return self.out(mixed.reshape(b, s, h, size))


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        kinds = {"use_bias": False, **_kinds(config, rngs)}
        self.gate = nnx.Linear(config.hidden, config.units, **kinds)
        self.up = nnx.Linear(config.hidden, config.units, **kinds)
        self.down = nnx.Linear(config.units, config.hidden, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(config.hidden, epsilon=1e-5, **_kinds(config, rngs))
        self.attn = Attention(config, rngs)
        self.norm2 = nnx.RMSNorm(config.hidden, epsilon=1e-5, **_kinds(config, rngs))
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nnx.Module):
    """Next-token logits, in float32 at least."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        kinds = _kinds(config, rngs)
        self.remat = config.remat
        self.embed = nnx.Embed(config.vocabulary, config.hidden, **kinds)
        self.blocks = layers_of(config, rngs)
        self.norm = nnx.RMSNorm(config.hidden, epsilon=1e-5, **kinds)
        self.head = None if config.tied else nnx.Linear(config.hidden, config.vocabulary, use_bias=False, **kinds)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # b s -> b s v
        x = self.norm(through(self.blocks, self.embed(tokens), self.remat))
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def layers_of(config: LlamaConfig, rngs: nnx.Rngs) -> Block | nnx.List:
    """The blocks, stacked as one or in a list."""
    block = functools.partial(Block, config)
    return stacked(block, config.layers, rngs) if config.stacked else nnx.List([block(rngs) for _ in range(config.layers)])


def through(blocks: Block | nnx.List, x: jax.Array, remat: bool) -> jax.Array:  # b s d -> b s d
    """Run all blocks, one after another."""
    layer = nnx.remat(_layer) if remat else _layer
    if isinstance(blocks, Block):
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)
    for block in blocks:
        x = layer(x, block)
    return x


def _layer(x: jax.Array, block: Block) -> jax.Array:
    return block(x)


def from_config(config: LlamaConfig) -> Callable[[nnx.Rngs], Llama]:
    return functools.partial(Llama, config)
