"""The devices that a step is asked to run on: how many, or which; and which of them are this process's."""

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jscaler.clusters.cluster import MOST_DEVICES
from jscaler.errors import DeviceError, shown

Device = Any  # jax.Device, which type checkers take for a variable
Devices = int | Sequence[Device] | None


def resolve_devices(devices: Devices) -> list[Device]:
    """The devices asked for.

    Raises:
        DeviceError: there are fewer.
    """
    if devices is None:
        return list(jax.devices())
    if _is_number(devices):
        at_hand = jax.devices()
        if devices < 1:
            raise DeviceError(f"{devices} devices are asked for; ask for 1 to {len(at_hand)}")
        if devices > len(at_hand):
            raise DeviceError(
                f"{devices} devices are asked for and {len(at_hand)} are at hand ({at_hand[0].platform}); ask for 1 to "
                f"{len(at_hand)}, or make virtual CPU devices with jax.config.update('jax_num_cpu_devices', {devices}) "
                "before JAX is first used (`--platform cpu` on the command line)"
            )
        return list(at_hand[:devices])
    chosen = list(devices) if isinstance(devices, Sequence | np.ndarray) else None  # a set has no order
    if chosen is None or not all(hasattr(d, "platform") for d in chosen):
        raise DeviceError(f"devices are a number or a list of jax.Device, not {shown(devices)}")
    if len(set(chosen)) < len(chosen) or not chosen:
        raise DeviceError(f"devices are one or more, each once, not {chosen}")
    return chosen


def devices_at_hand(devices: Devices) -> tuple[int, tuple[Device, ...]]:
    """How many devices are asked for, and which; none where there are fewer."""
    if _is_number(devices) and devices > len(jax.devices()):
        if devices > MOST_DEVICES:
            raise DeviceError(f"{devices} devices are asked for; ask for at most {MOST_DEVICES}")
        return int(devices), ()
    found = resolve_devices(devices)
    return len(found), tuple(found)


def _is_number(devices: Any) -> TypeGuard[int]:
    return isinstance(devices, (int, np.integer)) and not isinstance(devices, bool)


def by_gloo(devices: Sequence[Device]) -> bool:
    """Whether XLA hands collectives between ``devices`` to gloo: CPUs of a job of several processes."""
    return bool(devices) and devices[0].platform == "cpu" and jax.process_count() > 1


def is_here(device: Device) -> bool:
    """Whether this process runs it."""
    return device.process_index == jax.process_index()


def devices_of(sharding: Any) -> tuple[Device, ...]:
    """The devices of a sharding, in the order of its mesh."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else tuple(sharding.device_set)


@functools.lru_cache(maxsize=1024)
def own_devices(sharding: Any) -> tuple[Device, ...]:
    """Those of this process."""
    return tuple(filter(is_here, devices_of(sharding)))
