"""The GPT of `models.gpt` in Flax nnx: same sizes, same shapes, same numbers; only the style differs.

Shapes: b batch, s sequence, d hidden, h heads, k head size, v vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.gpt import GPTConfig


def _kinds(config: GPTConfig, rngs: nnx.Rngs) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}


class Attention(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        heads = (config.heads, config.hidden // config.heads)
        self.query, self.key, self.value = (
            nnx.LinearGeneral(config.hidden, heads, **_kinds(config, rngs)) for _ in range(3)
        )
        self.out = nnx.LinearGeneral(heads, config.hidden, axis=(-2, -1), **_kinds(config, rngs))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        q, k, v = self.query(x), self.key(x), self.value(x)  # b s h k
        scores = jnp.einsum("bshk,bthk->bhst", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(causal, scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), -1e9)
        weights = self.dropout(nnx.softmax(scores).astype(q.dtype))
        return self.out(jnp.einsum("bhst,bthk->bshk", weights, v))


class MLP(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.up = nnx.Linear(config.hidden, 4 * config.hidden, **_kinds(config, rngs))
        self.down = nnx.Linear(4 * config.hidden, config.hidden, **_kinds(config, rngs))

    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(config.hidden, **_kinds(config, rngs))
        self.attn = Attention(config, rngs)
        self.norm2 = nnx.LayerNorm(config.hidden, **_kinds(config, rngs))
        self.mlp = MLP(config, rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        x = x + self.attn(self.norm1(x))
        return x + self.dropout(self.mlp(self.norm2(x)))


def stacked(make: Callable[[nnx.Rngs], Any], layers: int, rngs: nnx.Rngs) -> Any:
    """All blocks that ``make`` makes as one, whose variables have the layer as dim 0."""
    return nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)


def over_layers(blocks: Any, x: jax.Array) -> jax.Array:  # b s d -> b s d
    """All blocks, one after another."""
    if isinstance(blocks, Block):
        step = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return step(x, blocks)
    for block in blocks:
        x = block(x)
    return x


class GPT(nnx.Module):
    """Next-token logits, in float32 at least. Dropout is on after ``model.train()``, off after ``model.eval()``."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocabulary, config.hidden, **_kinds(config, rngs))
        self.position = nnx.Embed(config.sequence, config.hidden, **_kinds(config, rngs))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        block = functools.partial(Block, config)
        layers = config.layers
        self.blocks = stacked(block, layers, rngs) if config.stacked else nnx.List([block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(config.hidden, **_kinds(config, rngs))
        self.head = self.embed  # tied: one object under two names

    def __call__(self, tokens: jax.Array) -> jax.Array:  # b s -> b s v
        x = self.dropout(self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])))
        x = over_layers(self.blocks, x)
        logits = self.head.attend(self.norm(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def copy_linen(model: GPT, params: Any) -> None:
    """Give ``model`` the parameters of the linen GPT (layers as a Python loop): ``block_3`` there is ``blocks[3]`` here."""
    blocks = {int(name.removeprefix("block_")): own for name, own in params.items() if name.startswith("block_")}
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, {**rest, "blocks": blocks})
    nnx.update(model, state)
