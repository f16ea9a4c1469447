"""What jscaler knows of the primitives of JAX: one record each, by family."""

from jscaler.lax_primitives.known import REGISTRY, TABLE, contracts, is_cast, is_fence, known, may_merge, named
from jscaler.lax_primitives.primitive import Part, Primitive, Windows
from jscaler.lax_primitives.spec import Dims, Label, Spec, Window

__all__ = [
    "REGISTRY",
    "TABLE",
    "Dims",
    "Label",
    "Part",
    "Primitive",
    "Spec",
    "Window",
    "Windows",
    "contracts",
    "is_cast",
    "is_fence",
    "known",
    "may_merge",
    "named",
]
