"""A plain multi-layer perceptron: Dense and relu. Shapes: b batch, d in, h hidden, o out."""

import flax.linen as nn
import jax


class MLP(nn.Module):
    """``layers`` Dense layers, relu between them, dropout before the last."""

    hidden: int = 256
    layers: int = 6
    out: int = 16
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:  # b d -> b o
        for i in range(self.layers - 1):
            x = nn.relu(nn.Dense(self.hidden, name=f"layer_{i}")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.out, name=f"layer_{self.layers - 1}")(x)
