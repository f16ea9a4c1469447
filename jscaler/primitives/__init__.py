"""The three primitives that a policy calls, and the plan they write."""

from jscaler.primitives.algorithms import Algorithm, GridAxis, Replicate, Split
from jscaler.primitives.grid import Grid
from jscaler.primitives.plan import Assign, Decision, Order, Plan, Trans
from jscaler.primitives.planner import Planner, Policy, make_plan

__all__ = [
    "Algorithm", "Assign", "Decision", "Grid", "GridAxis", "Order", "Plan", "Planner", "Policy", "Replicate", "Split",
    "Trans", "make_plan",
]  # fmt: skip
