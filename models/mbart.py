"""mBART in Flax linen: an encoder, and a decoder that looks at its output; one embedding for both and for the logits.

Layers are pre-norm, with a norm more on top of each side. (Vaswani et al., Attention Is All You Need, 2017; Liu et al.,
Multilingual Denoising Pre-training for Neural Machine Translation, TACL 2020.) Positions are learned; sequences have no
padding.

Shapes: b batch, s t sequences, d hidden, h heads, k head size, v vocabulary.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.gpt import MLP, GPTConfig


@dataclass(frozen=True)
class MBartConfig(GPTConfig):
    """As of a GPT; ``layers`` are those of the encoder, and those of the decoder. ``sequence`` is the longest of both."""


# The last four are those of SuperScaler's evaluation: layers, hidden, heads, vocabulary. Its parameters, 3.9, 11.6, 21.3
# and 46.4 billion, are met by so many layers on each side, one embedding, and K = 1000: 3.87 (0.7 % less), 11.61, 21.34 and
# 46.42 (up to 0.2 % more). K = 1024 gives 3.90, 11.69, 21.49 and 46.73 (up to 0.9 % more); so many layers in all give 2.46,
# 7.38, 13.82 and 29.51, which a second table of words would not mend (3.51, 10.53, 20.11, 42.09).
SIZES = {
    "nano": MBartConfig(hidden=64, layers=2, heads=4, sequence=64),
    "mini": MBartConfig(hidden=192, layers=4, heads=6, sequence=128),
    "3.9b": MBartConfig(hidden=2048, layers=24, heads=32, sequence=1024, vocabulary=512_000),
    "11.6b": MBartConfig(hidden=3072, layers=32, heads=48, sequence=1024, vocabulary=1_024_000),
    "21.3b": MBartConfig(hidden=4096, layers=32, heads=64, sequence=1024, vocabulary=1_536_000),
    "46.4b": MBartConfig(hidden=6144, layers=32, heads=96, sequence=1024, vocabulary=2_048_000),
}


class Attention(nn.Module):
    """``x`` looks at ``y``; if ``causal``, at what is no later than itself."""

    config: MBartConfig
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array, train: bool) -> jax.Array:  # b s d, b t d -> b s d
        c = self.config
        heads = (c.heads, c.hidden // c.heads)
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        q = nn.DenseGeneral(heads, name="query", **kinds)(x)  # b s h k
        k, v = (nn.DenseGeneral(heads, name=name, **kinds)(y) for name in ("key", "value"))  # b t h k
        scores = jnp.einsum("bshk,bthk->bhst", q, k) / jnp.sqrt(heads[1]).astype(q.dtype)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        weights = nn.Dropout(c.dropout, deterministic=not train)(nn.softmax(scores).astype(q.dtype))
        return nn.DenseGeneral(c.hidden, axis=(-2, -1), name="out", **kinds)(jnp.einsum("bhst,bthk->bshk", weights, v))


class Layer(nn.Module):
    """A layer of the encoder; of the decoder where there is a ``memory``, the encoder's output, to look at."""

    config: MBartConfig

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None, train: bool) -> jax.Array:  # b s d, b t d -> b s d
        c, decoder = self.config, memory is not None
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}

        def dropped(y: jax.Array) -> jax.Array:
            return nn.Dropout(c.dropout, deterministic=not train)(y)

        y = nn.LayerNorm(name="norm1", **kinds)(x)
        x = x + dropped(Attention(c, causal=decoder, name="attn")(y, y, train))
        if decoder:
            y = nn.LayerNorm(name="norm_cross", **kinds)(x)
            x = x + dropped(Attention(c, name="cross")(y, memory, train))
        return x + dropped(MLP(c, name="mlp")(nn.LayerNorm(name="norm2", **kinds)(x)))


class Side(nn.Module):
    """The layers of the encoder, or of the decoder, and the norm on top."""

    config: MBartConfig

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None, train: bool) -> jax.Array:  # b s d, b t d -> b s d
        c = self.config
        layer = nn.remat(Layer, static_argnums=(3,)) if c.remat else Layer
        if c.stacked:
            over_layers = nn.scan(
                lambda layer, x, _: (layer(x, memory, train), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=c.layers,
            )
            x = over_layers(layer(c, name="layers"), x, None)[0]
        else:
            for i in range(c.layers):
                x = layer(c, name=f"layer_{i}")(x, memory, train)
        return nn.LayerNorm(name="norm", dtype=c.dtype, param_dtype=c.param_dtype)(x)


class MBart(nn.Module):
    """Logits of the target's next tokens, in float32 at least."""

    config: MBartConfig

    @nn.compact
    def __call__(self, source: jax.Array, tokens: jax.Array, train: bool = False) -> jax.Array:  # b s, b t -> b t v
        c = self.config
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        embed = nn.Embed(c.vocabulary, c.hidden, name="embed", **kinds)

        def embedded(tokens: jax.Array, name: str) -> jax.Array:
            x = embed(tokens) + nn.Embed(c.sequence, c.hidden, name=name, **kinds)(jnp.arange(tokens.shape[1]))
            return nn.Dropout(c.dropout, deterministic=not train)(x)

        x, y = embedded(source, "source_position"), embedded(tokens, "position")  # both in front: one end of the model
        logits = embed.attend(Side(c, name="decoder")(y, Side(c, name="encoder")(x, None, train), train))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
