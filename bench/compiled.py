"""Compiling for one device, present or described, and what XLA then says of memory."""

from collections.abc import Callable
from typing import Any

import jax


def jitted(fun: Callable[..., Any], arguments: Any, device: Any, **keywords: Any) -> Any:
    """``jax.jit(fun)`` lowered for a device and arguments of which only the shapes count; ``keywords`` are ``jit``'s."""
    here = jax.sharding.SingleDeviceSharding(device)
    structs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), arguments)
    return jax.jit(fun, **keywords).lower(*structs)


def peak_bytes(compiled: Any) -> int:
    """Bytes that XLA reserves: arguments, results that take no argument's place, temporaries."""
    from jscaler.report.target_report import xla_bytes

    sizes = xla_bytes(compiled.memory_analysis())
    return sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]


def temporaries(compiled: Any) -> int:
    """MiB beside arguments and results, rounded down."""
    return compiled.memory_analysis().temp_size_in_bytes // 2**20
