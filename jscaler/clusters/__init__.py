"""What communication costs: bytes from a table, seconds from a cluster's links; and what devices there are."""

from jscaler.clusters.built_in import CLUSTERS, find_cluster
from jscaler.clusters.cluster import Cluster
from jscaler.clusters.cluster_file import cluster_toml, load_cluster
from jscaler.clusters.cost_model import BYTES, FEW_STEPS, Bytes, CostModel, Line
from jscaler.clusters.device import DEVICE_KINDS, DeviceKind, Peak, Reached
from jscaler.clusters.link import Link
from jscaler.clusters.unlike import UnlikeCluster, joined

__all__ = [
    "BYTES", "CLUSTERS", "DEVICE_KINDS", "FEW_STEPS", "Bytes", "Cluster", "CostModel", "DeviceKind", "Line", "Link", "Peak",
    "Reached", "UnlikeCluster", "cluster_toml", "find_cluster", "joined", "load_cluster",
]  # fmt: skip
