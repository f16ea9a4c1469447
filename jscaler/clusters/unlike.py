"""``UnlikeCluster``: hosts of several kinds or sizes as one cluster; links between two kinds are the slower of both."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations, count

import numpy as np

from jscaler.clusters.cluster import Cluster
from jscaler.clusters.cost_model import Line
from jscaler.clusters.device import slowest
from jscaler.clusters.link import Link
from jscaler.clusters.transition_kinds import COLLECTIVES
from jscaler.errors import DeviceError

Across = tuple[tuple[int, int, Link], ...]


@dataclass(frozen=True)
class UnlikeCluster(Cluster):
    """Hosts of several kinds, made by `joined`. What it has as a `Cluster` is what any of its devices has: the slowest
    kind, the slowest links, the smallest memory, and the most devices of a host.

    Attributes:
        parts: the equal hosts of each kind.
        across: the links of a host to hosts of another kind, by the numbers of both kinds; else the slower of both.
    """

    parts: tuple[Cluster, ...] = ()
    across: Across = ()

    @property
    def num_devices(self) -> int:
        return sum(part.num_devices for part in self.parts)

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        return self.parts

    @property
    def interference(self) -> float:
        return max(part.interference for part in self.parts)

    @cached_property
    def _first_devices(self) -> np.ndarray:
        return np.cumsum([0, *(part.num_devices for part in self.parts)])

    @cached_property
    def _first_hosts(self) -> np.ndarray:
        return np.cumsum([0, *(part.hosts for part in self.parts)])

    def _part_of_devices(self, devices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._first_devices[1:-1], devices, side="right")

    def hosts_of(self, devices: np.ndarray) -> np.ndarray:
        part = self._part_of_devices(devices)
        sizes = np.array([own.devices_per_host for own in self.parts])
        return self._first_hosts[part] + (devices - self._first_devices[part]) // sizes[part]

    def _part_of_hosts(self, hosts: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._first_hosts[1:-1], hosts, side="right")

    def of(self, devices: Iterable[int]) -> Cluster:
        found = tuple(map(int, np.unique(self._part_of_devices(np.array(list(devices), int)))))
        if len(found) == len(self.parts):
            return self
        return self.parts[found[0]] if len(found) == 1 else joined(self.name, [self.parts[n] for n in found])

    def alone(self) -> Cluster:
        own = (f for f in fields(Cluster) if f.name not in ("hosts", "devices_per_host"))
        return Cluster(hosts=1, devices_per_host=1, **{f.name: getattr(self, f.name) for f in own})

    def described_hosts(self) -> str:
        return ", ".join(part.described_hosts() for part in self.parts)

    def at_peaks(self) -> "UnlikeCluster":
        return joined(self.name, [part.at_peaks() for part in self.parts], self.across)

    def link(self, one: int, other: int) -> Link:
        """Of a host of one kind to hosts of another."""
        given = {frozenset(pair): link for *pair, link in self.across}
        between = self.parts[one].between, self.parts[other].between
        return given.get(frozenset((one, other))) or slower(between)

    def collective(self, kind: str, groups: np.ndarray) -> Line:
        steps = COLLECTIVES[kind].steps(groups.shape[1])
        if steps == 0:
            return Line(self.local_step, 0.0)
        slowest_byte = max(1 / self.parts[n].inside.bandwidth for n in np.unique(self._part_of_devices(groups)))
        latency, (numbers, hosts, leaving) = 0.0, self.leaving(kind, groups)
        kinds = self._part_of_hosts(hosts)
        busy = dict.fromkeys(hosts.tolist(), 0.0)
        for number in np.unique(numbers):
            own = (numbers == number).nonzero()[0]
            for at in own:
                links = [self.link(int(kinds[at]), int(kinds[other])) for other in own if other != at]
                busy[int(hosts[at])] += float(leaving[at]) / min(link.bandwidth for link in links)
                latency = max(latency, *(link.latency for link in links))
        within = np.setdiff1d(np.arange(len(groups)), numbers)
        here = np.unique(self._part_of_devices(groups[within]))
        latency = max([latency, *(self.parts[n].inside.latency for n in here)])
        return Line(self.local_step + steps * latency, max([slowest_byte, *busy.values()]))

    def messages(self, pairs: np.ndarray, nbytes: float, num_devices: int) -> float:
        if not len(pairs):
            return self.local_step
        hosts, kinds = self.hosts_of(pairs), self._part_of_devices(pairs)
        seconds = max(1 / self.parts[n].inside.bandwidth for n in np.unique(kinds))
        across = hosts[:, 0] != hosts[:, 1]
        if not across.any():
            return self.local_step + max(self.parts[n].inside.latency for n in np.unique(kinds)) + nbytes * seconds
        links = [self.link(*ends) for ends in kinds[across].tolist()]
        each = [1 / link.bandwidth for link in links]
        busiest = max(np.bincount(hosts[across][:, side], each).max() for side in (0, 1))
        return self.local_step + max(link.latency for link in links) + float(max(seconds, busiest)) * nbytes

    def floor(self, nbytes: float) -> float:
        if nbytes <= 0:
            return 0.0
        links = [*(link for part in self.parts for link in (part.inside, part.between)), *(one[2] for one in self.across)]
        return min(link.latency for link in links) + nbytes / max(part.inside.bandwidth for part in self.parts)

    def renumbered(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The same of them on one host of the same kind; of hosts of a kind in the order in which they occur."""
        array = np.array(devices, int)
        hosts, kinds = self.hosts_of(array).tolist(), self._part_of_devices(array).tolist()
        numbers: dict[int, count[int]] = {}
        seen = [0] * len(self.parts)
        for host, kind in zip(hosts, kinds, strict=True):
            if host not in numbers:
                numbers[host] = count(int(self._first_devices[kind]) + seen[kind] * self.parts[kind].devices_per_host)
                seen[kind] += 1
        return tuple(next(numbers[host]) for host in hosts)

    def __str__(self) -> str:
        return self.name


