"""What communication costs: bytes from a table, seconds from a cluster's links; and what devices there are."""

from jscaler.cost.cluster import Cluster
from jscaler.cost.cluster_file import cluster_toml, load_cluster
from jscaler.cost.clusters import CLUSTERS, find_cluster
from jscaler.cost.device import DEVICE_KINDS, DeviceKind, Peak
from jscaler.cost.link import Link
from jscaler.cost.model import BYTES, FEW_STEPS, Bytes, CostModel, Line

__all__ = [
    "BYTES", "CLUSTERS", "DEVICE_KINDS", "FEW_STEPS", "Bytes", "Cluster", "CostModel", "DeviceKind", "Line", "Link", "Peak",
    "cluster_toml", "find_cluster", "load_cluster",
]  # fmt: skip
