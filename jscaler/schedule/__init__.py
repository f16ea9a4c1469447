"""Order and time: which ops run when, and which run part by part; and the passes up to layouts."""

from jscaler.schedule.order import ordered_ops
from jscaler.schedule.passes import GRAPH_PASSES

__all__ = ["GRAPH_PASSES", "ordered_ops"]
