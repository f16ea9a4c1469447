"""AlphaFold2's Evoformer in Flax linen, with what stands before it and two of the losses behind it.

(Jumper et al., Highly accurate protein structure prediction with AlphaFold, Nature 2021; algorithms below are those of its
supplement.) Left out: templates, the extra alignment and its stack, the single representation with the structure module
behind it, and recycled distances, which that makes. Every pass reads the same alignment.

Shapes: b batch, s sequences of an alignment, i j u residues, n t u rows and places of a table, c channels, h heads, k head
size. The alignment's representation ``m`` is b s i c_m, that of pairs, ``z``, is b i j c_z.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

ZEROS, ONES = nn.initializers.zeros, nn.initializers.ones  # blocks begin as the identity, and gates open


@dataclass(frozen=True)
class EvoformerConfig:
    """``sequences`` and ``residues`` are those of its data. ``recycles`` are passes without a gradient before the one with.
    ``dtype`` and all below it are as of a GPT."""

    c_m: int
    c_z: int
    layers: int
    msa_heads: int
    sequences: int = 128
    residues: int = 256
    pair_heads: int = 4
    pair_head_size: int = 32
    outer: int = 32
    recycles: int = 2
    tokens: int = 23  # 20 amino acids, unknown, gap, masked
    bins: int = 64
    apart: int = 32  # residues that stand farther apart in the chain are told apart no more
    msa_dropout: float = 0.15
    pair_dropout: float = 0.25
    dtype: Any = None
    param_dtype: Any = jnp.float32
    stacked: bool = False
    remat: bool = False

    @property
    def kinds(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


# The last four are those of SuperScaler's evaluation, whose parameters are met (87.9 M, 930.6 M, 2.44 B, 3.25 B: 1.7 % more
# at most) if heads of alignments have 32 channels, pairs 4 heads of 32 and the outer product 32, as in AlphaFold2, triangle
# multiplications are as wide as z, and transitions four times as wide. With pair heads of c_z / 4 channels it is 87.9 M,
# 994 M, 2.63 B, 3.51 B; with AlphaFold2's 128 in triangle multiplications 87.9 M, 868 M, 2.25 B, 3.00 B.
SIZES = {
    "nano": EvoformerConfig(16, 8, 2, msa_heads=4, sequences=8, residues=8, pair_head_size=4, outer=4, bins=8),
    "87m": EvoformerConfig(256, 128, 48, msa_heads=8),
    "930m": EvoformerConfig(768, 384, 64, msa_heads=24),
    "2.4b": EvoformerConfig(1024, 512, 96, msa_heads=32),
    "3.2b": EvoformerConfig(1024, 512, 128, msa_heads=32),
}


class GatedAttention(nn.Module):
    """The places of each row look at each other, with a bias that all rows share; a gate says how much is heard of it."""

    config: EvoformerConfig
    heads: int
    head_size: int

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None) -> jax.Array:  # b n t c, b t u h -> b n t c
        kinds, heads = self.config.kinds, (self.heads, self.head_size)
        q, k, v = (nn.DenseGeneral(heads, use_bias=False, name=name, **kinds)(x) for name in ("query", "key", "value"))
        gate = nn.sigmoid(nn.DenseGeneral(heads, kernel_init=ZEROS, bias_init=ONES, name="gate", **kinds)(x))  # b n t h k
        scores = jnp.einsum("bnthk,bnuhk->bnhtu", q, k) / jnp.sqrt(self.head_size).astype(q.dtype)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        if bias is not None:
            scores = scores + bias.transpose(0, 3, 1, 2)[:, None]
        mixed = gate * jnp.einsum("bnhtu,bnuhk->bnthk", nn.softmax(scores).astype(q.dtype), v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), kernel_init=ZEROS, name="out", **kinds)(mixed)


class RowAttention(nn.Module):
    """Algorithm 7: residues of a sequence look at each other, and at their pairs."""

    config: EvoformerConfig

    @nn.compact
    def __call__(self, m: jax.Array, z: jax.Array) -> jax.Array:  # b s i c_m, b i j c_z -> b s i c_m
        c = self.config
        bias = nn.Dense(c.msa_heads, use_bias=False, name="bias", **c.kinds)(nn.LayerNorm(name="norm_pair", **c.kinds)(z))
        attention = GatedAttention(c, c.msa_heads, c.c_m // c.msa_heads, name="attn")
        return attention(nn.LayerNorm(name="norm", **c.kinds)(m), bias)


class ColumnAttention(nn.Module):
    """Algorithm 8: sequences look at each other at a residue."""

    config: EvoformerConfig

    @nn.compact
    def __call__(self, m: jax.Array) -> jax.Array:  # b s i c_m -> b s i c_m
        c = self.config
        attention = GatedAttention(c, c.msa_heads, c.c_m // c.msa_heads, name="attn")
        return attention(nn.LayerNorm(name="norm", **c.kinds)(m).swapaxes(1, 2), None).swapaxes(1, 2)


class Transition(nn.Module):
    """Algorithms 9 and 15."""

    config: EvoformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b n t c -> b n t c
        kinds = self.config.kinds
        y = nn.Dense(4 * x.shape[-1], name="up", **kinds)(nn.LayerNorm(name="norm", **kinds)(x))
        return nn.Dense(x.shape[-1], kernel_init=ZEROS, name="down", **kinds)(nn.relu(y))


class OuterProductMean(nn.Module):
    """Algorithm 10: what two residues have in common over all sequences."""

    config: EvoformerConfig

    @nn.compact
    def __call__(self, m: jax.Array) -> jax.Array:  # b s i c_m -> b i j c_z
        c = self.config
        m = nn.LayerNorm(name="norm", **c.kinds)(m)
        left, right = (nn.Dense(c.outer, name=name, **c.kinds)(m) for name in ("left", "right"))
        mean = jnp.einsum("bsix,bsjy->bijxy", left, right) / m.shape[1]
        return nn.DenseGeneral(c.c_z, axis=(-2, -1), kernel_init=ZEROS, name="out", **c.kinds)(mean)


class TriangleMultiplication(nn.Module):
    """Algorithms 11 and 12: what two residues have in common over all third ones, along edges from them or to them."""

    config: EvoformerConfig
    outgoing: bool

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:  # b i j c_z -> b i j c_z
        c = self.config

        def gate(name: str) -> jax.Array:
            return nn.sigmoid(nn.Dense(c.c_z, kernel_init=ZEROS, bias_init=ONES, name=f"{name}_gate", **c.kinds)(z))

        z = nn.LayerNorm(name="norm", **c.kinds)(z)
        left, right = (gate(name) * nn.Dense(c.c_z, name=name, **c.kinds)(z) for name in ("left", "right"))
        joined = jnp.einsum("biuc,bjuc->bijc" if self.outgoing else "buic,bujc->bijc", left, right)
        joined = nn.LayerNorm(name="norm_joined", **c.kinds)(joined)
        return gate("out") * nn.Dense(c.c_z, kernel_init=ZEROS, name="out", **c.kinds)(joined)


class TriangleAttention(nn.Module):
    """Algorithms 13 and 14: edges that start at a residue, or end there, look at each other and at the third edge."""

    config: EvoformerConfig
    starting: bool

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:  # b i j c_z -> b i j c_z
        c = self.config
        z = nn.LayerNorm(name="norm", **c.kinds)(z)
        z = z if self.starting else z.swapaxes(1, 2)
        bias = nn.Dense(c.pair_heads, use_bias=False, name="bias", **c.kinds)(z)
        z = GatedAttention(c, c.pair_heads, c.pair_head_size, name="attn")(z, bias)
        return z if self.starting else z.swapaxes(1, 2)


class Block(nn.Module):
    """Algorithm 6, one block. Dropout is the same in all rows of a table, or in all columns."""

    config: EvoformerConfig

    @nn.compact
    def __call__(self, m: jax.Array, z: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        c = self.config

        def dropped(x: jax.Array, rate: float, same: int) -> jax.Array:
            return nn.Dropout(rate, broadcast_dims=(same,), deterministic=not train)(x)

        m = m + dropped(RowAttention(c, name="row_attention")(m, z), c.msa_dropout, 1)
        m = m + ColumnAttention(c, name="column_attention")(m)
        m = m + Transition(c, name="msa_transition")(m)
        z = z + OuterProductMean(c, name="outer_product")(m)
        z = z + dropped(TriangleMultiplication(c, True, name="outgoing")(z), c.pair_dropout, 1)
        z = z + dropped(TriangleMultiplication(c, False, name="incoming")(z), c.pair_dropout, 1)
        z = z + dropped(TriangleAttention(c, True, name="starting")(z), c.pair_dropout, 1)
        z = z + dropped(TriangleAttention(c, False, name="ending")(z), c.pair_dropout, 2)
        return m, z + Transition(c, name="pair_transition")(z)


class EvoformerStack(nn.Module):
    """One pass: what is embedded, and what an earlier pass has made, through all blocks."""

    config: EvoformerConfig

    @nn.compact
    def __call__(
        self, msa: jax.Array, target: jax.Array, first: jax.Array | None, pairs: jax.Array | None, train: bool
    ) -> tuple[jax.Array, jax.Array]:  # b s i, b i, of the earlier pass b i c_m and b i j c_z -> b s i c_m, b i j c_z
        c, place = self.config, jnp.arange(msa.shape[2])

        def embedded(tokens: jax.Array, channels: int, name: str, known: int = c.tokens) -> jax.Array:
            return nn.Embed(known, channels, name=name, **c.kinds)(tokens)

        between = jnp.clip(place[:, None] - place[None, :], -c.apart, c.apart) + c.apart
        m = embedded(msa, c.c_m, "embed") + embedded(target, c.c_m, "target")[:, None]  # Algorithm 3
        z = embedded(target, c.c_z, "left")[:, :, None] + embedded(target, c.c_z, "right")[:, None]
        z = z + embedded(between, c.c_z, "between", 2 * c.apart + 1)  # Algorithm 4
        first = jnp.zeros_like(m[:, 0]) if first is None else first  # Algorithm 32
        pairs = jnp.zeros_like(z) if pairs is None else pairs
        is_first = jnp.arange(msa.shape[1])[:, None, None] == 0
        m = m + jnp.where(is_first, nn.LayerNorm(name="norm_first", **c.kinds)(first)[:, None], 0)
        z = z + nn.LayerNorm(name="norm_pairs", **c.kinds)(pairs)
        block = nn.remat(Block, static_argnums=(3,)) if c.remat else Block
        if not c.stacked:
            for i in range(c.layers):
                m, z = block(c, name=f"block_{i}")(m, z, train)
            return m, z
        over_blocks = nn.scan(
            lambda block, tables, _: (block(*tables, train), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=c.layers,
        )
        return over_blocks(block(c, name="blocks"), (m, z), None)[0]


class Evoformer(nn.Module):
    """Logits of the alignment's tokens (b s i tokens) and of pairs' distances (b i j bins), in float32 at least.

    The stack goes over its own output, and only the last pass has a gradient, as in the schedule ``"3f1b"``.
    """

    config: EvoformerConfig

    @nn.compact
    def __call__(self, msa: jax.Array, target: jax.Array, train: bool = False) -> tuple[jax.Array, ...]:  # b s i, b i
        c, stack, first, pairs = self.config, EvoformerStack(self.config, name="stack"), None, None
        for number in range(c.recycles):
            with jax.named_scope(f"recycle_{number}"):  # its ops are none of another pass
                m, z = stack(msa, target, first, pairs, train)
                first, pairs = jax.lax.stop_gradient((m[:, 0], z))
        m, z = stack(msa, target, first, pairs, train)
        tokens = nn.Dense(c.tokens, name="tokens", **c.kinds)(m)
        distances = nn.Dense(c.bins, name="distances", **c.kinds)(z + z.swapaxes(1, 2))
        return tuple(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) for logits in (tokens, distances))
