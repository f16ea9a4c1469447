"""Order and time: which ops run when, and which run part by part; and the passes up to layouts."""

from jscaler.schedule.graph_passes import GRAPH_PASSES
from jscaler.schedule.order import ordered_ops

__all__ = ["GRAPH_PASSES", "ordered_ops"]
