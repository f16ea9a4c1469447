"""``Problem``: what the schedule search is given: blocks, edges between them, micro-batches and memory limits.

A micro-batch runs each block of its lane once. Most pipelines have one lane. In a pipeline of two directions, such as
Chimera, even micro-batches take lane 0 and odd ones lane 1, which has the same blocks on other devices.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jscaler.errors import PlanError, check_count, shown
from jscaler.tables.table import KINDS, BlockKind, TableCell

Devices = tuple[int, ...]
Key = tuple[int, BlockKind]  # stage and kind of a block


@dataclass(frozen=True)
class SearchBlock:
    """A block that a micro-batch runs once.

    Attributes:
        stage: its number in cells of a table.
        kind: F, R, B, I or W, as in cells of a table.
        devices: those that run it, all at the same time.
        seconds: how long it takes.
        held: bytes that it adds to each of its devices when it begins.
        freed: bytes that it lets go on each of its devices when it ends.

    Example:
        >>> SearchBlock(2, "F", (0, 1), 1.5, held=1024).key
        (2, 'F')
    """

    stage: int
    kind: BlockKind
    devices: Devices
    seconds: float
    held: float = 0.0
    freed: float = 0.0

    @property
    def key(self) -> Key:
        """Its stage and kind."""
        return self.stage, self.kind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


@dataclass(frozen=True)
class Edge:
    """A block that waits for another of the same micro-batch.

    Attributes:
        before: the place of the first block in its lane.
        after: the place of the block that waits.
        hop: seconds from the devices of the one to those of the other; none where both run on the same devices.

    Example:
        >>> Edge(0, 1, hop=0.25).hop
        0.25
    """

    before: int
    after: int
    hop: float = 0.0


@dataclass(frozen=True)
class Problem:
    """Blocks to bring into an order, and the memory that the order may take.

    Attributes:
        name: what messages call it.
        lanes: the blocks of a micro-batch, for each lane; micro-batch j takes lane j modulo their number.
        edges: between the blocks of a lane, the same in each lane.
        microbatches: how many micro-batches a step has.
        memory: bytes that each device may hold of what blocks hold; None for a device, or for all, is no limit.

    Raises:
        PlanError: a number is negative, a block stands twice, edges form a circle, or lanes have different blocks.

    Example:
        >>> forward, backward = SearchBlock(0, "F", (0,), 1.0, held=1), SearchBlock(0, "B", (0,), 2.0, freed=1)
        >>> problem = Problem("one device", ((forward, backward),), (Edge(0, 1),), microbatches=3, memory=(1,))
        >>> problem.devices, problem.rows, problem.limit(0)
        (1, ((0,),), 1)
    """

    name: str
    lanes: tuple[tuple[SearchBlock, ...], ...]
    edges: tuple[Edge, ...]
    microbatches: int
    memory: tuple[float | None, ...] | None = None

    def __post_init__(self) -> None:
        check_count(f"{self.name}: microbatches", self.microbatches)
        if not self.lanes or not self.lanes[0]:
            raise PlanError(f"{self.name} has no blocks; give the blocks of one micro-batch for each lane")
        for lane in self.lanes:
            for block in lane:
                _check_block(self.name, block)
        _check_lanes(self.name, self.lanes)
        _check_edges(self.name, len(self.lanes[0]), self.edges)
        if self.memory is not None and len(self.memory) != self.devices:
            raise PlanError(
                f"{self.name} has {self.devices} devices and {len(self.memory)} memory limits; give one for each, or None"
            )

    @cached_property
    def devices(self) -> int:
        """How many devices there are; they have the numbers from 0."""
        return 1 + max(device for lane in self.lanes for block in lane for device in block.devices)

    @cached_property
    def rows(self) -> tuple[Devices, ...]:
        """The devices of each row of a table, in the order of their first stages."""
        first: dict[Devices, tuple[int, int]] = {}
        for number, lane in enumerate(self.lanes):
            for block in lane:
                first[block.devices] = min(first.get(block.devices, (number, block.stage)), (number, block.stage))
        return tuple(sorted(first, key=lambda devices: (first[devices], devices)))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The places of a lane's blocks, each behind those that it waits for."""
        return topological(len(self.lanes[0]), self.edges)

    def limit(self, device: int) -> float | None:
        """Bytes that a device may hold; None where there is no limit."""
        return None if self.memory is None else self.memory[device]

    def lane(self, microbatch: int) -> tuple[SearchBlock, ...]:
        """The blocks that a micro-batch runs."""
        return self.lanes[microbatch % len(self.lanes)]

    def cells(self) -> Iterator[tuple[TableCell, SearchBlock]]:
        """Every cell of a table of this problem, with its block."""
        for microbatch in range(self.microbatches):
            for block in self.lane(microbatch):
                yield TableCell(block.stage, block.kind, microbatch), block

    def with_microbatches(self, microbatches: int) -> "Problem":
        """The same problem with another number of micro-batches."""
        return dataclasses.replace(self, microbatches=microbatches)


def topological(count: int, edges: Sequence[Edge]) -> tuple[int, ...]:
    """The numbers below ``count`` in an order that follows ``edges``; fewer of them if the edges form a circle."""
    left = [sum(edge.after == number for edge in edges) for number in range(count)]
    found = [number for number in range(count) if not left[number]]
    for number in found:
        for edge in (edge for edge in edges if edge.before == number):
            left[edge.after] -= 1
            if not left[edge.after]:
                found.append(edge.after)
    return tuple(found)


def _check_block(name: str, block: SearchBlock) -> None:
    if block.kind not in KINDS:
        raise PlanError(f"{name}: the kind of block '{block}' is one of {', '.join(KINDS)}, not {shown(block.kind)}")
    whole = all(isinstance(device, int) and device >= 0 for device in block.devices)
    if not block.devices or not whole or len(set(block.devices)) != len(block.devices):
        raise PlanError(
            f"{name}: the devices of block '{block}' are different whole numbers from 0, not {shown(block.devices)}"
        )
    for what in ("seconds", "held", "freed"):
        value = getattr(block, what)
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise PlanError(f"{name}: {what} of block '{block}' is a number from 0, not {shown(value)}")


def _check_lanes(name: str, lanes: Sequence[Sequence[SearchBlock]]) -> None:
    for number, lane in enumerate(lanes):
        keys = [block.key for block in lane]
        if twice := [str(block) for place, block in enumerate(lane) if block.key in keys[:place]]:
            raise PlanError(f"{name}: lane {number} has block '{twice[0]}' twice; a micro-batch runs each block once")
        for block, other in zip(lane, lanes[0], strict=False):
            if dataclasses.replace(block, devices=other.devices) != other:
                raise PlanError(f"{name}: lane {number} has {block} where lane 0 has {other}; lanes differ in devices only")
        if len(lane) != len(lanes[0]):
            raise PlanError(f"{name}: lane {number} has {len(lane)} blocks, and lane 0 has {len(lanes[0])}; give the same")


def _check_edges(name: str, count: int, edges: Sequence[Edge]) -> None:
    for edge in edges:
        if not (0 <= edge.before < count and 0 <= edge.after < count):
            raise PlanError(f"{name}: an edge goes from block {edge.before} to {edge.after}, and there are {count} blocks")
        if not 0 <= edge.hop < math.inf:
            raise PlanError(
                f"{name}: the hop from block {edge.before} to {edge.after} is a number from 0, not {edge.hop!r}"
            )
    if len(topological(count, edges)) < count:
        raise PlanError(f"{name}: the edges form a circle; each block waits for blocks that run before it")
