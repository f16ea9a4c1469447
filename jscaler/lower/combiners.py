"""What joins value shares: between devices, on one device, and what leaves a value as it is."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jscaler.ir.mask import Combiner

REDUCE: dict[Combiner, Callable[..., Any]] = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}
REDUCE_LOCAL: dict[Combiner, Callable[..., Any]] = {"add": jnp.sum, "max": jnp.max, "min": jnp.min}


def neutral(combiner: Combiner, dtype: Any) -> Any:
    """What leaves any value of ``dtype`` unchanged under ``combiner``."""
    if combiner == "add":
        return jnp.zeros((), dtype)
    low = combiner == "max"
    if dtype == jnp.bool_:
        return jnp.asarray(not low)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    if inexact and np.isinf(np.asarray(math.inf).astype(dtype)):  # some 8-bit floats have no infinity
        return jnp.asarray(-math.inf if low else math.inf, dtype)
    limits = jnp.finfo(dtype) if inexact else jnp.iinfo(dtype)
    return jnp.asarray(limits.min if low else limits.max, dtype)
