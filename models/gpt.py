"""GPT in Flax linen: pre-norm blocks, learned positions, plain attention, dropout. Reads bytes by default.

Shapes: b batch, s sequence, d hidden, h heads, k head size, v vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    ``dtype`` is what it computes in (parameters stay float32 unless ``param_dtype`` says so). ``stacked`` layers are one
    ``nn.scan`` whose parameters have the layer as dim 0; ``remat`` computes each block again in the backward pass.
    ``flash`` attention is one kernel (`models.flash`), whose weights no dropout can reach.
    """

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = 256
    dropout: float = 0.1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    stacked: bool = False
    remat: bool = False
    flash: bool = False


# The last four are those of SuperScaler's evaluation (32 V100): hidden, layers, heads.
SIZES = {
    "nano": GPTConfig(hidden=64, layers=2, heads=4, sequence=64),
    "mini": GPTConfig(hidden=192, layers=6, heads=6, sequence=128),
    "125m": GPTConfig(hidden=768, layers=12, heads=12, sequence=1024, vocabulary=51200),
    "1.3b": GPTConfig(hidden=2048, layers=24, heads=32, sequence=2048, vocabulary=51200),
    "2.6b": GPTConfig(hidden=2560, layers=32, heads=32, sequence=2048, vocabulary=51200),
    "6.7b": GPTConfig(hidden=4096, layers=32, heads=32, sequence=2048, vocabulary=51200),
    "15b": GPTConfig(hidden=5120, layers=48, heads=40, sequence=2048, vocabulary=51200),
}


class Attention(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:  # b s d -> b s d
        c = self.config
        heads = (c.heads, c.hidden // c.heads)
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        q, k, v = (nn.DenseGeneral(heads, name=name, **kinds)(x) for name in ("query", "key", "value"))  # b s h k
        if c.flash:
            from models.flash import attention  # Pallas, and jscaler's way to declare an op

            mixed = attention(q, k, v)
        else:
            mixed = plain_attention(q, k, v, nn.Dropout(c.dropout, deterministic=not train))
        return nn.DenseGeneral(c.hidden, axis=(-2, -1), name="out", **kinds)(mixed)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, drop: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Causal attention, (batch, sequence, heads, head size), whose weights ``drop`` thins out."""
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    causal = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    scores = jnp.where(causal, scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), -1e9)
    weights = drop(nn.softmax(scores).astype(q.dtype))
    return jnp.einsum("bhst,bthk->bshk", weights, v)


class MLP(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        kinds = {"dtype": self.config.dtype, "param_dtype": self.config.param_dtype}
        x = nn.Dense(4 * self.config.hidden, name="up", **kinds)(x)
        return nn.Dense(self.config.hidden, name="down", **kinds)(nn.gelu(x))


class Block(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:  # b s d -> b s d
        c = self.config
        norm = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        x = x + Attention(c, name="attn")(nn.LayerNorm(name="norm1", **norm)(x), train)
        y = MLP(c, name="mlp")(nn.LayerNorm(name="norm2", **norm)(x))
        return x + nn.Dropout(c.dropout, deterministic=not train)(y)


def blocks(config: GPTConfig, x: jax.Array, train: bool) -> jax.Array:  # b s d -> b s d
    """All blocks; called inside a compact method, whose submodules they become."""
    block = nn.remat(Block, static_argnums=(2,)) if config.remat else Block
    if not config.stacked:
        for i in range(config.layers):
            x = block(config, name=f"block_{i}")(x, train)
        return x
    over_layers = nn.scan(
        lambda layer, x, _: (layer(x, train), None),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=config.layers,
    )
    return over_layers(block(config, name="blocks"), x, None)[0]


class GPT(nn.Module):
    """Next-token logits, in float32 at least."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:  # b s -> b s v
        c = self.config
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        embed = nn.Embed(c.vocabulary, c.hidden, name="embed", **kinds)
        x = embed(tokens) + nn.Embed(c.sequence, c.hidden, name="position", **kinds)(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(c.dropout, deterministic=not train)(x)
        x = blocks(c, x, train)
        logits = embed.attend(nn.LayerNorm(name="norm", **kinds)(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
