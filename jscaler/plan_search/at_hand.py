"""The devices at hand as a cluster, and a cluster cut to fewer devices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jscaler.clusters import Cluster
from jscaler.clusters.built_in import described
from jscaler.clusters.device import kind_of
from jscaler.clusters.measure import by_host
from jscaler.errors import DeviceError, PlanWarning, divisors, warn

STAND_IN = "H100-80GB"  # where nobody knows the devices: virtual CPUs, say


def cluster_at_hand(devices: Sequence[Any], count: int) -> Cluster:
    """A cluster of ``count`` devices of the kind at hand, with usual links.

    Warns where they are of no kind that is known: they are priced as another kind, whose memory they may not have.
    """
    kind = kind_of(devices[0].device_kind)
    if kind is None:
        warn(
            f"search: '{devices[0].device_kind}' is no kind of device that jscaler knows; plans are priced as if on "
            f"{STAND_IN}. Say what they are with cluster='8xH100-80GB', or a .toml file of your own",
            PlanWarning,
        )
    name = STAND_IN if kind is None else kind.name
    per_host = by_host(devices).shape[1] if len(devices) > 1 else 1
    return of_devices(described(f"{len(devices)} devices at hand", -(-len(devices) // per_host), per_host, name), count)


def of_devices(cluster: Cluster, count: int) -> Cluster:
    """``cluster`` with its first ``count`` devices, on as few hosts as have room for them.

    Raises:
        DeviceError: it has fewer, or hosts would have unequal numbers of them.

    Example:
        >>> of_devices(find_cluster("4x8xV100-32GB"), 16).hosts
        2
    """
    if count == cluster.num_devices:
        return cluster
    if count > cluster.num_devices:
        raise DeviceError(f"{count} devices are asked for and the cluster '{cluster.name}' has {cluster.num_devices}")
    if len(cluster.kinds) > 1:
        raise DeviceError(
            f"{count} devices are asked for and the cluster '{cluster.name}' has {cluster.num_devices} of several kinds; "
            "give one that has those that count"
        )
    per_host = min(count, cluster.devices_per_host)
    if count % per_host:
        legal = [n for n in divisors(count) if n <= cluster.devices_per_host]
        raise DeviceError(
            f"{count} devices are no whole hosts of the cluster '{cluster.name}', which have {per_host} each; give a "
            f"cluster of {count} devices, with {legal[-1]} on a host, say"
        )
    return replace(cluster, hosts=count // per_host, devices_per_host=per_host)
