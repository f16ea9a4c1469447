"""Sequence parallelism: what tensor parallelism copies (norms, dropout, residuals) is split along the sequence, over the
same devices. (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2.)

::

    s split ──► norm ──► all-gather ──► columns │ heads, units │ rows ──► reduce-scatter ──► dropout, residual ──► s split

Each all-reduce of tensor parallelism becomes a reduce-scatter and an all-gather of the same bytes, forward and backward
alike. What an all-gather brought is kept for the backward pass, not fetched again as in the paper: fewer bytes, more
memory. Parameters of the parts along the sequence (norms, biases of row kernels) are copied; their gradients are
all-reduced, which the paper does too.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jscaler.plans.argument_types import checked
from jscaler.plans.column_row_pairs import column_factors
from jscaler.plans.factors import Dims, reached, split
from jscaler.plans.find_sequence import sequence_of
from jscaler.primitives import Planner


@checked
def sequence_parallel(columns: Dims | Sequence[str] | None = None, sequence: Dims | None = None) -> Callable[..., None]:
    """`tensor_parallel`, and the sequence over the same devices wherever heads and hidden units do not reach.

    Args:
        columns: kernels that are cut by columns, as for `tensor_parallel`.
        sequence: ``{input: dim}``, the sequence of the batch; by default the dim that attention mixes and all else carries
            along (`jscaler.plans.find_sequence`), of tokens, embeddings or patches by any name. Of tokens ``[b, s + 1]``
            that the loss slices into inputs and targets, the slices are split, and the tokens are not.

    Raises (when the plan is made):
        UnknownNameError: no kernel, or no input, matches.
        PlanError: no dim of the data is the sequence, or several may be.
        SplitError: the heads or columns of a kernel, or the sequence, do not divide by the number of devices.

    Example:
        >>> planned = train_step.under(plans.sequence_parallel()).lower(state, batch).plan
        >>> {kind: count for kind, (count, _) in planned.report.total.items()}
        {'all_gather': 4, 'reduce_scatter': 6, 'all_reduce': 2}
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        tokens = sequence_of(graph, sequence, devices.size, "sequence_parallel")
        between = reached(graph, tokens, devices.size)
        table, deals = column_factors(graph, columns, devices.size, "pass sequence_parallel(columns=...)")
        split(graph, devices, between | table, deals=deals)

    return policy
