"""A small convolutional net with batch normalisation, and a train step that keeps its running statistics.

Shapes: b batch, h height, w width, c channels.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ConvConfig:
    """``layers`` stages: each halves the image and, but for the first, doubles the channels."""

    hidden: int = 16
    layers: int = 3
    image: int = 32
    classes: int = 10
    momentum: float = 0.9
    dtype: Any = None
    param_dtype: Any = jnp.float32


SIZES = {
    "nano": ConvConfig(hidden=8, layers=2, image=16),
    "mini": ConvConfig(hidden=32, layers=3, image=32),
}


class ConvNorm(nn.Module):
    """Convolution, batch normalisation over batch and space, relu."""

    features: int
    stride: int
    config: ConvConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:  # b h w c -> b h/stride w/stride features
        c = self.config
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        stride = (self.stride, self.stride)
        x = nn.Conv(self.features, (3, 3), strides=stride, padding="SAME", use_bias=False, name="conv", **kinds)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=c.momentum, name="norm", **kinds)(x)
        return nn.relu(x)


class ConvNet(nn.Module):
    """Logits of the classes, in float32 at least: max pooling first, strided convolutions after."""

    config: ConvConfig

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:  # b h w c -> b classes
        c = self.config
        x = ConvNorm(c.hidden, 1, c, name="stem")(images, train)
        x = nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME")
        for i in range(1, c.layers):
            features = c.hidden * 2**i
            x = ConvNorm(features, 2, c, name=f"down_{i}")(x, train)
            x = ConvNorm(features, 1, c, name=f"same_{i}")(x, train)
        x = jnp.mean(x, axis=(1, 2))
        logits = nn.Dense(c.classes, dtype=c.dtype, param_dtype=c.param_dtype, name="head")(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
