"""What leaves any value as it is under a combiner: zero, the lowest or the highest."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jscaler.ir.mask import Combiner


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
