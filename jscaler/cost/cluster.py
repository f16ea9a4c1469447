"""``Cluster``: hosts of devices, and the α–β model of the links inside a host and between hosts.

Bandwidths are of public data sheets, one direction: NVLink per device, the network per host (all its devices share it).
Latencies of the GPU clusters are assumed; ``jscaler bench-comm`` measures both. docs/clusters.md lists the sources.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jscaler.cost.model import Line
from jscaler.cost.table import COLLECTIVES
from jscaler.errors import DeviceError, UnknownNameError


@dataclass(frozen=True)
class Link:
    """One class of links.

    Attributes:
        latency: α, seconds per step of a collective.
        bandwidth: 1/β, bytes per second in one direction.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Equal hosts of equal devices; device d sits on host ``d // devices_per_host``.

    Attributes:
        inside: the link of each device to the others of its host.
        between: the link of each host to the others, shared by its devices.
        memory: bytes of each device.
    """

    name: str
    hosts: int
    devices_per_host: int
    inside: Link
    between: Link
    memory: int = 0

    def __post_init__(self) -> None:
        if min(self.hosts, self.devices_per_host) < 1:
            raise DeviceError(
                f"cluster '{self.name}' has {self.hosts} hosts of {self.devices_per_host} devices; give 1 or more"
            )

    @property
    def local_step(self) -> float:
        return 1e-9

    def collective(self, kind: str, groups: np.ndarray) -> Line:
        """Seconds against the bytes that each member sends; all groups run at once and share their hosts' networks.

        A group that spans hosts pays ``between.latency`` for each of its steps.
        """
        steps = COLLECTIVES[kind].steps(groups.shape[1])
        if steps == 0:
            return Line(self.local_step, 0.0)
        crossing = self._crossing(kind, groups)
        if crossing == 0:
            return Line(self.local_step + steps * self.inside.latency, 1 / self.inside.bandwidth)
        slowest = max(1 / self.inside.bandwidth, crossing / self.between.bandwidth)
        return Line(self.local_step + steps * self.between.latency, slowest)

    def _crossing(self, kind: str, groups: np.ndarray) -> float:
        """Bytes that leave the busiest host, as a multiple of what each member sends."""
        hosts = groups // self.devices_per_host
        spanning = hosts[(hosts != hosts[:, :1]).any(1)]
        if not len(spanning):
            return 0.0
        width, members = int(spanning.max()) + 1, groups.shape[1]
        group = np.arange(len(spanning))[:, None]
        found, counts = np.unique(group * width + spanning, return_counts=True)  # members of each group on each host
        # a ring enters and leaves each host once; in an all-to-all each member sends to all others
        sends = counts * (members - counts) if kind == "all_to_all" else np.ones(len(counts))
        busiest = np.bincount(found % width, sends).max()
        return float(busiest / (members - 1) if kind == "all_to_all" else busiest)

    def messages(self, pairs: np.ndarray, nbytes: float, num_devices: int) -> float:
        """Seconds of one round in which each device sends and receives at most once."""
        if not len(pairs):
            return self.local_step
        hosts = pairs // self.devices_per_host
        across = hosts[hosts[:, 0] != hosts[:, 1]]
        if not len(across):
            return self.local_step + self.inside.latency + nbytes / self.inside.bandwidth
        busiest = max(np.bincount(across[:, side]).max() for side in (0, 1))
        slowest = max(1 / self.inside.bandwidth, busiest / self.between.bandwidth)
        return self.local_step + self.between.latency + slowest * nbytes

    def floor(self, nbytes: float) -> float:
        """One step, and every byte through its device's own link, also on its way to the host's network."""
        if nbytes <= 0:
            return 0.0
        return min(self.inside.latency, self.between.latency) + nbytes / self.inside.bandwidth

    def __str__(self) -> str:
        return self.name


_NVLINK2, _NVLINK3, _NVLINK4 = Link(10e-6, 150e9), Link(8e-6, 300e9), Link(7e-6, 450e9)
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        # 4 DGX-1-like hosts with one 100 Gb/s adapter each: the cluster of SuperScaler's and nnScaler's papers
        Cluster("v100-nvlink-ib100", 4, 8, _NVLINK2, Link(25e-6, 12.5e9), 34_089_730_048),
        Cluster("a100", 4, 8, _NVLINK3, Link(20e-6, 200e9), 80_000_000_000),  # DGX A100: 8 × 200 Gb/s
        Cluster("h100", 4, 8, _NVLINK4, Link(15e-6, 400e9), 80_000_000_000),  # DGX H100: 8 × 400 Gb/s
        Cluster("h200", 4, 8, _NVLINK4, Link(15e-6, 400e9), 141_000_000_000),  # DGX H200: 8 × 400 Gb/s
        # virtual devices of one process on two cores: bench-comm --rounds 12 said 44 µs and 1.55 GB/s
        Cluster("cpu", 1, 8, Link(45e-6, 1.5e9), Link(45e-6, 1.5e9)),
    )
}


def find_cluster(name: str) -> Cluster:
    """A built-in cluster by name, or one described in a TOML file by its path.

    Raises:
        UnknownNameError: neither, or a field of the file is unknown.
        DeviceError: the file cannot be read, or a field of it is missing or of the wrong kind.
    """
    if name.endswith(".toml"):
        return load_cluster(Path(name))
    if name not in CLUSTERS:
        raise UnknownNameError("cluster", name, CLUSTERS, " (or give the path of a .toml file)")
    return CLUSTERS[name]


def cluster_toml(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The text of a file that ``load_cluster`` reads back as an equal cluster; ``comments`` are lines at its head."""
    lines = [f"# {comment}" for comment in comments]
    lines.append(f"name = {json.dumps(cluster.name, ensure_ascii=False)}")
    lines += [f"{key} = {getattr(cluster, key)}" for key in ("hosts", "devices_per_host")]
    if cluster.memory:
        lines.append(f"memory = {cluster.memory}  # bytes per device")
    for key, owner in (("inside", "device"), ("between", "host")):
        link = getattr(cluster, key)
        lines += ["", f"[{key}]", f"latency = {link.latency!r}  # seconds per step"]
        lines.append(f"bandwidth = {link.bandwidth!r}  # bytes per second and {owner}")
    return "\n".join(lines) + "\n"


