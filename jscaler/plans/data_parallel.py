"""Data parallelism: every op that sees the batch is split along it; parameters and their updates are copied.

Each device computes the gradient of its part of the batch; the parts are value shares, which one all-reduce per
gradient joins before the update. (Li et al., PyTorch Distributed, VLDB 2020.)
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jscaler.errors import SplitError, divisors
from jscaler.plans.argument_types import checked
from jscaler.plans.batch import batch_leaves
from jscaler.plans.factors import Factors, reached, split
from jscaler.primitives import Planner


@checked
def data_parallel(batch: str = "batch", reduce_dtype: Any = None) -> Callable[..., None]:
    """Split dim 0 of every input that ``batch`` names over all devices.

    Args:
        batch: path or shell pattern of the batch among the step's inputs, e.g. ``"batch"`` or ``"batch/tok*"``. Where no
            input is called ``"batch"``, what is no state, if all of it has as many rows.
        reduce_dtype: the dtype in which gradients are added between devices; their own by default.

    Raises (when the plan is made):
        UnknownNameError: no input is called so, and several may be the batch.
        SplitError: the batch does not divide by the number of devices.
        CaptureError: the step updates state, but jscaler sees no gradient.

    Example:
        >>> planned = train_step.under(plans.data_parallel()).lower(state, batch).plan
        >>> {kind: count for kind, (count, _) in planned.report.total.items()}  # five gradients and the loss
        {'all_reduce': 6}
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        table = batch_factors(graph, batch, devices.size)
        if reduce_dtype is not None:
            graph.reduce_dtype(reduce_dtype)
        split(graph, devices, table)

    return policy


def batch_factors(graph: Planner, batch: str, parts: int) -> Factors:
    """What dim 0 of every input that ``batch`` names reaches. Shared by the plans that split the batch."""
    leaves = batch_leaves(graph.graph, batch)
    changed = (graph.inputs[i] for o, i in graph.next_version.items() if graph.outputs[o] != graph.inputs[i])
    if any(state not in leaves for state in changed):
        graph.require_gradient()  # a step that updates state is a training step
    for leaf in leaves:
        if leaf.shape[0] % parts:
            raise SplitError(leaf.name, "dim 0", leaf.shape[0], parts, _remedy(leaf.shape[0], parts))
    return reached(graph, [(t, 0) for t in leaves], parts)


def _remedy(rows: int, parts: int) -> str:
    legal = ", ".join(map(str, divisors(rows)))
    padded = f"jscaler.pad_batch(batch, {parts}) makes it {rows + -rows % parts} rows and a mask for the loss"
    return f"legal: {legal}; {padded}" + (f", or leave out the last {rows % parts}" if rows > parts else "")
