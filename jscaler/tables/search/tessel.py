"""Tessel's shapes: placements of blocks on devices for which Tessel searches schedules.

V is a chain; X two chains of opposite directions; M a chain with blocks of all devices at both ends; NN one with such
blocks in its middle, too; K two branches, each on half of the devices, that join in a block of all; mllm a chain with
blocks of all devices at its ends and at its turn. (Lin et al., Tessel, HPCA 2024, section 5.)
"""

import itertools
from collections.abc import Callable, Sequence

from jscaler.errors import PlanError, UnknownNameError, check_count
from jscaler.tables.search.chain_problem import StageCosts, chain_problem
from jscaler.tables.search.problem import Devices, Edge, Problem, SearchBlock
from jscaler.tables.table import BlockKind


def tessel_problem(
    shape: str,
    devices: int = 4,
    microbatches: int = 8,
    *,
    forward: float = 1.0,
    backward: float = 3.0,
    everywhere: float = 1.0,
    memory: float | None = None,
) -> Problem:
    """The problem of one of Tessel's shapes; a forward holds one activation until its backward ends.

    Args:
        shape: V, X, M, NN, K or mllm.
        devices: an even number of them.
        microbatches: how many micro-batches a step has.
        forward: seconds of a block F on one device.
        backward: seconds of a block B on one device.
        everywhere: seconds of a block of all devices, which holds nothing.
        memory: activations that each device may hold.

    Returns:
        The problem.

    Raises:
        UnknownNameError: there is no such shape.
        PlanError: the number of devices is odd.

    Example:
        >>> [str(block) for block in tessel_problem("M", devices=2).lanes[0]]
        ['0F', '0B', '1F', '1B', '2F', '2B']
    """
    if shape not in TESSEL_SHAPES:
        raise UnknownNameError("shape", shape, TESSEL_SHAPES)
    if check_count(f"{shape}: devices", devices, least=2) % 2:
        raise PlanError(
            f"{shape}: a shape has an even number of devices, not {devices}; take {devices - 1} or {devices + 1}"
        )
    one = StageCosts({"F": forward, "B": backward}, {"F": 1.0}, {"B": 1.0})
    end = StageCosts({"F": everywhere, "B": everywhere})
    limits = None if memory is None else (memory,) * devices
    return TESSEL_SHAPES[shape](devices, microbatches, one, end, limits)


Limits = tuple[float | None, ...] | None


def _chain(lies: Callable[[int], Sequence[int | Devices]], name: str) -> Callable[..., Problem]:
    """Makes the chain whose stages lie so; those of several devices are blocks of all."""

    def make(n: int, microbatches: int, one: StageCosts, end: StageCosts, memory: Limits) -> Problem:
        places = lies(n)
        costs = [one if isinstance(place, int) else end for place in places]
        return chain_problem(costs, places, microbatches, memory=memory, name=name)

    return make


def _x(n: int, microbatches: int, one: StageCosts, end: StageCosts, memory: Limits) -> Problem:
    return chain_problem([one] * n, range(n), microbatches, memory=memory, turned=range(n)[::-1], name="X")


def _k(n: int, microbatches: int, one: StageCosts, end: StageCosts, memory: Limits) -> Problem:
    """The stages of a branch are neighbours; the last stage is the join, which both branches wait for."""
    half = n // 2
    branches = [range(half), range(half, n)]
    kinds: tuple[BlockKind, BlockKind] = ("F", "B")
    blocks = [
        SearchBlock(stage, kind, (stage,), one.seconds[kind], one.held.get(kind, 0.0), one.freed.get(kind, 0.0))
        for stage in range(n)
        for kind in kinds
    ]
    blocks += [SearchBlock(n, kind, tuple(range(n)), end.seconds[kind]) for kind in kinds]
    edges = [Edge(2 * stage, 2 * stage + 1) for stage in range(n + 1)]
    for branch in branches:
        ahead = [*branch, n]
        for first, second in itertools.pairwise(ahead):
            edges += [Edge(2 * first, 2 * second), Edge(2 * second + 1, 2 * first + 1)]
    return Problem("K", (tuple(blocks),), tuple(edges), microbatches, memory)


def _everywhere(n: int) -> Devices:
    return tuple(range(n))


TESSEL_SHAPES: dict[str, Callable[..., Problem]] = {
    "V": _chain(lambda n: [*range(n)], "V"),
    "X": _x,
    "M": _chain(lambda n: [_everywhere(n), *range(n)], "M"),
    "NN": _chain(lambda n: [_everywhere(n), *range(n // 2), _everywhere(n), *range(n // 2, n)], "NN"),
    "K": _k,
    "mllm": _chain(lambda n: [_everywhere(n), *range(n), _everywhere(n)], "mllm"),
}
