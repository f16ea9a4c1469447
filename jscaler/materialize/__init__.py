"""From decisions to layouts, and from layouts to adapters."""

from jscaler.materialize.complete import Completed, OpLayouts, complete
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.placement import Placement
from jscaler.materialize.search import adapter_stages, cheapest_path
from jscaler.materialize.transitions import Transition

__all__ = [
    "Completed", "DeviceMesh", "Layout", "OpLayouts", "Placement", "Transition", "adapter_stages", "cheapest_path",
    "complete",
]  # fmt: skip
