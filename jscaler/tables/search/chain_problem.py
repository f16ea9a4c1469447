"""``chain_problem``: the problem of a chain of stages, which published schedules have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jscaler.errors import PlanError, shown
from jscaler.tables.search.problem import Devices, Edge, Problem, SearchBlock
from jscaler.tables.table import KINDS, BlockKind

Hop = float | Callable[[Devices, Devices], float]
KINDS_IN_ORDER: tuple[BlockKind, ...] = ("F", "R", "B", "I", "W")


@dataclass(frozen=True)
class StageCosts:
    """What the blocks of a stage take.

    Attributes:
        seconds: of the block of each kind that the stage has.
        held: bytes that a block of a kind adds when it begins.
        freed: bytes that a block of a kind lets go when it ends.

    Example:
        >>> StageCosts({"F": 1.0, "B": 2.0}, held={"F": 4096}, freed={"B": 4096}).seconds["B"]
        2.0
    """

    seconds: Mapping[BlockKind, float]
    held: Mapping[BlockKind, float] = field(default_factory=dict)
    freed: Mapping[BlockKind, float] = field(default_factory=dict)


def unit_costs(kinds: Sequence[BlockKind] = ("F", "I", "W"), chunks: int = 1) -> StageCosts:
    """The costs of a stage in forwards and activations of one device's whole share.

    Args:
        kinds: of the stage's blocks; the last lets go what the forward holds.
        chunks: stages that share a device; each takes so small a part.

    Returns:
        The costs: F, R, I and W take one unit, B takes two, and F holds one.

    Example:
        >>> unit_costs(("F", "B"), chunks=2).seconds
        {'F': 0.5, 'B': 1.0}
    """
    seconds: dict[BlockKind, float] = {kind: KINDS[kind].units / chunks for kind in kinds}
    return StageCosts(seconds, {"F": 1 / chunks}, {kinds[-1]: 1 / chunks})


def chain_problem(
    stages: Sequence[StageCosts],
    lies: Sequence[int | Devices],
    microbatches: int,
    *,
    hop: Hop = 0.0,
    memory: float | Sequence[float | None] | None = None,
    turned: Sequence[int | Devices] | None = None,
    name: str = "chain",
) -> Problem:
    """The problem of a chain of stages; blocks wait as `jscaler.tables.legal.chain_waits` says.

    Args:
        stages: what the blocks of each stage take.
        lies: the device of each stage, or its devices.
        microbatches: how many micro-batches a step has.
        hop: seconds from the devices of a stage to those of another; a number is the same for all.
        memory: bytes that a device may hold: one number for all, or one for each.
        turned: where stages lie for odd micro-batches, if these lie elsewhere.
        name: what messages call the problem.

    Returns:
        The problem.

    Raises:
        PlanError: the numbers of stages differ, or a stage has no forward.

    Example:
        >>> problem = chain_problem([unit_costs()] * 2, lies=[0, 1], microbatches=4, memory=2)
        >>> [str(block) for block in problem.lanes[0]]
        ['0F', '0I', '0W', '1F', '1I', '1W']
    """
    lanes = [[_devices(own) for own in lie] for lie in ([lies] if turned is None else [lies, turned])]
    if any(len(lane) != len(stages) for lane in lanes):
        raise PlanError(
            f"{name}: {len(stages)} stages lie at {[len(lane) for lane in lanes]} places; give one for each stage"
        )
    for number, stage in enumerate(stages):
        if "F" not in stage.seconds or ("B" in stage.seconds and not {"I", "W"}.isdisjoint(stage.seconds)):
            raise PlanError(f"{name}: stage {number} has F, and B or I and W, not {shown(list(stage.seconds))}")
    blocks = tuple(tuple(_blocks(stages, lane)) for lane in lanes)
    place = {block.key: number for number, block in enumerate(blocks[0])}

    def seconds(first: int, second: int) -> float:
        ends = blocks[0][first].devices, blocks[0][second].devices
        return 0.0 if ends[0] == ends[1] and len(lanes) == 1 else hop(*ends) if callable(hop) else hop

    pairs = [(place[other], number) for number, block in enumerate(blocks[0]) for other in _waits(block) if other in place]
    edges = tuple(Edge(first, second, seconds(first, second)) for first, second in pairs)
    if memory is not None:
        count = 1 + max(device for lane in lanes for own in lane for device in own)
        memory = (memory,) * count if isinstance(memory, int | float) else tuple(memory)
    return Problem(name, blocks, edges, microbatches, memory)


def _devices(own: int | Devices) -> Devices:
    return (own,) if isinstance(own, int) else tuple(own)


def _blocks(stages: Sequence[StageCosts], lies: Sequence[Devices]) -> list[SearchBlock]:
    return [
        SearchBlock(number, kind, devices, stage.seconds[kind], stage.held.get(kind, 0.0), stage.freed.get(kind, 0.0))
        for number, (stage, devices) in enumerate(zip(stages, lies, strict=True))
        for kind in KINDS_IN_ORDER
        if kind in stage.seconds
    ]


def _waits(block: SearchBlock) -> list[tuple[int, BlockKind]]:
    """Stage and kind of the blocks that a block waits for, if there are such."""
    stage = block.stage
    if block.kind == "F":
        return [(stage - 1, "F")]
    if block.kind in "RW":
        return [(stage, "F" if block.kind == "R" else "I")]
    return [(stage, "F"), (stage, "R"), (stage + 1, "B"), (stage + 1, "I")]
