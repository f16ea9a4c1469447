"""Swin in Flax linen: attention inside windows of an image, every other block shifted by half a window, patches merged
between stages. (Liu et al., Swin Transformer, ICCV 2021, arXiv 2103.14030.) Without stochastic depth.

Shapes: b batch, y x rows and columns of patches, c channels, n windows, t s patches of a window, h heads, k head size.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class SwinConfig:
    """``hidden`` channels and ``heads`` are those of the first stage, and double from stage to stage.

    ``depths`` are blocks per stage, even, for a plain and a shifted block belong together; with ``stacked``, the pairs of
    a stage are one ``nn.scan``. ``remat`` computes each block again in the backward pass.
    """

    hidden: int
    heads: int
    depths: tuple[int, ...]
    window: int
    image: int
    patch: int = 4
    classes: int = 1000
    dtype: Any = None
    param_dtype: Any = jnp.float32
    stacked: bool = False
    remat: bool = False


# The last four are those of SuperScaler's evaluation: image 1536, so that a third stage has 2 x 2 windows of 48 x 48.
SIZES = {
    "nano": SwinConfig(hidden=8, heads=2, depths=(2, 2), window=4, image=32, classes=10),
    "mini": SwinConfig(hidden=16, heads=4, depths=(2, 2), window=4, image=32, classes=10),
    "1.8b": SwinConfig(hidden=512, heads=16, depths=(2, 2, 26, 2), window=48, image=1536),
    "5.0b": SwinConfig(hidden=768, heads=24, depths=(2, 2, 34, 2), window=48, image=1536),
    "10.4b": SwinConfig(hidden=1024, heads=32, depths=(2, 2, 42, 2), window=48, image=1536),
    "27b": SwinConfig(hidden=1536, heads=32, depths=(2, 2, 50, 2), window=48, image=1536),
}


def windows(x: jax.Array, window: int) -> jax.Array:  # b y x c -> b n t c
    b, rows, columns, c = x.shape
    x = x.reshape(b, rows // window, window, columns // window, window, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, -1, window * window, c)


def image(x: jax.Array, window: int, rows: int) -> jax.Array:  # b n t c -> b y x c
    b, n, _, c = x.shape
    down = rows // window
    x = x.reshape(b, down, n // down, window, window, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, rows, -1, c)


def offsets(window: int) -> jax.Array:  # -> t s: which row of the table is the bias of patch t looking at patch s
    place = jnp.arange(window * window)
    down, right = (at[:, None] - at[None, :] + window - 1 for at in (place // window, place % window))
    return down * (2 * window - 1) + right


def neighbours(rows: int, columns: int, window: int) -> jax.Array:  # -> n t s: whether t may see s after the shift

    def band(size: int) -> jax.Array:  # what the roll has brought from the other side is apart
        return (jnp.arange(size) >= size - window).astype(int) + (jnp.arange(size) >= size - window // 2)

    region = windows((3 * band(rows)[:, None] + band(columns)[None, :])[None, :, :, None], window)[0, :, :, 0]
    return region[:, :, None] == region[:, None, :]


class WindowAttention(nn.Module):
    config: SwinConfig
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, window: int, seen: jax.Array | None) -> jax.Array:  # b n t c -> b n t c
        kinds = {"dtype": self.config.dtype, "param_dtype": self.config.param_dtype}
        split = (self.heads, x.shape[-1] // self.heads)
        q, k, v = (nn.DenseGeneral(split, name=name, **kinds)(x) for name in ("query", "key", "value"))  # b n t h k
        table = self.param("bias", nn.initializers.normal(0.02), ((2 * window - 1) ** 2, self.heads), kinds["param_dtype"])
        scores = jnp.einsum("bnthk,bnshk->bnhts", q, k) / jnp.sqrt(split[1]).astype(q.dtype)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) + table[offsets(window)].transpose(2, 0, 1)
        if seen is not None:
            scores = jnp.where(seen[:, None], scores, -1e9)
        mixed = jnp.einsum("bnhts,bnshk->bnthk", nn.softmax(scores).astype(q.dtype), v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out", **kinds)(mixed)


class Block(nn.Module):
    config: SwinConfig
    heads: int
    shifted: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b y x c -> b y x c
        c, (_, rows, columns, width) = self.config, x.shape
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        window, shifted = (min(c.window, rows, columns), self.shifted and c.window < min(rows, columns))
        shift, seen = (window // 2, neighbours(rows, columns, window)) if shifted else (0, None)
        y = nn.LayerNorm(name="norm1", **kinds)(x)
        y = windows(jnp.roll(y, (-shift, -shift), (1, 2)) if shift else y, window)
        y = image(WindowAttention(c, self.heads, name="attn")(y, window, seen), window, rows)
        x = x + (jnp.roll(y, (shift, shift), (1, 2)) if shift else y)
        y = nn.Dense(4 * width, name="up", **kinds)(nn.LayerNorm(name="norm2", **kinds)(x))
        return x + nn.Dense(width, name="down", **kinds)(nn.gelu(y))


class Pair(nn.Module):
    """A block in plain windows, and one in shifted ones."""

    config: SwinConfig
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b y x c -> b y x c
        block = nn.remat(Block) if self.config.remat else Block
        return block(self.config, self.heads, True, name="shifted")(block(self.config, self.heads, False, name="plain")(x))


class Stage(nn.Module):
    config: SwinConfig
    heads: int
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b y x c -> b y x c
        if not self.config.stacked:
            for i in range(self.depth // 2):
                x = Pair(self.config, self.heads, name=f"pair_{i}")(x)
            return x
        kinds: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        over_pairs = nn.scan(lambda pair, x, _: (pair(x), None), length=self.depth // 2, **kinds)
        return over_pairs(Pair(self.config, self.heads, name="pairs"), x, None)[0]


class Swin(nn.Module):
    """Logits of the classes, in float32 at least."""

    config: SwinConfig

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:  # b y x c -> b classes
        c = self.config
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        x = nn.Conv(c.hidden, (c.patch, c.patch), strides=c.patch, padding="VALID", name="patches", **kinds)(images)
        for i, depth in enumerate(c.depths):
            if i:
                b, rows, columns, width = x.shape  # four neighbours become one patch of twice the channels
                x = x.reshape(b, rows // 2, 2, columns // 2, 2, width).transpose(0, 1, 3, 2, 4, 5)
                x = nn.LayerNorm(name=f"norm_{i}", **kinds)(x.reshape(b, rows // 2, columns // 2, 4 * width))
                x = nn.Dense(2 * width, use_bias=False, name=f"merge_{i}", **kinds)(x)
            x = Stage(c, c.heads * 2**i, depth, name=f"stage_{i}")(x)
        x = nn.LayerNorm(name="norm", **kinds)(x).mean((1, 2))
        logits = nn.Dense(c.classes, name="head", **kinds)(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
