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

from jscaler.plans.argument_types import checked
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import Factors, by_dim, reached, required, split
from jscaler.plans.find_experts import ExpertKernel, find_experts
from jscaler.primitives import Planner


@checked
def expert_parallel(experts: str | Sequence[str] | None = None, batch: str = "batch") -> Callable[..., None]:
    """Split the batch over all devices, and between dispatch and combine the experts over the same ones.

    An op belongs to the experts if both the expert and the hidden units of a kernel reach it: the experts alone reach
    routing, dispatch and combine too, which keep their tokens.

    Args:
        experts: shell patterns of the experts' first kernels (… expert, in, hidden) among the step's inputs; by default
            those at which the dataflow shows dispatched tokens to arrive (`jscaler.plans.find_experts`).
        batch: as for `data_parallel`.

    Raises (when the plan is made):
        UnknownNameError: no batch or kernel matches.
        PlanError: no kernel of experts is found.
        SplitError: the batch or the number of experts does not divide by the number of devices.

    Example:
        >>> def moe(params, x):  # rows, tokens, features; each expert gets a mean over the tokens of a row
        ...     gates = jax.nn.softmax(x @ params["gate"])
        ...     sent = jnp.einsum("bte,btd->ebd", gates, x)
        ...     made = jnp.einsum("ebf,efd->ebd", jnp.tanh(jnp.einsum("ebd,edf->ebf", sent, params["up"])), params["down"])
        ...     return (jnp.einsum("bte,ebd->btd", gates, made) ** 2).mean()
        >>> params = {"gate": jnp.ones((4, 8)), "up": jnp.ones((8, 4, 16)), "down": jnp.ones((8, 16, 4))}
        >>> train = jscaler.parallelize(plans.expert_parallel(batch="x"), devices=4)(jscaler.value_and_grad(moe))
        >>> train.lower(params, jnp.ones((8, 2, 4))).plan.report.total["all_to_all"][0]
        4
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        inside = _inside(graph, _kernels(graph, experts), devices.size)
        split(graph, devices, batch_factors(graph, batch, devices.size) | inside)

    return policy


def _kernels(graph: Planner, experts: str | Sequence[str] | None) -> list[ExpertKernel]:
    remedy = "pass expert_parallel(experts=...)"
    if experts is None:
        return find_experts(graph, remedy)
    named = required(graph, dict.fromkeys(by_dim(experts), -3), remedy)
    return [ExpertKernel(tensor, dim, len(tensor.shape) - 1) for tensor, dim in named]


def _inside(graph: Planner, kernels: Sequence[ExpertKernel], parts: int) -> Factors:
    """The experts' own ops, with the factor that their number is there."""
    table: Factors = {}
    for kernel in kernels:
        hidden = graph.factor_of(kernel.tensor.name, kernel.hidden)
        number = reached(graph, [(kernel.tensor, kernel.expert)], parts)
        table |= {op: name for op, name in number.items() if op in hidden}
    return table
