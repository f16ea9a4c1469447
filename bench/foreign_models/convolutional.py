"""Image models in linen: a CNN, a ResNet, a variational autoencoder, an autoregressive and a diffusion model, an agent."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bench.foreign_models.training import (
    BATCH,
    Foreign,
    State,
    cross_entropy,
    integers,
    linen_state,
    normal,
    trained,
)


class Digits(nn.Module):
    """Two convolutions with pooling, then two dense layers, as everybody's first Flax model."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b h w c -> b k
        for features in (8, 16):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        return nn.Dense(8)(nn.relu(nn.Dense(32)(x)))


def digits() -> Foreign:
    batch = {"image": normal(BATCH, 12, 12, 1), "label": integers(BATCH, below=8)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, batch["image"]), batch["label"]), {}

    return trained(loss, linen_state(Digits(), batch["image"]), batch)


class Bottleneck(nn.Module):
    features: int
    strides: tuple[int, int]
    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        y = nn.relu(self.norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(self.norm()(conv(self.features, (3, 3), self.strides)(y)))
        y = self.norm(scale_init=nn.initializers.constant(0.2))(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(conv(4 * self.features, (1, 1), self.strides, name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:  # b h w c -> b k
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.Conv(8, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False, name="conv_init")(x)
        x = nn.max_pool(nn.relu(norm(name="norm_init")(x)), (3, 3), strides=(2, 2), padding="SAME")
        for stage, features in enumerate((8, 16)):
            x = Bottleneck(features, (2, 2) if stage else (1, 1), norm)(x)
        return nn.Dense(8)(jnp.mean(x, axis=(1, 2)))


def resnet() -> Foreign:
    batch = {"image": normal(BATCH, 32, 32, 3), "label": integers(BATCH, below=8)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits, moved = state.apply_fn({"params": params, **state.rest}, batch["image"], mutable=["batch_stats"])
        decay = 1e-4 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params) if p.ndim > 1)
        return cross_entropy(logits, batch["label"]) + decay, moved

    return trained(loss, linen_state(ResNet(), batch["image"]), batch)


class Autoencoder(nn.Module):
    """A mean and a variance of the code; a sample of it; the image made of that."""

    latents: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden = nn.relu(nn.Dense(32, name="encoder")(x))
        mean, log_variance = nn.Dense(self.latents, name="mean")(hidden), nn.Dense(self.latents, name="variance")(hidden)
        code = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        return nn.Dense(x.shape[-1], name="out")(nn.relu(nn.Dense(32, name="decoder")(code))), mean, log_variance


def vae() -> Foreign:
    batch = {"image": jax.random.bernoulli(jax.random.key(0), 0.5, (BATCH, 64)).astype(jnp.float32)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits, mean, log_variance = state.apply_fn({"params": params}, batch["image"], key)
        likelihood = optax.sigmoid_binary_cross_entropy(logits, batch["image"]).sum(-1).mean()
        divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1).mean()
        return likelihood + divergence, {}

    return trained(loss, linen_state(Autoencoder(), batch["image"], jax.random.key(0)), batch)


class Causal(nn.Module):
    """A convolution that sees rows above, and of its own row what lies to the left; gated, with a way around it."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        both = jnp.concatenate([nn.elu(x), nn.elu(-x)], axis=-1)
        both = nn.Dropout(0.2, deterministic=not train)(both)
        above = nn.Conv(2 * self.features, (2, 3), padding=[(1, 0), (1, 1)])(both)
        left = nn.Conv(2 * self.features, (1, 2), padding=[(0, 0), (1, 0)])(both)
        value, gate = jnp.split(above + left, 2, axis=-1)
        return x + value * nn.sigmoid(gate)


class PixelModel(nn.Module):
    """Each pixel as a mixture of logistics, of the pixels before it."""

    mixtures: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b h w 1 -> b h w 3 m
        x = jnp.pad(x, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
        x = nn.Conv(16, (1, 1))(jnp.concatenate([x, jnp.ones_like(x)], axis=-1))
        for _ in range(2):
            x = Causal(16)(x)
        out = nn.Conv(3 * self.mixtures, (1, 1))(nn.elu(x))
        return out.reshape((*out.shape[:-1], 3, self.mixtures))


def pixelcnn() -> Foreign:
    batch = {"image": jax.random.uniform(jax.random.key(0), (BATCH, 8, 8, 1), minval=-1, maxval=1)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        images = batch["image"]
        out = state.apply_fn({"params": params}, images, rngs={"dropout": key})
        weights, means, scales = out[..., 0, :], out[..., 1, :], jnp.maximum(out[..., 2, :], -7)
        off, half = (images - means) * jnp.exp(-scales), jnp.exp(-scales) / 255
        mass = jnp.maximum(nn.sigmoid(off + half) - nn.sigmoid(off - half), 1e-12)
        log_mass = jnp.where(images < -0.999, nn.log_sigmoid(off + half), jnp.log(mass))
        return -jax.nn.logsumexp(log_mass + nn.log_softmax(weights), axis=-1).mean(), {}

    return trained(loss, linen_state(PixelModel(), batch["image"]), batch)


class Residual(nn.Module):
    """Group normalisation and two convolutions, moved by the embedding of the time."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(x)))
        scale, shift = jnp.split(nn.Dense(2 * self.features)(nn.swish(time))[:, None, None], 2, axis=-1)
        y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(y) * (1 + scale) + shift))
        return y + (x if x.shape == y.shape else nn.Conv(self.features, (1, 1))(x))


class UNet(nn.Module):
    """Down, through attention over all positions, and up again beside what was kept."""

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time[:, None] * jnp.exp(-jnp.arange(8) * 0.5)
        time = nn.Dense(32)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        wide = Residual(8)(nn.Conv(8, (3, 3))(x), time)
        x = Residual(16)(nn.Conv(16, (3, 3), strides=(2, 2))(wide), time)
        flat = nn.LayerNorm()(x).reshape((x.shape[0], -1, x.shape[-1]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(flat, flat).reshape(x.shape)
        x = jax.image.resize(x, (*wide.shape[:3], x.shape[-1]), "nearest")
        x = Residual(8)(jnp.concatenate([x, wide], axis=-1), time)
        return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(x)))


def diffusion() -> Foreign:
    batch = {"image": normal(BATCH, 8, 8, 3)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        images = batch["image"]
        when, drawn = jax.random.split(key)
        time = jax.random.uniform(when, images.shape[:1])
        noise = jax.random.normal(drawn, images.shape)
        angle = time[:, None, None, None] * jnp.pi / 2
        found = state.apply_fn({"params": params}, jnp.cos(angle) * images + jnp.sin(angle) * noise, time)
        return jnp.mean((found - noise) ** 2), {}

    return trained(loss, linen_state(UNet(), batch["image"], jnp.ones(BATCH)), batch)


class ActorCritic(nn.Module):
    """Two heads on one convolutional net."""

    @nn.compact
    def __call__(self, frames: jax.Array) -> tuple[jax.Array, jax.Array]:  # b h w c -> b a, b
        x = frames.astype(jnp.float32) / 255.0
        x = nn.relu(nn.Conv(8, (8, 8), strides=(4, 4), name="conv1")(x))
        x = nn.relu(nn.Conv(16, (4, 4), strides=(2, 2), name="conv2")(x))
        x = nn.relu(nn.Dense(32, name="hidden")(x.reshape((x.shape[0], -1))))
        return nn.log_softmax(nn.Dense(4, name="logits")(x)), nn.Dense(1, name="value")(x)[..., 0]


def ppo() -> Foreign:
    batch = {
        "frames": integers(BATCH, 32, 32, 4, below=256).astype(jnp.uint8),
        "actions": integers(BATCH, below=4, seed=1),
        "log_probs": -jnp.abs(normal(BATCH, seed=2)),
        "returns": normal(BATCH, seed=3),
        "advantages": normal(BATCH, seed=4),
    }

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        log_probs, values = state.apply_fn({"params": params}, batch["frames"])
        taken = jax.vmap(lambda row, action: row[action])(log_probs, batch["actions"])
        ratios = jnp.exp(taken - batch["log_probs"])
        advantages = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
        clipped = jnp.clip(ratios, 0.9, 1.1) * advantages
        surrogate = -jnp.mean(jnp.minimum(ratios * advantages, clipped))
        entropy = jnp.sum(-jnp.exp(log_probs) * log_probs, axis=1).mean()
        return surrogate + 0.5 * jnp.mean((batch["returns"] - values) ** 2) - 0.01 * entropy, {}

    return trained(loss, linen_state(ActorCritic(), batch["frames"]), batch)


MODELS: dict[str, Callable[[], Foreign]] = {
    "linen mnist cnn": digits,
    "linen imagenet resnet": resnet,
    "linen vae": vae,
    "linen pixelcnn": pixelcnn,
    "linen diffusion unet": diffusion,
    "linen ppo actor-critic": ppo,
}
