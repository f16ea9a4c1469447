"""What communication costs: bytes from a table, seconds from a cluster's links."""

from jscaler.cost.cluster import CLUSTERS, Cluster, Link, cluster_toml, find_cluster, load_cluster
from jscaler.cost.model import BYTES, FEW_STEPS, Bytes, CostModel, Line

__all__ = [
    "BYTES", "CLUSTERS", "FEW_STEPS", "Bytes", "Cluster", "CostModel", "Line", "Link", "cluster_toml", "find_cluster",
    "load_cluster",
]  # fmt: skip
