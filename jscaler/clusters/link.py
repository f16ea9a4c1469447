"""``Link``: one class of links of a cluster; and the links that hosts of a kind of GPU usually have.

Bandwidths are of public data sheets, one direction: NVLink per device, the network per host; docs/clusters.md lists the
sources. Latencies are assumed.
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from jscaler.clusters.device import DeviceKind
from jscaler.errors import DeviceError, shown


@dataclass(frozen=True)
class Link:
    """One class of links.

    Attributes:
        latency: α, seconds per step of a collective.
        bandwidth: 1/β, bytes per second in one direction.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (is_positive(self.latency) and is_positive(self.bandwidth)):
            raise DeviceError(
                "a Link has a latency in seconds and a bandwidth in bytes per second, positive numbers, not "
                f"{shown(self.latency)} and {shown(self.bandwidth)}"
            )

    def times(self, bandwidth: float) -> "Link":
        """The same with so many times the bandwidth."""
        return Link(self.latency, self.bandwidth * bandwidth)


def is_positive(value: Any, kind: type = float) -> bool:
    """Whether ``value`` is a positive number, whole where ``kind`` is int; a NaN, an infinity and a truth are none."""
    legal = isinstance(value, (int, np.integer) if kind is int else (int, float, np.integer, np.floating))
    return bool(legal and not isinstance(value, bool) and 0 < value <= sys.float_info.max)


@dataclass(frozen=True)
class HostLinks:
    """What usually connects GPUs of a generation.

    Attributes:
        inside: of each device to the others of its host (NVLink).
        adapter: of the network.
        adapters: how many of them a device has; 0: one for the whole host.
    """

    inside: Link
    adapter: Link
    adapters: int

    def between(self, devices_per_host: int) -> Link:
        """The network of a host, shared by its devices."""
        return Link(self.adapter.latency, self.adapter.bandwidth * (self.adapters * devices_per_host or 1))


NVLINK2, NVLINK3, NVLINK4 = Link(10e-6, 150e9), Link(8e-6, 300e9), Link(7e-6, 450e9)
HOST_LINKS = {  # by compute capability
    (7, 0): HostLinks(NVLINK2, Link(25e-6, 12.5e9), 0),  # V100: one 100 Gb/s adapter per host, as in SuperScaler's paper
    (8, 0): HostLinks(NVLINK3, Link(20e-6, 25e9), 1),  # DGX A100: one of 200 Gb/s for each device
    (9, 0): HostLinks(NVLINK4, Link(15e-6, 50e9), 1),  # DGX H100 and H200: one of 400 Gb/s for each device
}


def usual_links(kind: DeviceKind, devices_per_host: int) -> tuple[Link, Link] | None:
    """The links inside a host and between hosts, as far as they are reached where the kind says so; None for a generation
    that has no entry."""
    found = HOST_LINKS.get(kind.capability)
    if found is None:
        return None
    inside, between = (1.0, 1.0) if kind.reached is None else (kind.reached.inside, kind.reached.between)
    return found.inside.times(inside), found.between(devices_per_host).times(between)
