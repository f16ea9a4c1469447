"""Clusters that are described, not present: compile-only CUDA devices, to check what XLA makes of a plan without a GPU.

A described device has a kind and a place in its cluster, but runs nothing: ``jax.jit(f).lower(structs).compile()`` over
a mesh of them gives the HLO text and the memory of each device. Needs ``pip install "jscaler[aot]"``: JAX's CUDA plugin
and ``ptxas``, no driver, and no other CUDA library.
"""

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from jscaler.errors import DeviceError, near_names

Device = Any  # jax.Device, which type checkers take for a variable


@dataclass(frozen=True)
class DeviceKind:
    """What XLA asks of a GPU before it compiles for it.

    Attributes:
        description: the name that the driver reports.
        capability: CUDA compute capability, major and minor.
        num_cores: streaming multiprocessors, each with ``fpus_per_core`` float32 units and ``shared_per_core`` bytes of
            shared memory, of which one block may take ``shared_per_block`` when it asks for it.
        memory: bytes that the driver offers to programs, less than the name promises.
        bandwidth: of the memory, bytes per second.
        l2_cache: bytes.
        clock: boost clock, GHz.
    """

    description: str
    capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    shared_per_core: int
    shared_per_block: int
    memory: int
    bandwidth: int
    l2_cache: int
    clock: float

    def config(self) -> str:
        """The description in XLA's text format (a ``GpuTargetConfigProto``)."""
        major, minor = self.capability
        fields = {
            "core_count": self.num_cores,
            "fpus_per_core": self.fpus_per_core,
            "shared_memory_per_core": self.shared_per_core,
            "shared_memory_per_block_optin": self.shared_per_block,
            "device_memory_size": self.memory,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2_cache,
            "clock_rate_ghz": self.clock,
            **_EVERY_GPU,
        }
        info = " ".join(f"{name}: {value}" for name, value in fields.items())
        return (
            f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 } '
            f'device_description_str: "{self.description}"'
        )


_EVERY_GPU = {  # the same from compute capability 7.0 to 9.0
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 48 << 10,
    "registers_per_core_limit": 1 << 16,
    "registers_per_block_limit": 1 << 16,
    "block_dim_limit_x": (1 << 31) - 1,
    "block_dim_limit_y": (1 << 16) - 1,
    "block_dim_limit_z": (1 << 16) - 1,
}
# Cores, memory and caches: the vendor's data sheets of the SXM boards. Memory: what the driver reports on such a board.
# fmt: off
_VOLTA = ((7, 0), 80, 64, 96 << 10, 96 << 10)
_AMPERE = ((8, 0), 108, 64, 164 << 10, 163 << 10)
_HOPPER = ((9, 0), 132, 128, 228 << 10, 227 << 10)
DEVICE_KINDS = {
    "V100-16GB": DeviceKind("Tesla V100-SXM2-16GB", *_VOLTA, 16_935_682_048, 900_000_000_000, 6 << 20, 1.53),
    "V100-32GB": DeviceKind("Tesla V100-SXM3-32GB", *_VOLTA, 34_089_730_048, 900_000_000_000, 6 << 20, 1.53),
    "A100-40GB": DeviceKind("NVIDIA A100-SXM4-40GB", *_AMPERE, 42_298_834_944, 1_555_000_000_000, 40 << 20, 1.41),
    "A100-80GB": DeviceKind("NVIDIA A100-SXM4-80GB", *_AMPERE, 85_100_068_864, 2_039_000_000_000, 40 << 20, 1.41),
    "H100-80GB": DeviceKind("NVIDIA H100 80GB HBM3", *_HOPPER, 84_929_347_584, 3_352_320_000_000, 50 << 20, 1.98),
    "H200-141GB": DeviceKind("NVIDIA H200", *_HOPPER, 151_397_597_184, 4_800_000_000_000, 50 << 20, 1.98),
}
# fmt: on

_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_REMEDY = 'pip install "jscaler[aot]"'


def described_devices(cluster: str) -> list[Device]:
    """Compile-only devices of a CUDA cluster that need not exist; the same objects for the same description.

    JAX's CUDA plugin looks for a driver when it loads, and refuses to load without one unless the environment variable
    ``JAX_SKIP_CUDA_CONSTRAINTS_CHECK`` is set or ``JAX_PLATFORMS`` leaves CUDA out. The variable is set during this
    call only; that is enough if the call comes before JAX's first computation (later, JAX has looked for plugins).

    Args:
        cluster: ``"8xH100-80GB"``, one host, or ``"4x8xV100-32GB"``, hosts × devices of each × kind.

    Returns:
        the devices, host by host: device d of n per host has ``process_index == d // n``.

    Raises:
        DeviceError: the description is malformed or names no kind of ``DEVICE_KINDS``; the plugin is missing or did not
            load; the installed compiler makes no code for the kind.

    Example:
        >>> mesh = jax.sharding.Mesh(described_devices("8xH100-80GB"), ("data",))
        >>> batch = jax.ShapeDtypeStruct((64, 8), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
        >>> "all-reduce" in jax.jit(jax.numpy.sum).lower(batch).compile().as_text()
        True
    """
    return list(_devices(*_parsed(cluster)))


def _parsed(cluster: str) -> tuple[int, int, str]:
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([A-Za-z]\S*)", cluster)
    if not match:
        raise DeviceError(
            f"'{cluster}' describes no cluster; write devices x kind or hosts x devices-per-host x kind, such as "
            "'8xH100-80GB' or '4x8xV100-32GB'"
        )
    kind = match[3]
    if kind not in DEVICE_KINDS:
        near = near_names(kind, list(DEVICE_KINDS))
        hint = f"; did you mean '{near[0]}'?" if near else ";"
        raise DeviceError(f"no device kind named '{kind}' in '{cluster}'{hint} known: {', '.join(DEVICE_KINDS)}")
    return int(match[1] or 1), int(match[2]), kind


@functools.cache
def _devices(hosts: int, per_host: int, kind: str) -> tuple[Device, ...]:
    config = DEVICE_KINDS[kind].config()
    try:
        with _without_driver():
            topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x{hosts}x{per_host}")
    except NotImplementedError as error:
        raise DeviceError(_why_no_plugin()) from error
    _refuse_unless_compiled(kind, topology.devices[0])
    return tuple(topology.devices)


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
    if not any(_installed(name) for name in _PLUGINS):
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


def _refuse_unless_compiled(kind: str, device: Device) -> None:
    """Compile one small kernel: what ptxas supports is known to nobody else (0.05 s, once per kind and shape)."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    vector = jax.ShapeDtypeStruct((1024,), "float32", sharding=sharding)
    try:
        jax.jit(lambda x: x + x).lower(vector).compile()
    except jax.errors.JaxRuntimeError as error:
        major, minor = DEVICE_KINDS[kind].capability
        raise DeviceError(
            f"the installed CUDA compiler makes no code for {kind} (compute capability {major}.{minor}): "
            f"{str(error).splitlines()[0].rstrip('.')}; the compiler of CUDA 12 knows all built-in kinds: {_REMEDY}"
        ) from error