def slower(links: Iterable[Link]) -> Link:
    """What any of ``links`` can do."""
    every = list(links)
    return Link(max(link.latency for link in every), min(link.bandwidth for link in every))


def joined(name: str, clusters: Sequence[Cluster], across: Across = ()) -> UnlikeCluster:
    """Hosts of several clusters as one; devices are numbered cluster by cluster, and host by host in each.

    Args:
        across: the links of a host to hosts of another kind, where they are not the slower of both; kinds by their numbers.

    Raises:
        DeviceError: ``across`` names a kind that is not there, or a pair twice.

    Example:
        >>> both = joined("two kinds", [find_cluster("8xV100-32GB"), find_cluster("4xA100-80GB")])
        >>> both.num_devices, both.of([8, 9]).device.name, both.of([7, 8]).device.name
        (12, 'A100-80GB', 'V100-32GB')
    """
    parts = tuple(part for cluster in clusters for part in cluster.kinds)
    legal = [*combinations(range(len(parts)), 2)]
    for pair in (found := [(min(a, b), max(a, b)) for a, b, _ in across]):
        if pair not in legal or found.count(pair) > 1:
            raise DeviceError(
                f"cluster '{name}' has links between hosts of the kinds {list(pair)}; give each pair of its {len(parts)} "
                f"kinds at most once: {', '.join(map(str, map(list, legal)))}"
            )
    devices = [part.device for part in parts if part.device is not None]
    return UnlikeCluster(
        name, sum(part.hosts for part in parts), max(part.devices_per_host for part in parts),
        slower(part.inside for part in parts), slower([*(part.between for part in parts), *(link for *_, link in across)]),
        min(part.memory for part in parts), slowest(devices) if len(devices) == len(parts) else None, parts, across,
    )  # fmt: skip
