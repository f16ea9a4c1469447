"""Whether an input can lie as a decision says."""

import math

from jscaler.errors import PlanError, SplitError
from jscaler.ir import Graph
from jscaler.primitives.plan import Store


def check_store(graph: Graph, store: Store, num_devices: int) -> None:
    """Compare a decision with the input that it names.

    Raises:
        UnknownNameError: there is no such input.
        PlanError: it has other dims than those that are cut, or the devices are no such grid.
        SplitError: a dim does not divide.
    """
    tensor = graph.input(store.leaf)
    every = (store.devices, *store.elsewhere)
    distinct = all(len(set(own)) == len(own) == math.prod(store.grid) for own in every)
    if not distinct or min(store.grid, default=1) < 1 or not all(0 <= d < num_devices for own in every for d in own):
        on = " and ".join(str([*own]) for own in every)
        raise PlanError(
            f"'{tensor.name}' is stored on a grid {list(store.grid)} of devices {on}: give as many of the {num_devices} as "
            "the grid has cells, each once"
        )
    if len(store.cuts) != len(tensor.shape):
        raise PlanError(f"'{tensor.name}' of shape {tensor.shape} is stored as a tensor of {len(store.cuts)} dims: {store}")
    axes = [axis for cut in store.cuts for axis in cut]
    if len(set(axes)) < len(axes) or not all(0 <= axis < len(store.grid) for axis in axes):
        raise PlanError(
            f"'{tensor.name}' is cut by the axes {list(map(list, store.cuts))} of a grid of {len(store.grid)}: each cuts "
            "one dim at most"
        )
    for dim, cut in enumerate(store.cuts):
        parts = math.prod(store.grid[axis] for axis in cut)
        if tensor.shape[dim] % parts:
            raise SplitError(tensor.name, f"dim {dim}", tensor.shape[dim], parts)
