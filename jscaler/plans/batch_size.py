"""How many sequences a step takes."""

import math

from jscaler.errors import UnknownNameError
from jscaler.ir import Graph
from jscaler.plans.batch import BATCH, batch_leaves


def batch_size(graph: Graph, batch: str = BATCH) -> int:
    """How many sequences a step takes: the size of dim 0 of its batch; 0 where nothing says what that is.

    Raises:
        UnknownNameError: no input is called as ``batch`` says.
    """
    try:
        return math.gcd(*(t.shape[0] for t in batch_leaves(graph, batch)))
    except UnknownNameError:
        if batch != BATCH:
            raise
        return 0
