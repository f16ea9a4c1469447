"""Clusters by name: built-in ones, those that their text describes (``8xH100-80GB``), several of them, and files.

The links of GPU clusters are those of `clusters.link`; ``jscaler bench-comm`` measures them.
"""

import os
import re
from pathlib import Path

from jscaler.clusters.cluster import Cluster
from jscaler.clusters.cluster_file import load_cluster
from jscaler.clusters.device import DEVICE_KINDS, find_kind
from jscaler.clusters.link import Link, usual_links
from jscaler.clusters.unlike import UnlikeCluster, joined
from jscaler.errors import DeviceError, UnknownNameError, shown

MOST = 1e15  # bytes of a device, and bytes per second, that are believed


def described(name: str, hosts: int, devices_per_host: int, kind: str) -> Cluster:
    """Hosts of a built-in kind of device, with the links that are usual for it."""
    device = find_kind(kind, f" in '{name}'")
    links = usual_links(device, devices_per_host)
    assert links is not None, f"no usual links for {kind}"
    return Cluster(name, hosts, devices_per_host, *links, device=device)


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        # 4 DGX-1-like hosts with one 100 Gb/s adapter each: the cluster of SuperScaler's and nnScaler's papers
        described("v100-nvlink-ib100", 4, 8, "V100-32GB"),
        described("a100", 4, 8, "A100-80GB"),
        described("h100", 4, 8, "H100-80GB"),
        described("h200", 4, 8, "H200-141GB"),
        # virtual devices of one process on two cores: bench-comm --rounds 12 said 44 µs and 1.55 GB/s
        Cluster("cpu", 1, 8, Link(45e-6, 1.5e9), Link(45e-6, 1.5e9)),
    )
}
_DESCRIPTION = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)x([A-Za-z]\S*)")
_OTHERWISE = " (or describe one: 8xH100-80GB, 4x8xV100-32GB, 8xV100-32GB+4xA100-80GB; or give the path of a .toml file)"


def find_cluster(name: str | os.PathLike[str]) -> Cluster:
    """A built-in cluster by name, one that the name describes, or one of a TOML file by its path.

    Args:
        name: ``"a100"``; ``"V100-32GB"``, one device, ``"8xH100-80GB"``, one host, or ``"4x8xV100-32GB"``, hosts × devices
            of each × kind, with the links that are usual for the kind; several of these with a plus between them, hosts
            of several kinds or sizes; or ``"lab.toml"``.

    Raises:
        UnknownNameError: none of these, or a field of the file is unknown.
        DeviceError: the file cannot be read, or a field of it is missing or of the wrong kind.

    Example:
        >>> find_cluster("4x8xV100-32GB").num_devices
        32
    """
    if not isinstance(name, str | os.PathLike):
        raise DeviceError(f"a cluster is a Cluster, a built-in one's name or a .toml file, not {shown(name)}")
    name = os.fspath(name)
    if name.endswith(".toml"):
        return _in_units(load_cluster(Path(name)), name)
    if name in CLUSTERS:
        return CLUSTERS[name]
    if name in DEVICE_KINDS:
        return described(name, 1, 1, name)
    if "+" in name:
        return joined(name, [find_cluster(one.strip()) for one in name.split("+")])
    match = _DESCRIPTION.fullmatch(name)
    if match is None:
        raise UnknownNameError("cluster", name, CLUSTERS, _OTHERWISE)
    return described(name, int(match[1] or 1), int(match[2]), match[3])


def _in_units(cluster: Cluster, path: str) -> Cluster:
    """``cluster``; raises DeviceError where a figure must have been meant in another unit."""
    if isinstance(cluster, UnlikeCluster):
        for number, part in enumerate(cluster.kinds):
            _in_units(part, f"{path}: kinds {number}")
    figures = [("memory", float(cluster.memory or MOST), "bytes", 1e6, MOST)]
    for key, link in (("inside", cluster.inside), ("between", cluster.between)):
        figures.append((f"{key}.latency", link.latency, "seconds", 0.0, 1.0))
        figures.append((f"{key}.bandwidth", link.bandwidth, "bytes per second", 1e6, MOST))
    if (device := cluster.device) is not None:
        figures.append(("device.clock", device.clock, "GHz", 0.01, 100.0))
        figures.append(("device.bandwidth", device.bandwidth, "bytes per second", 1e6, MOST))
        figures += [(f"device.peak.{of}", rate, "FLOP/s", 1e6, 1e20) for of, rate in vars(device.peak).items() if rate]
        if (reached := device.reached) is not None:
            figures.append(("device.reached.bandwidth", reached.bandwidth, "bytes per second", 1e6, MOST))
            figures.append(("device.reached.launch", reached.launch, "seconds", 0.0, 1.0))
            figures.append(("device.reached.interference", reached.interference, "times as long", 1.0, 100.0))
            rates = vars(reached.products).items()
            figures += [(f"device.reached.products.{of}", rate, "FLOP/s", 1e6, 1e20) for of, rate in rates if rate]
    for key, value, unit, least, most in figures:
        if not least <= value <= most:
            raise DeviceError(f"{path}: '{key}' is {value:g} {unit}; give {least:g} to {most:g}, in {unit}")
    return cluster
