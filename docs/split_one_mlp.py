"""A policy written by hand: split the MLP of the first block over the devices, leave everything else copied.

The first kernel is cut by columns, the second by rows, as in Megatron-LM: the hidden units between them never leave
their device, and one all-reduce after the second kernel (and one in the backward pass) puts the parts together.

    x ──► up[:, part] ──► gelu ──► down[part, :] ──► sum over devices

Run it with:  jscaler train --plan docs/split_one_mlp.py:split_one_mlp --devices 4 --platform cpu
"""

from typing import Any

import numpy as np

from jscaler import Split


def split_one_mlp(graph: Any, devices: np.ndarray) -> None:
    up, down = graph["block_0/mlp/up/dot"], graph["block_0/mlp/down/dot"]
    for op, kernel_dim in ((up, 1), (down, 0)):
        parts = graph.op_trans(op, Split(("kernel", kernel_dim), devices.size))
        graph.op_assign(parts, devices)
    # What is not said is filled in: the bias and the gelu between the two take the split of what they read, the
    # backward ops mirror their forward, and the optimizer follows the parameters, which now lie in parts.
