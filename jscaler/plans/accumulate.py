"""Gradient accumulation: the batch in micro-batches, one after another, around another plan. (Huang et al., GPipe, 2019,
section 2.3, on one stage.)

::

    for each micro-batch:  forward ──► backward ──► gradients added to those so far
    then once:             all-reduce over devices, clip, update

The numbers are those of the whole batch: a mean divides by all, and what only counts inputs (a mask) runs before, on all.
Only one micro-batch's activations live at a time, and beside them the sums of all gradients. What needs the whole batch
(BatchNorm's statistics, each row against each) runs once, between loops over micro-batches, which hold what they hand on
for all: a `PlanWarning` says how much, and which ``per_microbatch`` leaves one loop.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jscaler.errors import SplitError, check_count
from jscaler.ir import Op
from jscaler.plans.alone import Alone
from jscaler.plans.argument_types import checked
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import Factors, can_run_in_turn
from jscaler.plans.per_microbatch_groups import groups_alone
from jscaler.plans.single import single
from jscaler.primitives import Planner, TimeSplit
from jscaler.primitives.per_microbatch import reopens, under

MICROBATCH = "microbatch"


@checked
def accumulate(
    microbatches: int,
    plan: Callable[..., Any] | None = None,
    batch: str = "batch",
    accumulate_dtype: Any = None,
    per_microbatch: Any = None,
) -> Callable[..., None]:
    """``plan``, run on one micro-batch after another.

    Args:
        microbatches: how many; must divide each device's part of the batch.
        plan: the policy that splits and places the ops; `single` by default. `zero2` reduces gradients each time.
        batch: path or shell pattern of the batch among the step's inputs; its dim 0 is split.
        accumulate_dtype: of the sums of gradients, where those have fewer bits; by default the gradients' own.
        per_microbatch: ops, or patterns of modules, that run on each micro-batch alone where they need the whole batch:
            ``"BatchNorm*"`` has the statistics of the micro-batch, as in a ``lax.scan`` over micro-batches; an auxiliary
            loss is the mean over them. What else the module makes of those, not linearly, is fused with such an op.

    Raises:
        PlanError: ``microbatches`` is no positive whole number.

    Warns (when the step is lowered):
        PlanWarning: micro-batches run in several loops.

    Raises (when the plan is made):
        UnknownNameError: no input, or no op, is called so.
        SplitError: the batch does not divide.

    Example:
        >>> planned = train_step.under(plans.accumulate(2, plans.zero2())).lower(state, batch).plan
        >>> {kind: count for kind, (count, _) in planned.report.total.items()}
        {'reduce_scatter': 14, 'all_gather': 5, 'all_reduce': 1}
    """
    inner = plan or single()
    check_count("accumulate: microbatches", microbatches)

    first_layers = getattr(inner, "first_layers", None)

    def policy(graph: Planner, devices: np.ndarray) -> None:
        if first_layers is not None:
            first_layers.cut_stacks(graph)
        if accumulate_dtype is not None:
            graph.accumulation(dtype=accumulate_dtype)
        alone: set[str] = set()
        if per_microbatch is not None:
            graph.per_microbatch(_fused(graph, per_microbatch, batch_factors(graph, batch, microbatches)))
            alone = graph.alone
        for op, name in batch_factors(graph, batch, microbatches).items():
            if op.kind != "backward" and _runs_in_turn(graph, op, name, microbatches, op.path in alone):
                graph.op_trans(op, TimeSplit(name, microbatches, MICROBATCH))
        inner(graph, devices)

    policy.first_layers = first_layers
    policy.alone = Alone(per_microbatch, lambda alone: accumulate(microbatches, plan, batch, accumulate_dtype, alone))
    return policy


def _fused(graph: Planner, selection: Any, factors: Factors) -> list[Op]:
    """The selected ops, of which those are one op that hand each other what each micro-batch has for itself."""
    paths, rows = list(under(graph.graph, selection)), {op.path: name for op, name in factors.items()}
    groups = groups_alone(graph, paths, rows)
    if not groups and not any(reopens(graph.graph, path) for path in paths):
        groups = groups_alone(graph, paths, rows, outside=True)
    for group in groups:
        graph.fuse(*group, name=group[0])
    fused = [group[0] for group in groups]
    return [graph.graph[path] for path in dict.fromkeys((*paths, *fused)) if path in graph.by_path]


def _runs_in_turn(graph: Planner, op: Op, name: str, parts: int, alone: bool) -> bool:
    """Whether ``op`` runs part by part; else it runs once, on the whole batch, between loops over micro-batches.

    Raises:
        SplitError: the rows of an op with a backward do not divide into ``parts``.
    """
    if can_run_in_turn(graph, op, name, parts, alone):
        return True
    factor = graph.rule(op).factors[name]
    if op.kind == "forward" and op.backward is not None and factor.size > 1 and factor.size % parts:
        raise SplitError(op.path, name, factor.size, parts, "", graph.factor_names(op).get(name, ""))
    return False
