"""GPT with a mixture of experts in place of each MLP, written for one device.

Tokens of one batch row form a group (GShard: Lepikhin et al. 2020, Algorithm 1). Each token goes to its ``top_k`` best
experts; an expert takes at most ``capacity`` tokens of a group, first choices first. What finds no room passes by on
the residual. The load-balancing loss is that of Switch Transformer (Fedus et al. 2021, section 2.2), per group.

The experts' input has its groups and its experts on two dims (e g c d). Groups split over the devices before the
experts, experts over the same devices inside: one all-to-all there, one back.

Shapes: b batch = g groups, s sequence, d hidden, e experts, c capacity, f expert's hidden units, v vocabulary.
"""

import math
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from models.gpt import Attention, GPTConfig


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """Sizes of a GPT (its ``stacked`` and ``remat`` are not read), and of its experts."""

    experts: int = 8
    top_k: int = 2
    capacity_factor: float = 1.25
    balance: float = 1e-2

    @property
    def capacity(self) -> int:
        """Tokens of one full group that an expert takes."""
        return math.ceil(self.capacity_factor * self.top_k * self.sequence / self.experts)


SIZES = {
    "nano": MoEConfig(hidden=64, layers=2, heads=4, sequence=64),
    "mini": MoEConfig(hidden=192, layers=6, heads=6, sequence=128),
}


def route(logits: jax.Array, top_k: int, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Who goes where, from the router's ``logits`` (g s e).

    Returns:
        dispatch (g s e c): 1 where a token has a place at an expert, else 0.
        combine (g s e c): the same, weighted by the token's gates (which add up to 1 over its choices).
        balance: the load-balancing loss, a scalar; 1 where the load is even.
    """
    experts = logits.shape[-1]
    probabilities = nn.softmax(logits)  # g s e
    chosen = nn.one_hot(jax.lax.top_k(probabilities, top_k)[1], experts, dtype=jnp.int32)  # g s k e
    gates = jnp.sum(probabilities[:, :, None] * chosen, -1)  # g s k
    gates = gates / jnp.sum(gates, -1, keepdims=True)
    taken = jnp.zeros_like(chosen[:, :1, 0])  # g 1 e: places that earlier choices hold
    dispatch, combine = (jnp.zeros((*logits.shape, capacity), logits.dtype) for _ in range(2))
    for k in range(top_k):
        place = jnp.cumsum(chosen[:, :, k], 1) - 1 + taken  # g s e
        taken = taken + jnp.sum(chosen[:, :, k], 1, keepdims=True)
        held = nn.one_hot(place, capacity, dtype=logits.dtype) * chosen[:, :, k, :, None]  # g s e c; 0 beyond capacity
        dispatch = dispatch + held
        combine = combine + held * gates[:, :, k, None, None]
    share = jnp.mean(chosen[:, :, 0].astype(logits.dtype), 1)  # g e: tokens whose first choice it is
    balance = experts * jnp.mean(jnp.sum(share * jnp.mean(probabilities, 1), -1))
    return dispatch, combine, balance


class Experts(nn.Module):
    """Router and feed-forward experts. Sows its load-balancing loss into the collection ``losses``."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # g s d -> g s d
        c = self.config
        init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        up = self.param("up", init, (c.experts, c.hidden, 4 * c.hidden), c.param_dtype)
        down = self.param("down", init, (c.experts, 4 * c.hidden, c.hidden), c.param_dtype)
        exact = jnp.promote_types(c.param_dtype, jnp.float32)  # routing is decided in float32 at least
        logits = nn.Dense(c.experts, use_bias=False, dtype=exact, param_dtype=c.param_dtype, name="router")(x)
        dispatch, combine, balance = route(logits, c.top_k, c.capacity)
        self.sow("losses", "balance", c.balance * balance, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros((), exact))
        x, up, down, dispatch, combine = promote_dtype(x, up, down, dispatch, combine, dtype=c.dtype or x.dtype)
        x = jnp.einsum("gsec,gsd->egcd", dispatch, x)
        x = nn.gelu(jnp.einsum("egcd,edf->egcf", x, up))
        x = jnp.einsum("egcf,efd->egcd", x, down)
        return jnp.einsum("gsec,egcd->gsd", combine, x)


class Block(nn.Module):
    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:  # b s d -> b s d
        c = self.config
        norm = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        x = x + Attention(c, name="attn")(nn.LayerNorm(name="norm1", **norm)(x), train)
        y = Experts(c, name="experts")(nn.LayerNorm(name="norm2", **norm)(x))
        return x + nn.Dropout(c.dropout, deterministic=not train)(y)


class MoE(nn.Module):
    """Next-token logits, in float32 at least."""

    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:  # b s -> b s v
        c = self.config
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        embed = nn.Embed(c.vocabulary, c.hidden, name="embed", **kinds)
        x = embed(tokens) + nn.Embed(c.sequence, c.hidden, name="position", **kinds)(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(c.dropout, deterministic=not train)(x)
        for i in range(c.layers):
            x = Block(c, name=f"block_{i}")(x, train)
        logits = embed.attend(nn.LayerNorm(name="norm", **kinds)(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
