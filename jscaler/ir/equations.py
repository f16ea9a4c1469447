"""What a variable or literal of a jaxpr looks like."""

import math
from typing import Any

from jax.extend import core

Atom = core.Var | core.Literal


def shape(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(atom.aval.shape)


def dtype(atom: Any) -> Any:
    """The dtype of a variable or literal."""
    return atom.aval.dtype


def nbytes(atom: Any) -> int:
    """Bytes of a variable or literal; a PRNG key whose type does not say counts as the eight of a threefry key."""
    return math.prod(shape(atom)) * getattr(dtype(atom), "itemsize", 8)
