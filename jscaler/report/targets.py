"""Clusters that are described, not present: compile-only CUDA devices, to check what XLA makes of a plan without a GPU.

A described device has a kind and a place in its cluster, but runs nothing: ``jax.jit(f).lower(structs).compile()`` over
a mesh of them gives the HLO text and the memory of each device. Needs ``pip install "jscaler[aot]"``: JAX's CUDA plugin
and ``ptxas``, no driver, and no other CUDA library.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jscaler.clusters import Cluster, DeviceKind, find_cluster
from jscaler.errors import DeviceError

Device = Any  # jax.Device, which type checkers take for a variable


_EVERY_GPU: dict[str, int] = {  # the same from compute capability 7.0 to 9.0
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 << 10,
    "registers_per_core_limit": 1 << 16,
    "registers_per_block_limit": 1 << 16,
    "block_dim_limit_x": (1 << 31) - 1,
    "block_dim_limit_y": (1 << 16) - 1,
    "block_dim_limit_z": (1 << 16) - 1,
}
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_REMEDY = 'pip install "jscaler[aot]"'


def described_devices(cluster: str | os.PathLike[str] | Cluster) -> list[Device]:
    """Compile-only devices of a CUDA cluster that need not exist; the same objects for the same description.

    JAX's CUDA plugin looks for a driver when it loads, and refuses to load without one unless the environment variable
    ``JAX_SKIP_CUDA_CONSTRAINTS_CHECK`` is set or ``JAX_PLATFORMS`` leaves CUDA out. The variable is set during this
    call only; that is enough if the call comes before JAX's first computation (later, JAX has looked for plugins).

    Args:
        cluster: ``"8xH100-80GB"``, one host, or ``"4x8xV100-32GB"``, hosts × devices of each × kind; or whatever else
            ``find_cluster`` takes, a TOML file of one's own included; or a `Cluster` that says its device kind.

    Returns:
        the devices, host by host: device d of n per host has ``process_index == d // n``. Those of several kinds are in no
        mesh together.

    Raises:
        UnknownNameError: no such cluster or device kind.
        DeviceError: the cluster says no device kind; the plugin is missing or did not load; the installed compiler makes
            no code for the kind.

    Example:
        >>> mesh = jax.sharding.Mesh(described_devices("8xH100-80GB"), ("data",))
        >>> batch = jax.ShapeDtypeStruct((64, 8), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
        >>> "all-reduce" in jax.jit(jax.numpy.sum).lower(batch).compile().as_text()
        True
    """
    found = cluster if isinstance(cluster, Cluster) else find_cluster(cluster)
    kinds = [device_kind(found.of([device])) for device in range(found.num_devices)]
    described = {kind: described_as(found, kind) for kind in kinds}
    return [described[kind][device] for device, kind in enumerate(kinds)]


def described_as(cluster: Cluster, kind: DeviceKind) -> list[Device]:
    """The devices of a cluster as they would be if all were of one kind; raises as `described_devices`."""
    every = _devices(cluster.hosts, cluster.devices_per_host, kind)
    hosts = cluster.hosts_of(np.arange(cluster.num_devices))
    on_host = np.arange(len(hosts)) - np.searchsorted(hosts, hosts)  # smaller hosts have the first devices of the largest
    return [every[host * cluster.devices_per_host + number] for host, number in zip(hosts, on_host, strict=True)]


def plugin_installed() -> bool:
    """Whether JAX's CUDA plugin is installed, which describes devices."""
    return any(map(_installed, _PLUGINS))


def device_kind(cluster: Cluster) -> DeviceKind:
    """What a cluster's devices are, with the cluster's memory; of several kinds the slowest.

    Raises:
        DeviceError: the cluster does not say it of all.
    """
    if cluster.device is None:
        raise DeviceError(
            f"cluster '{cluster.name}' does not say what its devices are; give one that does, such as 8xH100-80GB, or "
            'write device = "H100-80GB" or a table [device] into its file'
        )
    return dataclasses.replace(cluster.device, memory=cluster.memory)


@functools.cache
def _devices(hosts: int, per_host: int, kind: DeviceKind) -> tuple[Device, ...]:
    try:
        with _without_driver():
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=_config(kind), topology=f"1x{hosts}x{per_host}"
            )
    except NotImplementedError as error:
        raise DeviceError(_why_no_plugin()) from error
    _refuse_unless_compiled(kind, topology.devices[0])
    return tuple(topology.devices)


def _config(kind: DeviceKind) -> str:
    """A device in XLA's text format (a ``GpuTargetConfigProto``)."""
    major, minor = kind.capability
    fields = {
        "core_count": kind.num_cores,
        "fpus_per_core": kind.fpus_per_core,
        "threads_per_core_limit": kind.threads_per_core,
        "shared_memory_per_core": kind.shared_per_core,
        "shared_memory_per_block_optin": kind.shared_per_block,
        "device_memory_size": kind.memory,
        "memory_bandwidth": int(kind.bandwidth),
        "l2_cache_size": kind.l2_cache,
        "clock_rate_ghz": kind.clock,
        **_EVERY_GPU,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 } '
        f"device_description_str: {json.dumps(kind.description)}"
    )


@contextlib.contextmanager
def _without_driver() -> Iterator[None]:
    """Let the CUDA plugin load where there is no driver."""
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before


def _why_no_plugin() -> str:
    if not plugin_installed():
        return f"compiling for CUDA needs JAX's CUDA plugin, which is not installed: {_REMEDY}"
    return (
        "JAX's CUDA plugin is installed but did not load: JAX looked for plugins before this call and found no driver. "
        f"Describe devices before the first computation, or set {_SKIP_CHECK}=1 or JAX_PLATFORMS=cpu in the environment"
    )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package of plugins
        return False


def _refuse_unless_compiled(kind: DeviceKind, device: Device) -> None:
    """Compile one small kernel: what ptxas supports is known to nobody else (0.05 s, once per kind and shape)."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    vector = jax.ShapeDtypeStruct((1024,), "float32", sharding=sharding)
    try:
        jax.jit(lambda x: x + x).lower(vector).compile()
    except jax.errors.JaxRuntimeError as error:
        major, minor = kind.capability
        raise DeviceError(
            f"the installed CUDA compiler makes no code for {kind} (compute capability {major}.{minor}): "
            f"{str(error).splitlines()[0].rstrip('.')}; the compiler of CUDA 12 knows all built-in kinds: {_REMEDY}"
        ) from error
