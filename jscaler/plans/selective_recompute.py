"""The core of attention computed again, and nothing else, around another plan. (Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022, section 5.)

::

    q, k ──► scores ──► softmax ──► dropout ──┐
    v ────────────────────────────────────────┴──► mix ──► out        kept: q, k, v, and what out reads
         └── computed again: s × s per head ──────┘

What lies between the product of queries and keys and the product with the values is the most of a layer's activations
when sequences are long, and the least of its arithmetic. Nothing of it is sent between devices where heads are split.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jscaler.plans.argument_types import checked
from jscaler.plans.attention import find_cores
from jscaler.plans.single import single
from jscaler.primitives import Planner


@checked
def selective_recompute(
    plan: Callable[..., Any] | None = None, on: str | Sequence[str] | None = None
) -> Callable[..., None]:  # fmt: skip
    """``plan``, with attention's scores, softmax and dropout computed again in the backward pass.

    Args:
        plan: the policy that splits and places the ops; `single` by default.
        on: paths or shell patterns of the ops to compute again, those of one module and one pattern as one region; by
            default the dataflow says what a core is: a softmax between two contractions of activations.

    Raises (when the plan is made):
        UnknownNameError: no op is called so.
        PlanError: there is no such softmax (a fused attention keeps none of its inside).

    Example:
        >>> lowered = train_step.under(plans.selective_recompute(plans.tensor_parallel())).lower(state, batch)
        >>> [op.path for op in lowered.graph.ops if op.path.endswith("@again")]
        ['attention/dot.3@again']
    """
    inner = plan or single()

    def policy(graph: Planner, devices: np.ndarray) -> None:
        inner(graph, devices)
        if graph.stored and not graph.calls:
            return  # an evaluation that follows a train step has no backward pass
        graph.require_gradient()
        for core in find_cores(graph, [on] if isinstance(on, str) else on):
            graph.recompute(core)

    policy.first_layers = getattr(inner, "first_layers", None)
    return policy
