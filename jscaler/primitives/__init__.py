"""The three primitives that a policy calls, and the plan they write."""

from jscaler.primitives.algorithms import Algorithm, Chunk, GridAxis, Replicate, Split, TimeSplit
from jscaler.primitives.grid import Grid
from jscaler.primitives.make_plan import make_plan
from jscaler.primitives.plan import Assign, Decision, Fuse, LeafParts, OnDevices, Order, Plan, Shard, Store, Trans
from jscaler.primitives.planner import Planner, Policy
from jscaler.primitives.prefix import Prefix
from jscaler.primitives.restructured import restructured

__all__ = [
    "Algorithm", "Assign", "Chunk", "Decision", "Fuse", "Grid", "GridAxis", "LeafParts", "OnDevices", "Order",
    "Plan", "Planner", "Policy", "Prefix", "Replicate", "Shard", "Split", "Store", "TimeSplit",
    "Trans", "make_plan", "restructured",
]  # fmt: skip
