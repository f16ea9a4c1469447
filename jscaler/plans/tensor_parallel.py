"""Tensor parallelism: attention heads and hidden units over all devices. (Shoeybi et al., Megatron-LM, 2019, section 3.)

The first kernel of a pair is cut by columns, the second by rows; what lies between them never leaves its device::

    x ──► query, key, value [:, heads] ──► scores ──► softmax ──► mix ──► out [heads, :] ──► Σ
    x ──► up [:, units] ──► gelu ──► down [units, :] ──► Σ

Σ is an all-reduce of the activations in the forward pass ("g"); its mirror in front of each pair ("f") is one in the
backward pass: two and two per layer. Parameters, gradients and optimizer state of the pairs lie in parts.

Tables of words are split by words, up to the loss (see `vocab_parallel`). What else is a kernel, and no part of a pair (a
projection of patches, a pooler, a table of positions), computes the same everywhere: it lies in parts all the same, which
are put together in front of its use, as in `zero3`. Biases and scales are copied.

Queries, keys and values may be one kernel. Of shape (d, 3, h, k) it is split by heads and nothing else is sent. A flat one,
(d, 3·h·k), or a gate and an up in one (d, 2·f), lies in contiguous columns, which are not those of whole heads: what it
makes is dealt out to them by one exchange forward and one backward.

Where query heads share heads of keys and values, and there are more devices than these, each of these lies on several
devices, whose query heads are those that share it (see `column_row_pairs`).
"""

from collections.abc import Callable, Sequence

import numpy as np

from jscaler.plans.argument_types import checked
from jscaler.plans.column_row_pairs import column_factors
from jscaler.plans.factors import Dims, Factors, split
from jscaler.plans.vocab_parallel import tables_of_words, word_factors
from jscaler.plans.zero import shard_rest, without_followers
from jscaler.primitives import Planner


@checked
def tensor_parallel(columns: Dims | Sequence[str] | None = None) -> Callable[..., None]:
    """Split the columns of the first kernel of each pair, and all ops that they reach, over all devices.

    If no columns are named, tables of words are split, too, and other kernels stored in parts.

    Args:
        columns: a shell pattern of kernels among the step's inputs, several, or ``{pattern: dim}``; by default all whose
            columns meet the rows of another kernel, unit by unit (`jscaler.plans.column_row_pairs`). A dim counts from
            the end if negative, so that it holds for stacked layers too. Without one it is the first dim that the
            kernel's contraction leaves, and nothing takes apart: the heads of (d, h, k) and (d, 3, h, k), the columns of
            (d, f). Where two reach one op, the kernel that is first among the inputs decides.

    Raises (when the plan is made):
        UnknownNameError: no kernel matches.
        PlanError: none is named, and none is found.
        SplitError: heads or columns of a kernel do not divide by the number of devices, nor shared heads divide it.

    Example:
        >>> planned = train_step.under(plans.tensor_parallel({"*/up": 1})).lower(state, batch).plan
        >>> planned.plan.split_factors["mlp/dot"], planned.plan.split_factors["mlp/dot.1"]  # columns, then rows
        (['d'], ['c'])
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        table, deals = column_factors(graph, columns, devices.size, "pass tensor_parallel(columns=...)")
        words = Factors()
        if columns is None:
            words = word_factors(graph, tables_of_words(graph), devices.size)
            shard_rest(graph, devices, words | table, words, deals)
            updates = {op: name for op, name in words.items() if op.kind == "update"}
            table = without_followers(graph, words | table, stored=True) | updates
        split(graph, devices, table, unequal=words, deals=deals)

    return policy
