"""All that can be said of ops on one device group: how each is split, how each parameter lies, what runs again."""

import numpy as np

from jscaler.primitives import Planner
from jscaler.spaces.holes import any_split, maybe
from jscaler.spaces.numbers import one_of


def free(graph: Planner, devices: np.ndarray) -> None:
    """Any split of any op, any ZeRO mode of any parameter, and anything may run again."""
    for op in graph.forward():
        graph.op_trans(op, any_split())  # type: ignore[arg-type]
        graph.recompute(op, maybe())
    graph.shard("*", one_of(None, "zero1", "zero2", "zero3"))  # type: ignore[arg-type, call-arg]
