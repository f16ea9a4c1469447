"""Models in nnx, whose steps change them in place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bench.foreign_models.training import BATCH, Foreign, cross_entropy, integers, normal, trained_nnx

WORDS, LENGTH, WIDTH = 32, 8, 16


class Norm(nnx.Module):
    """Root mean square, and a scale around one."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + self.scale)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions; b s h d."""
    timescale = 10000.0 ** (2 * jnp.arange(x.shape[-1] // 2) / x.shape[-1])
    angles = (positions[..., None] / timescale)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class GroupedAttention(nnx.Module):
    """Four heads of queries, two of keys and values, local to a window where ``window`` is given."""

    def __init__(self, window: int | None, rngs: nnx.Rngs):
        self.window = window
        self.q = nnx.Einsum("BTD,NDH->BTNH", (4, WIDTH, 4), rngs=rngs)
        self.kv = nnx.Einsum("BSD,CKDH->CBSKH", (2, 2, WIDTH, 4), rngs=rngs)
        self.out = nnx.Einsum("BTNH,NHD->BTD", (4, 4, WIDTH), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        query = rotated(self.q(x), positions) * 4**-0.5
        key, value = self.kv(x)
        query = query.reshape(b, t, 2, 2, 4)
        scores = jnp.einsum("BTKGH,BSKH->BTKGS", query, rotated(key, positions))
        scores = 50.0 * jnp.tanh(scores / 50.0)
        places = jnp.arange(t)
        mask = places[None, :] <= places[:, None]
        if self.window is not None:
            mask &= places[None, :] > places[:, None] - self.window
        weights = jax.nn.softmax(jnp.where(mask[None, :, None, None, :], scores, -2.0e38), axis=-1)
        return self.out(jnp.einsum("BTKGS,BSKH->BTKGH", weights, value).reshape(b, t, 4, 4))


class GatedMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.gate = nnx.Linear(WIDTH, 32, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Norms before and behind both halves."""

    def __init__(self, window: int | None, rngs: nnx.Rngs):
        self.norms = nnx.List([Norm(WIDTH) for _ in range(4)])
        self.attention, self.mlp = GroupedAttention(window, rngs), GatedMlp(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.norms[1](self.attention(self.norms[0](x)))
        return x + self.norms[3](self.mlp(self.norms[2](x)))


class Gemma(nnx.Module):
    """Local and global layers in turn, a table that is scaled and makes the logits too, logits softly capped."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(window, rngs) for window in (4, None)])
        self.norm = Norm(WIDTH)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # b s -> b s v
        x = self.embed(tokens) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        return 30.0 * jnp.tanh(self.embed.attend(self.norm(x)) / 30.0)


def gemma() -> Foreign:
    batch = {"tokens": integers(BATCH, LENGTH, below=WORDS)}

    def loss(model: Gemma, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    return trained_nnx(loss, Gemma, batch)


class MixerBlock(nnx.Module):
    """One MLP over the patches, one over the channels."""

    def __init__(self, patches: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.tokens = nnx.Sequential(nnx.Linear(patches, 8, rngs=rngs), nnx.gelu, nnx.Linear(8, patches, rngs=rngs))
        self.channels = nnx.Sequential(nnx.Linear(WIDTH, 32, rngs=rngs), nnx.gelu, nnx.Linear(32, WIDTH, rngs=rngs))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.tokens(self.norms[0](x).swapaxes(1, 2)).swapaxes(1, 2))
        return x + self.dropout(self.channels(self.norms[1](x)))


class Mixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.blocks = nnx.List([MixerBlock(16, rngs) for _ in range(2)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:  # b h w c -> b k
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


class Cnn(nnx.Module):
    """With batch normalisation and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = (
            nnx.Conv(3, 8, (3, 3), rngs=rngs),
            nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs),
        )
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)])
        self.hidden, self.head = nnx.Linear(16 * 4 * 4, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # b h w c -> b k
        x = nnx.avg_pool(nnx.relu(self.norms[0](self.first(x))), (2, 2), strides=(2, 2))
        x = nnx.relu(self.norms[1](self.second(x)))
        x = nnx.relu(self.dropout(self.hidden(x.reshape(x.shape[0], -1))))
        return self.head(x)


def images(make: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[], Foreign]:
    def loss(model: Any, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["image"]), batch["label"])

    def made() -> Foreign:
        return trained_nnx(loss, make, {"image": normal(BATCH, 16, 16, 3), "label": integers(BATCH, below=8)})

    return made


class Gru(nnx.Module):
    """Characters through a recurrent layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, 32, rngs=rngs))
        self.head = nnx.Linear(32, WORDS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # b s -> b s v
        return self.head(jnp.asarray(self.rnn(self.embed(tokens))))


def gru() -> Foreign:
    batch = {"tokens": integers(BATCH, LENGTH, below=WORDS)}

    def loss(model: Gru, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    return trained_nnx(loss, Gru, batch)


MODELS: dict[str, Callable[[], Foreign]] = {
    "nnx gemma": gemma,
    "nnx mlp-mixer": images(Mixer),
    "nnx cnn": images(Cnn),
    "nnx gru": gru,
}
