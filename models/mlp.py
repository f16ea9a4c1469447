"""A plain multi-layer perceptron: Dense and relu. Shapes: b batch, d in, h hidden, o out."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class MLP(nn.Module):
    """``layers`` Dense layers, relu between them, dropout before the last."""

    hidden: int = 256
    layers: int = 6
    out: int = 16
    dropout: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:  # b d -> b o
        kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        for i in range(self.layers - 1):
            x = nn.relu(nn.Dense(self.hidden, name=f"layer_{i}", **kinds)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.out, name=f"layer_{self.layers - 1}", **kinds)(x)
