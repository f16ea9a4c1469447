"""The blocks of a step's loop over micro-batches, as `jscaler.tables.search` takes them: seconds, bytes, and what waits.

All that a stage does of one kind for a micro-batch is one block of the problem: its layers and its end, say. Devices that
hold alike (those of a stage) are one device of the problem. What a block leaves for later ones is held from its begin until
the last of these ends; what arrives from another group, from the begin of its first reader.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jscaler.errors import PlanError
from jscaler.estimate.live import LiveTensors
from jscaler.estimate.memory import memory_by_devices
from jscaler.estimate.waiting import Devices, Held, Waiting, devices_alike
from jscaler.lower.instructions import Instruction, Run, Send, Slot
from jscaler.lower.step_plan import StepPlan
from jscaler.tables import BlockKind, Overlap, Table, TableCell
from jscaler.tables.search.problem import Edge, Key, Problem, SearchBlock
from jscaler.tables.search.replay import replay
from jscaler.text.units import readable_bytes

ORDER: tuple[BlockKind, ...] = ("F", "R", "B", "I", "W")  # of a stage's blocks for one micro-batch
BACKWARDS: tuple[BlockKind, ...] = ("B", "I", "W")


Limit = float | Callable[[Devices], float] | None


def schedule_problem(
    step: StepPlan, seconds: Sequence[float], hops: Sequence[float], memory: Limit = None, donated: bool = True
) -> tuple[Problem, Table]:
    """What is to be ordered of ``step``, and the table that it runs by.

    Args:
        seconds: of one run of each block.
        hops: of each transfer.
        memory: bytes that a device has for the whole step, or those that each of a group has; None for no limit.
        donated: whether the step updates its state in place.

    Raises:
        PlanError: the step has no loop over several device groups, or its table overlaps blocks.
    """
    table = step.instructions.table
    if table is None or step.spanning is None:
        raise PlanError(
            f"'{step.name}' has no loop over micro-batches that lies on several device groups: nothing to order"
        )
    if (pair := next((str(e) for row in table.rows for e in row if isinstance(e, Overlap)), None)) is not None:
        raise PlanError(
            f"the table of '{step.name}' overlaps blocks, {pair}: search the order of a step whose table has no such entry"
        )
    found = _Blocks.of(step, seconds, hops, donated)
    problem = found.problem(step.name, step.spanning.loop.parts)
    if memory is None:
        return problem, table
    peaks = {one.devices: one.memory.peak for one in memory_by_devices(step, donated)}
    beside = [peaks[own] - held for own, held in zip(devices_alike(step), replay(problem, table).peaks, strict=True)]
    limits: list[float] = []
    for devices, one in zip(devices_alike(step), beside, strict=True):
        limit = memory(devices) if callable(memory) else memory
        limits.append(limit - one)
        if one > limit:
            raise PlanError(
                f"'{step.name}': devices {', '.join(map(str, devices))} hold {readable_bytes(one)} each beside what waits "
                f"for later blocks; the limit is {readable_bytes(limit)}: give them more, or split the state further"
            )
    return found.problem(step.name, step.spanning.loop.parts, limits), table


@dataclass
class _Blocks:
    """What the instructions of a step say of its cells.

    Attributes:
        devices: of each cell the sets of devices that run it, by their numbers; with several turns for each turn.
        seconds: of each kind of block, over all micro-batches.
        held, freed: bytes on one device, over all micro-batches.
        waits: pairs of blocks, and the seconds of the transfers between.
        named: the stages and kinds that the table has.
    """

    step: StepPlan
    named: Set[Key]
    turns: int
    devices: dict[tuple[int, Key], tuple[int, ...]] = field(default_factory=dict)
    seconds: dict[Key, float] = field(default_factory=dict)
    held: Counter[Key] = field(default_factory=Counter)
    freed: Counter[Key] = field(default_factory=Counter)
    waits: dict[tuple[Key, Key], float] = field(default_factory=dict)

    @staticmethod
    def of(step: StepPlan, seconds: Sequence[float], hops: Sequence[float], donated: bool) -> "_Blocks":
        table = step.instructions.table
        assert table is not None
        assert step.spanning is not None
        found = _Blocks(step, {(cell.stage, cell.kind) for cell in table.cells()}, len(step.spanning.phases))
        alike = devices_alike(step)
        maker: dict[Slot, tuple[TableCell, float]] = {}
        for one in step.instructions.steps:
            cell = found.cell(one) if isinstance(one, Run) else None
            if isinstance(one, Run) and cell is not None:
                group = step.blocks[one.block].group.devices
                own = tuple(number for number, devices in enumerate(alike) if devices[0] in group)
                found.devices[cell.microbatch % found.turns, (cell.stage, cell.kind)] = own
                key = cell.stage, cell.kind
                found.seconds[key] = found.seconds.get(key, 0.0) + seconds[one.block]
                found.read(cell, (maker[slot] for slot in one.reads if slot in maker))
                maker.update((slot, (cell, 0.0)) for slot in one.writes)
            elif isinstance(one, Send) and one.source in maker:
                made, before = maker[one.source]
                maker[one.target] = made, before + hops[one.transfer]
        found.hold(donated)
        found.add_cells_without_blocks()
        return found

    def cell(self, run: Run) -> TableCell | None:
        """The cell that a run is part of, of several the first, with which it runs; None outside of the loop.

        What the table does not name is part of a backward: what that computes again, or the backward as a whole.
        """
        names: Sequence[Key] = self.step.instructions.names.get(run.block, ())
        for stage, kind in names:
            every: tuple[BlockKind, ...] = (kind, *BACKWARDS)
            return TableCell(stage, next(one for one in every if (stage, one) in self.named), min(run.microbatches))
        return None

    def read(self, cell: TableCell, made: Iterable[tuple[TableCell, float]]) -> None:
        """What ``cell`` waits for: blocks of its micro-batch. (Sums over micro-batches are added in any order.)"""
        key: Key = cell.stage, cell.kind
        own: dict[Key, float] = {}
        for other, hop in made:
            if other.microbatch == cell.microbatch and (other.stage, other.kind) != key:
                own[other.stage, other.kind] = own.get((other.stage, other.kind), 0.0) + hop
        for other, hop in own.items():
            self.waits[other, key] = max(self.waits.get((other, key), 0.0), hop)

    def hold(self, donated: bool) -> None:
        """What cells hold for others, and let go."""
        donate = frozenset(self.step.graph.next_version.values()) if donated else frozenset[int]()
        lies: dict[Slot, Held] = {}
        before: Instruction | None = None
        maker: dict[Slot, TableCell] = {}
        for _, one, slots, _ in Waiting(self.step, LiveTensors(self.step.graph), donate).states():
            lies.update((slot, slots[slot]) for slot in _written(before) if slot in slots)
            cell = self.cell(one) if isinstance(one, Run) else None
            if isinstance(one, Run) and cell is not None:
                for slot in (slot for slot in one.reads if slot in lies and slot not in maker):
                    maker[slot] = cell  # it has come from another group
                maker.update(dict.fromkeys((slot for slot in one.writes if slot not in one.freed), cell))
                for slot in one.freed:
                    self.let_go(maker.get(slot), cell, lies.get(slot))
            before = one

    def let_go(self, maker: TableCell | None, cell: TableCell, held: Held | None) -> None:
        if maker is not None and held is not None and maker.microbatch == cell.microbatch:
            self.held[maker.stage, maker.kind] += held.what.nbytes
            self.freed[cell.stage, cell.kind] += held.what.nbytes

    def add_cells_without_blocks(self) -> None:
        """The table's cells that have no block of their own, which take no time: the I of a stage that passes no gradient
        on, and what runs as part of its stage's forward."""
        for stage in dict.fromkeys(stage for stage, _ in self.named):
            own: list[BlockKind] = [kind for kind in ORDER if (stage, kind) in self.named]
            lacking: list[BlockKind] = [kind for kind in own if (stage, kind) not in self.seconds]
            for kind in lacking:
                self.seconds[stage, kind] = 0.0
                for turn in range(self.turns):
                    self.devices[turn, (stage, kind)] = next(
                        self.devices[turn, (stage, other)] for other in own if (turn, (stage, other)) in self.devices
                    )
            for first, second in itertools.pairwise(own) if lacking else ():
                self.waits.setdefault(((stage, first), (stage, second)), 0.0)

    def problem(self, name: str, microbatches: int, memory: Sequence[float] | None = None) -> Problem:
        """All of it, each figure that of one micro-batch."""
        keys = sorted(self.seconds)
        place = {key: number for number, key in enumerate(keys)}
        each: list[Mapping[Key, float]] = [
            {key: count / microbatches for key, count in every.items()} for every in (self.seconds, self.held, self.freed)
        ]
        lanes = tuple(
            tuple(
                SearchBlock(*key, self.devices[turn, key], *(one.get(key, 0.0) for one in each)) for key in keys
            )
            for turn in range(self.turns)
        )  # fmt: skip
        edges = tuple(Edge(place[a], place[b], hop) for (a, b), hop in self.waits.items())
        return Problem(name, lanes, edges, microbatches, None if memory is None else tuple(memory))


def _written(one: Instruction | None) -> tuple[Slot, ...]:
    if one is None:
        return ()
    return one.writes if isinstance(one, Run) else (one.target,)
