"""Each op by itself, within what experts do: the batch on the first axis of a mesh, a dim of the model on the others.

| decision | domain |
| --- | --- |
| an op on the first axis | its batch; a copy where it has none |
| an op on the others | heads, hidden units, words, experts, the sequence, the batch; a copy |
| a parameter | ZeRO none, 1, 2, 3 |
| computed again | any op, where memory counts |
"""

import numpy as np

from jscaler.primitives import Planner
from jscaler.spaces.holes import any_split, maybe
from jscaler.spaces.numbers import one_of

OF_THE_MODEL = ("heads", "units", "words", "experts", "sequence", "batch")


def per_op(graph: Planner, devices: np.ndarray) -> None:
    """Data parallelism on the first axis; tensor, sequence and expert parallelism op by op on the others."""
    for op in graph.forward():
        holes = [any_split(axes=0, dims="batch", copies="needed")]
        holes += [any_split(axes=axis, dims=OF_THE_MODEL) for axis in range(1, devices.ndim)]
        graph.op_trans(op, *holes)  # type: ignore[arg-type]
        graph.recompute(op, maybe())
    graph.shard("*", one_of(None, "zero1", "zero2", "zero3"))  # type: ignore[arg-type, call-arg]
