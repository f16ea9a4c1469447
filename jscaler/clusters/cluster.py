"""``Cluster``: hosts of devices, and the α–β model of the links inside a host and between hosts.

Hosts of several kinds, or of several sizes, are an `UnlikeCluster` (``clusters.unlike``).
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jscaler.clusters.cost_model import Line
from jscaler.clusters.device import DeviceKind
from jscaler.clusters.link import Link, is_positive, usual_links
from jscaler.clusters.transition_kinds import COLLECTIVES
from jscaler.errors import DeviceError, shown

MOST_DEVICES = 1 << 20  # arrays of all devices are made


@dataclass(frozen=True)
class Cluster:
    """Equal hosts of equal devices; device d sits on host ``d // devices_per_host``.

    Attributes:
        inside: the link of each device to the others of its host.
        between: the link of each host to the others, shared by its devices.
        memory: bytes of each device; the kind's own when left out.
        device: what the devices are, where that is said.
    """

    name: str
    hosts: int
    devices_per_host: int
    inside: Link
    between: Link
    memory: int = 0
    device: DeviceKind | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, DeviceKind | None) or not all(
            isinstance(x, Link) for x in (self.inside, self.between)
        ):
            raise DeviceError(
                f"cluster '{self.name}' has two Links and a DeviceKind or None, not {shown(self.inside)}, "
                f"{shown(self.between)} and {shown(self.device)}"
            )
        if self.device is not None and not self.memory:
            object.__setattr__(self, "memory", self.device.memory)
        if not (self.memory == 0 or is_positive(self.memory, int)):
            raise DeviceError(f"cluster '{self.name}' has devices of {shown(self.memory)} bytes; give a whole number")
        if not (is_positive(self.hosts, int) and is_positive(self.devices_per_host, int)):
            raise DeviceError(
                f"cluster '{self.name}' has {self.hosts!r} hosts of {self.devices_per_host!r} devices; give 1 or more"
            )
        if self.num_devices > MOST_DEVICES:
            raise DeviceError(f"cluster '{self.name}' has {self.num_devices} devices; give at most {MOST_DEVICES}")

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @property
    def interference(self) -> float:
        """How many times as long arithmetic takes beside communication; 1 where nobody says."""
        reached = self.device.reached if self.device is not None else None
        return 1.0 if reached is None else reached.interference

    @property
    def local_step(self) -> float:
        return 1e-9

    @property
    def kinds(self) -> "tuple[Cluster, ...]":
        """The equal hosts of each kind, as clusters; devices are numbered kind by kind."""
        return (self,)

    def of(self, devices: Iterable[int]) -> "Cluster":
        """What a group of devices is. Its ``device`` is the slowest kind there, its ``memory`` the smallest."""
        return self

    def alone(self) -> "Cluster":
        """One device."""
        return replace(self, hosts=1, devices_per_host=1)

    def hosts_of(self, devices: np.ndarray) -> np.ndarray:
        """The host of each device, numbered from 0."""
        return devices // self.devices_per_host

    def spans_hosts(self, devices: Iterable[int]) -> bool:
        """Whether these lie on several hosts."""
        return len(np.unique(self.hosts_of(np.array([*devices])))) > 1

    def described_hosts(self) -> str:
        """``4 hosts of 8 NVIDIA H200``; of one host ``8 NVIDIA H200``."""
        hosts = f"{self.hosts} hosts of {self.devices_per_host}" if self.hosts > 1 else f"{self.num_devices}"
        return f"{hosts} {self.device.description if self.device is not None else 'devices'}"

    def at_peaks(self) -> "Cluster":
        """The same, whose seconds are bounds: devices at the peaks of their data sheets, usual links at their line rate.
        Links that were measured stay.

        Example:
            >>> a100 = find_cluster("a100")
            >>> a100.at_peaks().inside.bandwidth, a100.inside.bandwidth
            (300000000000.0, 231000000000.0)
        """
        if self.device is None:
            return self
        bound = self.device.at_peaks()
        reached, rates = (usual_links(kind, self.devices_per_host) or () for kind in (self.device, bound))
        line_rate = dict(zip(reached, rates, strict=True))
        inside, between = (line_rate.get(link, link) for link in (self.inside, self.between))
        return replace(self, inside=inside, between=between, device=bound)

    def collective(self, kind: str, groups: np.ndarray) -> Line:
        """Seconds against the bytes that each member sends; all groups run at once and share their hosts' networks.

        A group that spans hosts pays ``between.latency`` for each of its steps, one inside a host ``inside.latency``.
        """
        steps = COLLECTIVES[kind].steps(groups.shape[1])
        if steps == 0:
            return Line(self.local_step, 0.0)
        crossing = self.crossing(kind, groups)
        if crossing == 0:
            return Line(self.local_step + steps * self.inside.latency, 1 / self.inside.bandwidth)
        slowest = max(1 / self.inside.bandwidth, crossing / self.between.bandwidth)
        hosts = self.hosts_of(groups)
        within = bool((hosts == hosts[:, :1]).all(1).any())
        latency = max(self.between.latency, self.inside.latency if within else 0.0)
        return Line(self.local_step + steps * latency, slowest)

    def crossing(self, kind: str, groups: np.ndarray) -> float:
        """Bytes that leave the busiest host, as a multiple of what each member sends."""
        _, hosts, leaving = self.leaving(kind, groups)
        return float(np.bincount(hosts, leaving).max()) if len(hosts) else 0.0

    def leaving(self, kind: str, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each group that spans hosts and each of its hosts: the group's number, the host, and the bytes that leave it,
        as a multiple of what each member sends."""
        hosts = self.hosts_of(groups)
        (numbers,) = (hosts != hosts[:, :1]).any(1).nonzero()
        width, members = int(hosts.max(initial=0)) + 1, groups.shape[1]
        found, counts = np.unique(numbers[:, None] * width + hosts[numbers], return_counts=True)  # members on each host
        to_all = COLLECTIVES[kind].to_all  # a ring enters and leaves each host once
        sends = counts * (members - counts) / (members - 1) if to_all else np.ones(len(counts))
        return found // width, found % width, sends

    def messages(self, pairs: np.ndarray, nbytes: float, num_devices: int) -> float:
        """Seconds of one round in which each device sends and receives at most once."""
        if not len(pairs):
            return self.local_step
        hosts = self.hosts_of(pairs)
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

    def renumbered(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The same of them on one host, which is all that links depend on; hosts in the order in which they occur."""
        hosts: dict[int, itertools.count[int]] = {}
        for device in devices:
            host = device // self.devices_per_host
            hosts.setdefault(host, itertools.count(len(hosts) * self.devices_per_host))
        return tuple(next(hosts[device // self.devices_per_host]) for device in devices)

    def __str__(self) -> str:
        return self.name
