"""Transformers in linen as Flax's own layers make them: translation, language, and images through a stack of layers."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.foreign_models.training import (
    BATCH,
    Foreign,
    State,
    cross_entropy,
    integers,
    linen_state,
    masked_mean,
    normal,
    trained,
)

WORDS, LENGTH, WIDTH, HEADS = 32, 8, 16, 4


def sinusoids(length: int, width: int) -> np.ndarray:
    """Sines in the even columns, cosines in the odd ones; 1 s d."""
    angles = np.arange(length)[:, None] * np.exp(np.arange(0, width, 2) * -(np.log(10000.0) / width))
    table = np.zeros((1, length, width), np.float32)
    table[0, :, 0::2], table[0, :, 1::2] = np.sin(angles), np.cos(angles)
    return table


def shifted(tokens: jax.Array) -> jax.Array:
    """One to the right: what is known before each token."""
    return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(4 * WIDTH)(x)))
        return nn.Dropout(0.1, deterministic=not train)(nn.Dense(WIDTH)(x))


class Layer(nn.Module):
    """Attention to oneself, to ``encoded`` if there is any, and an MLP; norms in front."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: Any, train: bool, encoded: Any = None, encoded_mask: Any = None) -> jax.Array:
        drop = nn.Dropout(0.1, deterministic=not train)
        options: dict[str, Any] = {"use_bias": False, "dropout_rate": 0.1, "deterministic": not train}
        x = x + drop(nn.MultiHeadDotProductAttention(HEADS, **options)(nn.LayerNorm()(x), mask=mask))
        if encoded is not None:
            attend = nn.MultiHeadDotProductAttention(HEADS, **options)
            x = x + drop(attend(nn.LayerNorm()(x), encoded, mask=encoded_mask))
        return x + Mlp()(nn.LayerNorm()(x), train)


class Translation(nn.Module):
    """One table for both languages and for the logits; padding is word 0."""

    def setup(self) -> None:
        self.embed = nn.Embed(WORDS, WIDTH, embedding_init=nn.initializers.normal(1.0))
        self.encoder = [Layer() for _ in range(2)]
        self.decoder = [Layer() for _ in range(2)]
        self.norms = [nn.LayerNorm(), nn.LayerNorm()]
        self.dropout = nn.Dropout(0.1)

    def embedded(self, tokens: jax.Array, train: bool) -> jax.Array:
        x = self.embed(tokens) + sinusoids(LENGTH, WIDTH)[:, : tokens.shape[1]]
        return self.dropout(x, deterministic=not train)

    def __call__(self, source: jax.Array, target: jax.Array, train: bool = True) -> jax.Array:  # b s, b t -> b t v
        inside = nn.make_attention_mask(source > 0, source > 0)
        x = self.embedded(source, train)
        for layer in self.encoder:
            x = layer(x, inside, train)
        encoded = self.norms[0](x)
        causal = nn.combine_masks(nn.make_attention_mask(target > 0, target > 0), nn.make_causal_mask(target))
        across = nn.make_attention_mask(target > 0, source > 0)
        y = self.embedded(shifted(target), train)
        for layer in self.decoder:
            y = layer(y, causal, train, encoded, across)
        return self.embed.attend(self.norms[1](y)) / np.sqrt(WIDTH)


def wmt() -> Foreign:
    lengths = 2 + integers(BATCH, below=LENGTH - 2, seed=2)[:, None]

    def sentences(seed: int) -> jax.Array:
        words = 1 + integers(BATCH, LENGTH, below=WORDS - 1, seed=seed)
        return jnp.where(jnp.arange(LENGTH) < lengths, words, 0)

    batch = {"inputs": sentences(0), "targets": sentences(1)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        targets = batch["targets"]
        logits = state.apply_fn({"params": params}, batch["inputs"], targets, rngs={"dropout": key})
        soft = optax.smooth_labels(jax.nn.one_hot(targets, WORDS), 0.1)
        return masked_mean(optax.softmax_cross_entropy(logits, soft), targets > 0), {}

    return trained(loss, linen_state(Translation(), batch["inputs"], batch["targets"]), batch)


class Language(nn.Module):
    """A decoder with positions in the sentence, several sentences per row."""

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, train: bool = True) -> jax.Array:
        causal = nn.make_causal_mask(tokens)
        same = nn.make_attention_mask(segments, segments, jnp.equal)
        x = nn.Embed(WORDS, WIDTH)(shifted(tokens)) + jnp.take(sinusoids(LENGTH, WIDTH)[0], positions, axis=0)
        for i in range(2):
            x = Layer(name=f"encoderdecoderblock_{i}")(x, nn.combine_masks(causal, same), train)
        return nn.Dense(WORDS, name="logitdense")(nn.LayerNorm()(x))


def lm1b() -> Foreign:
    cut = 1 + integers(BATCH, below=LENGTH - 1, seed=1)[:, None]
    places = jnp.arange(LENGTH)[None]
    batch = {
        "tokens": integers(BATCH, LENGTH, below=WORDS),
        "positions": jnp.where(places < cut, places, places - cut),
        "segments": jnp.where(places < cut, 1, 2),
    }

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        arguments = [batch[name] for name in ("tokens", "positions", "segments")]
        logits = state.apply_fn({"params": params}, *arguments, rngs={"dropout": key})
        return cross_entropy(logits, batch["tokens"]), {}

    return trained(loss, linen_state(Language(), *batch.values()), batch)


class Carried(nn.Module):
    """A layer as ``nn.scan`` wants it."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=False)(y, y)
        return x + Mlp()(nn.LayerNorm()(x), True), None


class VisionStack(nn.Module):
    """Patches and a class token, through layers that are scanned and computed again."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:  # b h w c -> b k
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), padding="VALID")(images)
        x = x.reshape((x.shape[0], -1, WIDTH))
        token = self.param("cls", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        rngs: Any = {"params": True, "dropout": True}
        layers = nn.scan(nn.remat(Carried), variable_axes={"params": 0}, split_rngs=rngs, length=2)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(8)(nn.LayerNorm()(x)[:, 0])


def vision_stack() -> Foreign:
    batch = {"image": normal(BATCH, 16, 16, 3), "label": integers(BATCH, below=8)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits = state.apply_fn({"params": params}, batch["image"], rngs={"dropout": key})
        return cross_entropy(logits, batch["label"]), {}

    return trained(loss, linen_state(VisionStack(), batch["image"]), batch)


MODELS: dict[str, Callable[[], Foreign]] = {
    "linen wmt transformer": wmt,
    "linen lm1b": lm1b,
    "linen vit, scanned": vision_stack,
}
