"""What of a policy's decisions on a whole graph is for some of its stages, where other stages have another policy."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jscaler.primitives.plan import Accumulation, Decision, Recompute, SaveResiduals, Shard


def said_of_stages(said: Sequence[Decision], is_own: Callable[[str], bool]) -> Iterator[Decision]:
    """Decisions on what backwards read, as far as they are of these stages' ops; all others as they are.

    Args:
        is_own: whether an op, by its path, is of these stages.
    """
    for decision in said:
        if isinstance(decision, Recompute):
            ops, keep = (tuple(filter(is_own, names)) for names in (decision.ops, decision.keep))
            if ops:
                yield dataclasses.replace(decision, ops=ops, keep=keep)
        elif not isinstance(decision, SaveResiduals) or is_own(decision.op):
            yield decision


def reduced_as_said(said: Sequence[Decision], before: Accumulation) -> Iterator[Decision]:
    """``said``, with when gradients are reduced (ZeRO-1, ZeRO-2) as part of each shard, and not of the whole step.

    Args:
        before: what the step says.
    """
    own = next((d.each_time for d in reversed(said) if isinstance(d, Accumulation)), before.each_time)
    for decision in said:
        if isinstance(decision, Shard) and decision.each_time is None:
            yield dataclasses.replace(decision, each_time=own)
        elif isinstance(decision, Accumulation):
            yield dataclasses.replace(decision, each_time=before.each_time)
        else:
            yield decision
