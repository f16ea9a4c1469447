"""What joins value shares: between devices, and on one device."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jscaler.ir.mask import Combiner
from jscaler.rules.neutral import neutral

__all__ = ["REDUCE", "REDUCE_LOCAL", "neutral"]

REDUCE: dict[Combiner, Callable[..., Any]] = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}
REDUCE_LOCAL: dict[Combiner, Callable[..., Any]] = {"add": jnp.sum, "max": jnp.max, "min": jnp.min}
