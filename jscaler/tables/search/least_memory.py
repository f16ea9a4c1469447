"""The least memory that a device needs: that of one micro-batch at a time, in the best order of its blocks."""

from collections.abc import Mapping, Sequence

from jscaler.errors import PlanError
from jscaler.tables.search.activities import ancestors
from jscaler.tables.search.problem import Problem, SearchBlock
from jscaler.text.units import readable_bytes


def check_memory(problem: Problem) -> None:
    """Raise unless each device by itself has the memory of one micro-batch.

    Raises:
        PlanError: a device has not; says which, its limit and the least that it needs.
    """
    for device in range(problem.devices):
        limit, least = problem.limit(device), least_memory_of(problem, device)
        if limit is not None and least > limit * (1 + 1e-9):
            raise PlanError(
                f"{problem.name}: device {device} may hold {limit:g} ({readable_bytes(limit)}), and one micro-batch at a "
                f"time needs {least:g} ({readable_bytes(least)}) there; raise the limit, cut the batch into more "
                "micro-batches, or compute more again"
            )


def least_memory_of(problem: Problem, device: int) -> float:
    """The least that a device holds at its fullest, in the problem's bytes.

    Example:
        >>> from jscaler.tables.search.chain_problem import chain_problem, unit_costs
        >>> least_memory_of(chain_problem([unit_costs(chunks=2)] * 4, lies=[0, 1, 1, 0], microbatches=8), 0)
        1.0
    """
    edges = [(edge.before, edge.after) for edge in problem.edges]
    earlier = ancestors(len(problem.lanes[0]), edges)
    lanes = problem.lanes[: problem.microbatches]
    return max(_least_peak(lane, [n for n, block in enumerate(lane) if device in block.devices], earlier) for lane in lanes)


def _least_peak(lane: Sequence[SearchBlock], own: Sequence[int], earlier: Sequence[set[int]]) -> float:
    """Over all orders of the blocks ``own``: from each set of blocks that have run, the least peak that led there."""
    peaks: Mapping[frozenset[int], float] = {frozenset(): 0.0}
    for _ in own:
        further: dict[frozenset[int], float] = {}
        for done, peak in peaks.items():
            live = sum(lane[number].held - lane[number].freed for number in sorted(done))
            for number in own:
                if number not in done and earlier[number] & set(own) <= done:
                    reached = max(peak, live + lane[number].held)
                    now = done | {number}
                    further[now] = min(further.get(now, reached), reached)
        peaks = further
    return min(peaks.values())
