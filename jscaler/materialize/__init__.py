"""From decisions to layouts, and from layouts to adapters."""

from jscaler.materialize.adapter import Adapter, Stage, find_adapter
from jscaler.materialize.complete import complete
from jscaler.materialize.completed import Completed, OpLayouts
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.notation import OpenLayout, opened, parse_layout
from jscaler.materialize.placement import Placement
from jscaler.materialize.point_to_point import Holding, PointToPoint, plan_regions
from jscaler.materialize.search import Path, cheapest_path, runners_up
from jscaler.materialize.transitions import Transition

__all__ = [
    "Adapter", "Completed", "DeviceMesh", "Holding", "Layout", "OpLayouts", "OpenLayout", "Path", "Placement",
    "PointToPoint",
    "Stage", "Transition", "cheapest_path", "complete", "find_adapter", "opened", "parse_layout", "plan_regions",
    "runners_up",
]  # fmt: skip
