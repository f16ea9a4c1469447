"""Train steps of axial models for tests: a small Evoformer, and a transformer over images that nobody of us named."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from plan_steps import TX, Step, made_once, with_arguments

import jscaler
from models.alignments import alignment_at
from models.evoformer import SIZES, Evoformer
from models.training import evoformer_loss


@made_once
def evoformer(rows: int = 2, layers: int = 1, recycles: int = 0, **changes: Any) -> tuple[Step, tuple[Any, Any]]:
    """The smallest Evoformer, with dropout, in float64 where that is enabled."""
    sizes = {"layers": layers, "recycles": recycles, "param_dtype": jnp.zeros(()).dtype, **changes}
    config = dataclasses.replace(SIZES["nano"], **sizes)
    model, batch = Evoformer(config), alignment_at(0, rows, config.sequences, config.residues, config.bins)

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jscaler.value_and_grad(lambda p: evoformer_loss(model.apply, p, batch, jax.random.key(7)))(
            state["params"]
        )
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    shapes = jax.eval_shape(model.init, jax.random.key(0), batch["msa"], batch["target"])["params"]
    draws = np.random.default_rng(1)
    params = jax.tree.map(lambda p: jnp.asarray(draws.normal(size=p.shape) * 0.3, p.dtype), shapes)
    return step, ({"params": params, "opt": TX.init(params)}, batch)


class AxialImages(nn.Module):
    """Flax's own attention along the height and the width in turn, channels in front of neither; patches by a reshape."""

    layers: int = 2
    merged: bool = False

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:  # n c H W -> n classes
        kinds = {"param_dtype": jnp.zeros(()).dtype}
        n, c, high, wide = pixels.shape
        tiles = pixels.reshape(n, c, high // 2, 2, wide // 2, 2).transpose(4, 0, 2, 1, 3, 5)  # w n h c 2 2: an odd order
        grid = nn.Dense(8, name="patches", **kinds)(tiles.reshape(wide // 2, n, high // 2, 4 * c))
        for i in range(self.layers):
            for name, order in (("down", (0, 1, 2, 3)), ("across", (2, 1, 0, 3))):
                here = nn.LayerNorm(**kinds)(grid).transpose(order)
                shape = here.shape
                here = here.reshape(-1, *shape[2:]) if self.merged else here
                seen = nn.MultiHeadDotProductAttention(2, name=f"{name}_{i}", **kinds)(here)
                grid = grid + seen.reshape(shape).transpose(order)
            grid = grid + nn.Dense(8, **kinds)(nn.gelu(nn.Dense(16, **kinds)(nn.LayerNorm(**kinds)(grid))))
        return nn.Dense(3, name="classes", **kinds)(grid.mean((0, 2)))


@made_once
def axial_images(**changes: Any) -> tuple[Step, tuple[Any, Any]]:
    draws = np.random.default_rng(0)
    pixels = np.asarray(draws.normal(size=(2, 3, 16, 16)), jnp.zeros(()).dtype)
    return with_arguments(AxialImages(**changes), TX, {"x": pixels, "labels": np.array([0, 2])}, pixels)
