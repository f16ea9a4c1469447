"""Whether `on_devices` and `on_stages` name devices and stages that there are, and ops and inputs of the graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jscaler.errors import PlanError, UnknownNameError, shown
from jscaler.ir import Graph
from jscaler.primitives.plan import OnDevices


def check_on_devices(decision: OnDevices, num_devices: int) -> None:
    """Compare the devices of a decision with those that there are.

    Raises:
        PlanError: there is no such device, or one is named twice, or none at all; or the stage is no number from 0 on.
    """
    for group in (decision.devices, decision.turned or decision.devices):
        wrong = [d for d in group if not 0 <= d < num_devices or group.count(d) > 1]
        if wrong or not group:
            raise PlanError(
                f"ops are to run on devices {list(group)}, of which {wrong} are named twice or are not there; "
                f"there are {num_devices}: 0 to {num_devices - 1}"
            )
    stage = decision.stage
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
        raise PlanError(f"on_devices: a stage is a number, 0 or more, and not {shown(stage)}")


def check_stages(graph: Graph, stage_of: Any, devices: Sequence[Sequence[int]]) -> None:
    """Compare the stage of each path with the graph and the rows of ``devices``.

    Raises:
        UnknownNameError: there is no such op or input.
        PlanError: there is no such stage.
    """
    if not isinstance(stage_of, Mapping):
        raise PlanError(f"on_stages takes the stage of each path, as in {{'mlp/dot': 0}}, not {shown(stage_of)}")
    inputs = {tensor.name for tensor in graph.inputs}
    for path, stage in stage_of.items():
        if path not in graph.by_path and path not in inputs:
            raise UnknownNameError("op or input", path, [*graph.by_path, *inputs], " (on_stages)")
        if not isinstance(stage, (int, np.integer)) or isinstance(stage, bool) or not 0 <= stage < len(devices):
            raise PlanError(
                f"on_stages: '{path}' is of stage {shown(stage)}; devices have a row for each of {len(devices)} stages, "
                f"0 to {len(devices) - 1}"
            )
