"""What a variable or literal of a jaxpr looks like."""

from typing import Any

from jax.extend import core

Atom = core.Var | core.Literal


def shape(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(atom.aval.shape)


def dtype(atom: Any) -> Any:
    """The dtype of a variable or literal."""
    return atom.aval.dtype