def load_cluster(path: Path) -> Cluster:
    """Read a cluster from TOML.

    Example::

        name = "lab"                   # the file's name when left out
        hosts = 2
        devices_per_host = 4
        memory = 25_769_803_776        # bytes per device; may be left out
        [inside]
        latency = 9e-6                 # seconds per step
        bandwidth = 25e9               # bytes per second and device
        [between]
        latency = 30e-6
        bandwidth = 12.5e9             # bytes per second and host

    Raises:
        DeviceError: the file cannot be read, or a field is missing or of the wrong kind.
        UnknownNameError: a field is unknown.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeviceError(
            f"cannot read the cluster file {path}: {error}; `jscaler bench-comm --out {path}` writes such a file"
        ) from None
    _refuse_unknown(path, table, ("name", "hosts", "devices_per_host", "memory", "inside", "between"), "")
    hosts, devices_per_host = (_number(path, table, key, int) for key in ("hosts", "devices_per_host"))
    inside, between = (_link(path, table, key) for key in ("inside", "between"))
    memory = _number(path, table, "memory", int) if "memory" in table else 0
    return Cluster(str(table.get("name", path.stem)), hosts, devices_per_host, inside, between, memory)


def _link(path: Path, table: dict[str, Any], key: str) -> Link:
    entry = table.get(key)
    if not isinstance(entry, dict):
        raise DeviceError(f"{path}: the table [{key}] with latency (seconds) and bandwidth (bytes/s) is missing")
    _refuse_unknown(path, entry, ("latency", "bandwidth"), f"{key}.")
    latency, bandwidth = (_number(path, entry, field, float, f"{key}.") for field in ("latency", "bandwidth"))
    return Link(latency, bandwidth)


def _number(path: Path, table: dict[str, Any], key: str, kind: type, where: str = "") -> Any:
    value: Any = table.get(key)
    legal = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if legal and 0 < value < math.inf:  # nan is not between them either
        return kind(value)
    found = "missing" if value is None else f"{value!r}"
    raise DeviceError(f"{path}: '{where}{key}' is {found}; give a positive {'whole ' * (kind is int)}number")


def _refuse_unknown(path: Path, table: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UnknownNameError("field", f"{where}{key}", [where + k for k in known], f" in {path}")
