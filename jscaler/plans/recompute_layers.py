"""Layers that keep only what enters them, and are computed again for the backward pass, around another plan. (Chen et al.,
Training Deep Nets with Sublinear Memory Cost, 2016.)

::

    forward    x ──► layer 0 ──► x1 ──► layer 1 ──► x2 ──►      x, x1, … are kept, and nothing of what lies between
    backward        layer 0' ◄── x1 ◄── layer 1' ◄── x2 ◄──     each layer runs once more, then its backward

Of a stack (``nn.scan``) every iteration keeps its carry. Of a Python loop, ``every`` layers in a row may keep one
activation together: the longer the rows, the fewer activations are kept, and the more layers are whole at a time. Where
memory has room for some layers' activations, only the first ``layers`` run again (`jscaler.plans.first_layers`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jscaler.errors import PlanError, check_count
from jscaler.plans.argument_types import checked
from jscaler.plans.first_layers import FirstLayers, cut_behind, first_of
from jscaler.plans.layers import find_layers
from jscaler.plans.regions import recompute_rest
from jscaler.plans.single import single
from jscaler.primitives import Planner


@checked
def recompute_layers(
    plan: Callable[..., Any] | None = None,
    every: int = 1,
    keep: str | Sequence[str] = (),
    on: str | Sequence[str] | None = None,
    layers: int | None = None,
) -> Callable[..., None]:
    """``plan``, with every layer, or the first ones, computed again in the backward pass.

    Args:
        plan: the policy that splits and places the ops; `single` by default.
        every: how many layers in a row keep one activation; stacks keep one per layer.
        keep: ops whose results are saved nevertheless, by path or shell pattern: ``"*/out/dot"``, so that what a
            tensor-parallel all-reduce has made is not sent again.
        on: which modules are layers, by shell patterns of their paths; by default stacks of layers, and what repeats in
            the dataflow, whatever it is called (`jscaler.plans.layers`).
        layers: how many of the layers, from the first on; by default all. Of a stack these are a loop of their own.

    Raises (when the plan is made):
        UnknownNameError: no module, or no op of a layer, is called so.
        PlanError: nothing looks like layers, or they cannot be taken together so.

    Example:
        >>> layers = ["*attention", "*mlp"]  # found by themselves where layers repeat
        >>> lowered = train_step.under(plans.recompute_layers(plans.data_parallel(), on=layers)).lower(state, batch)
        >>> any(op.path.startswith("attention/dot.3") and op.path.endswith("again") for op in lowered.graph.ops)
        True
    """
    inner = plan or single()
    if layers is not None:
        check_count("recompute_layers: layers", layers)
        if every != 1:
            raise PlanError(f"recompute_layers: layers={layers} are single layers; leave every={every} out")

    def cut(graph: Planner, count: int) -> None:
        if graph.calls:
            cut_behind(graph, find_layers(graph, on, every), count)

    def policy(graph: Planner, devices: np.ndarray) -> None:
        if layers is not None:
            cut(graph, layers)
        inner(graph, devices)
        if graph.stored and not graph.calls:
            return  # an evaluation that follows a train step has no backward pass
        graph.require_gradient()
        kept = {op.path for pattern in ([keep] if isinstance(keep, str) else keep) for op in graph.select(pattern)}
        found = find_layers(graph, on, every)
        for layer in found if layers is None else first_of(graph, found, layers):
            if any(op.backward is not None for op in layer):
                recompute_rest(graph, layer, [op for op in layer if op.path in kept])

    policy.first_layers = None if layers is None else FirstLayers(layers, functools.partial(cut, count=layers))
    return policy
