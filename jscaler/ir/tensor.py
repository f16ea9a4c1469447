"""``PTensor``: a logical whole tensor of the captured program. Never split; ops view parts of it as VTensors."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

Role = str  # "input" | "constant" | "activation" | "gradient" | "residual"


@dataclass(frozen=True, eq=False, slots=True)
class PTensor(str):
    """A whole tensor: parameter, input, activation, gradient or optimizer state.

    It is its name, as far as tables are concerned: of each graph planning asks tables of tensors hundreds of thousands of
    times, and text has its hash at hand.

    Attributes:
        name: unique in its graph, e.g. ``state/params/block_0/mlp/up/kernel`` or ``block_0/mlp/up/dot:0``.
        aval: JAX's abstract value: shape, dtype and weak type.
        role: where the tensor comes from.
    """

    name: str
    aval: Any = field(repr=False)
    role: Role = "activation"

    def __new__(cls, name: str, *_: Any, **__: Any) -> Self:
        return str.__new__(cls, name)

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

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"
