"""``PTensor``: a logical whole tensor of the captured program. Never split; ops view parts of it as VTensors."""

import math
from dataclasses import dataclass, field
from typing import Any

Role = str  # "input" | "constant" | "activation" | "gradient" | "residual"


@dataclass(frozen=True)
class PTensor:
    """A whole tensor: parameter, input, activation, gradient or optimizer state.

    Attributes:
        name: unique in its graph, e.g. ``state/params/block_0/mlp/up/kernel`` or ``block_0/mlp/up/dot:0``.
        aval: JAX's abstract value: shape, dtype and weak type.
        role: where the tensor comes from.
    """

    name: str
    aval: Any = field(compare=False, repr=False)
    role: Role = field(default="activation", compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element; a PRNG key counts as the eight bytes of a threefry key."""
        return getattr(self.dtype, "itemsize", 8)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def type(self) -> str:
        """Its dtype and shape: ``f32[4,8]``."""
        return self.aval.str_short(short_dtypes=True)

    def __hash__(self) -> int:  # tables of tensors are asked all the time
        return hash(self.name)

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"
