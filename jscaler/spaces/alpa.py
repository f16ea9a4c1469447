"""Every op split along every factor on every mesh axis, parameters as their readers want them. (Zheng et al., Alpa, OSDI
2022, section 4.)"""

import numpy as np

from jscaler.primitives import Planner
from jscaler.spaces.holes import any_split
from jscaler.spaces.numbers import one_of


def alpa(graph: Planner, devices: np.ndarray) -> None:
    """Any split of any op, and state that is split beside the batch; nothing runs again."""
    for op in graph.forward():
        graph.op_trans(op, any_split())  # type: ignore[arg-type]
    graph.shard("*", one_of(None, "zero1"))  # type: ignore[arg-type, call-arg]
