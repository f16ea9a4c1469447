"""Expert parallelism: the batch over all devices, and inside the mixture-of-experts layers the experts over the same
devices. (Lepikhin et al., GShard, 2020, section 3.)

::

    e experts, g groups of tokens (rows of the batch), c places at an expert
    [e, g split, c, d] ──► all-to-all ──► [e split, g, c, d] ──► up, gelu, down ──► all-to-all ──► [e, g split, c, d]

One all-to-all dispatches the tokens of a layer, one combines them; the backward pass mirrors both: four per layer and
step. Parameters and optimizer state of the experts lie in parts, and their gradients are whole where they are made.
Everything else is data parallel.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jscaler.ir import PTensor
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import Factors, reached, required, split
from jscaler.primitives import Planner

EXPERTS = ("*/experts/up", "*/experts/wi")


def expert_parallel(experts: Sequence[str] = EXPERTS, batch: str = "batch") -> Callable[..., None]:
    """Split the batch over all devices, and between dispatch and combine the experts over the same ones.

    An op belongs to the experts if both the expert (dim -3 of a kernel) and the hidden units (dim -1) reach it: the
    experts alone reach routing, dispatch and combine too, which keep their tokens.

    Args:
        experts: shell patterns of the experts' first kernels (… expert, in, hidden) among the step's inputs.
        batch: as for `data_parallel`.

    Raises (when the plan is made):
        UnknownNameError: no batch or kernel matches.
        SplitError: the batch or the number of experts does not divide by the number of devices.
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        kernels = required(graph, dict.fromkeys(experts, -3), "pass expert_parallel(experts=...)")
        inside = _inside(graph, kernels, devices.size)
        split(graph, devices, batch_factors(graph, batch, devices.size) | inside)

    policy.__name__ = "expert_parallel"
    return policy


def _inside(graph: Planner, kernels: Sequence[tuple[PTensor, int]], parts: int) -> Factors:
    """The experts' own ops, with the factor that their number is there."""
    table: Factors = {}
    for kernel, dim in kernels:
        hidden = graph.factor_of(kernel.name, len(kernel.shape) - 1)
        number = reached(graph, [(kernel, dim)], parts)
        table |= {op: name for op, name in number.items() if op in hidden}
    return table
