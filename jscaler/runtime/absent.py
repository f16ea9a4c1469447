"""Arrays that lie on other processes' devices alone: this process has their types, and nothing of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jscaler.runtime.devices import own_devices


def is_absent(sharding: Any) -> bool:
    """Whether this process has nothing of an array that lies so."""
    return not own_devices(sharding)


def absent(avals: Sequence[Any], shardings: Sequence[Any]) -> list[jax.Array]:
    """An array of each type under each sharding, none of which has a device of this process.

    They are what a program on those devices would return here; it runs nowhere. So weak types and keys are theirs.
    """
    by_devices: dict[frozenset[Any], list[int]] = {}
    for number, sharding in enumerate(shardings):
        by_devices.setdefault(frozenset(sharding.device_set), []).append(number)
    found: list[Any] = [None] * len(shardings)
    for numbers in by_devices.values():
        own = [avals[i] for i in numbers]
        made = jax.jit(lambda own=own: list(map(zeros, own)), out_shardings=[shardings[i] for i in numbers])()
        for number, array in zip(numbers, made, strict=True):
            found[number] = array
    return found


def zeros(aval: Any) -> Any:
    """An array of a type, of keys too, and weak where it is."""
    if getattr(aval, "weak_type", False):
        return jnp.broadcast_to(aval.dtype.type(0).item(), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)
