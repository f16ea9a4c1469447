"""What a plan may say of gradients: the dtype in which they are added, and what a backward reads."""

from typing import Any

import jax
import jax.numpy as jnp

from jscaler.errors import PlanError
from jscaler.ir import Op


def summing_dtype(dtype: Any) -> str:
    """The name of a dtype in which gradients can be added between devices.

    Raises:
        PlanError: not a floating dtype, or one of 64 bits where JAX has none.
    """
    try:
        known = jnp.dtype(dtype) if dtype is not None else None
    except (TypeError, ValueError):  # numpy's, of what is no description of a dtype
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise PlanError(f"reduce_dtype is a floating dtype like 'bfloat16', not {dtype!r}")
    if jax.dtypes.canonicalize_dtype(known) != known:
        raise PlanError(f"reduce_dtype {known.name} needs jax.config.update('jax_enable_x64', True)")
    return known.name


def check_residuals(op: Op) -> None:
    """Raises PlanError where no gradient flows through ``op``, so that nothing is kept for its backward."""
    if op.kind != "forward" or op.backward is None:
        raise PlanError(f"'{op.path}' is a {op.kind} op without a backward, so it has no residuals to speak of")
