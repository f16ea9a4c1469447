"""Whether what `on_stages` is given names ops and inputs of the graph, and stages that there are."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jscaler.errors import PlanError, UnknownNameError, shown
from jscaler.ir import Graph


def check_stages(graph: Graph, stage_of: Any, devices: np.ndarray) -> None:
    """Compare the stage of each path with the graph and the rows of ``devices``.

    Raises:
        UnknownNameError: there is no such op or input.
        PlanError: ``devices`` are not a row for each stage, or there is no such stage.
    """
    if devices.ndim != 2:
        raise PlanError(f"on_stages takes an array of devices with a row for each stage, not one of shape {devices.shape}")
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
