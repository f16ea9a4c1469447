"""The least makespan of a small problem by trying every order: slow and obvious.

A device runs what it is given in some order. So every schedule that begins blocks as early as it can comes from a sequence
of all blocks, each placed behind those that it waits for and behind what its devices run already. Memory is counted device
by device, in that sequence.
"""

from jscaler.tables.search.problem import Problem

State = tuple[frozenset[tuple[int, int]], tuple[float, ...], tuple[tuple[tuple[int, int], float], ...]]


def least_makespan_by_trying(problem: Problem) -> float | None:
    """Seconds of the shortest schedule; None where memory lets none through. Hops are delays."""
    lanes = [problem.lane(j) for j in range(problem.microbatches)]
    every = [(j, n) for j, lane in enumerate(lanes) for n in range(len(lane))]
    before = {n: [edge for edge in problem.edges if edge.after == n] for n in range(len(lanes[0]))}
    best: list[float] = []
    seen: set[State] = set()

    def visit(ends: dict[tuple[int, int], float], free: tuple[float, ...], live: tuple[float, ...]) -> None:
        state = frozenset(ends), free, tuple(sorted(ends.items()))
        if state in seen or (best and max(free, default=0.0) >= best[0]):
            return
        seen.add(state)
        if len(ends) == len(every):
            best[:] = [max(free)]
            return
        for j, n in every:
            block = lanes[j][n]
            # copies of a block are alike: the first of a lane that is left
            twin = (j - len(problem.lanes), n)
            if (j, n) in ends or (twin[0] >= 0 and twin not in ends) or any((j, e.before) not in ends for e in before[n]):
                continue
            limits = [(live[d] + block.held, problem.limit(d)) for d in block.devices]
            if any(limit is not None and now > limit for now, limit in limits):
                continue
            arrived = [
                ends[j, e.before] + (e.hop if lanes[j][e.before].devices != block.devices else 0.0) for e in before[n]
            ]
            end = max([*arrived, *(free[d] for d in block.devices)]) + block.seconds
            now = tuple(end if d in block.devices else free[d] for d in range(problem.devices))
            held = tuple(live[d] + (block.held - block.freed if d in block.devices else 0) for d in range(problem.devices))
            visit({**ends, (j, n): end}, now, held)

    visit({}, (0.0,) * problem.devices, (0.0,) * problem.devices)
    return best[0] if best else None
