"""How a tensor comes to a program that reads it and does not make it.

An argument of the step is taken where it lies. A value of an earlier program of the group is passed on; one of another
group crosses::

    group 0   │ level 0 ├──────────────────┤ level 2 │      a value that a later level of the same group reads
    group 1             └──► level 1 ──────┘                stays where it is; one that another group reads crosses

A value that goes from program to program is an array of its devices' parts, one behind the other: so any layout can, also
value shares and uneven blocks, in the order in which the group's mesh has its devices.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from jscaler.clusters import CostModel
from jscaler.ir import Graph, PTensor
from jscaler.lower.draft import Draft, ProgramKey
from jscaler.lower.level import FRONT, START, BlockKey, Level
from jscaler.lower.op_blocks import OpBlocks
from jscaler.lower.phases import Phase
from jscaler.lower.program import Writer
from jscaler.lower.spanning_loop import Transfer
from jscaler.materialize import Completed, DeviceMesh, Layout
from jscaler.materialize.crossing import Crossing, find_crossing, on_devices

Bring = Callable[[tuple[int, int], PTensor, Layout], None]


class MadeAt(NamedTuple):
    """The program that makes a tensor, behind which level, and whether a backward op does."""

    program: ProgramKey
    level: Level
    is_backward: bool


class Value(NamedTuple):
    """A value that a loop over groups finds, or leaves."""

    number: int
    layout: Layout


@dataclass
class Passing:
    """Brings tensors to the programs that read them.

    Attributes:
        numbers: the numbers of values that are not taken yet.
        held: tensor, place -> the program of that place that has it, or in which it arrives.
        carried, finals: what an iteration of a loop over groups finds, and what the loop leaves.
        slices: the micro-batch's number, in the loop's words; ``indices``: program -> the number of that value.
    """

    graph: Graph
    completed: Completed
    cost: CostModel
    phases: Sequence[Phase]
    blocks: OpBlocks
    new_writer: Callable[[tuple[int, int], Bring], Writer]
    numbers: Iterator[int]
    drafts: dict[ProgramKey, Draft] = field(default_factory=dict)
    held: dict[tuple[PTensor, int], ProgramKey] = field(default_factory=dict)
    made: dict[PTensor, MadeAt] = field(default_factory=dict)
    carried: dict[PTensor, Value] = field(default_factory=dict)
    finals: dict[PTensor, Value] = field(default_factory=dict)
    slices: Set[PTensor] = frozenset()
    indices: dict[ProgramKey, int] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.constants = {t for t, _ in self.graph.constants}

    def draft(self, key: ProgramKey) -> Draft:
        """The program ``key``; of a step on one group it takes all arguments and constants, else those that it reads."""
        if key not in self.drafts:
            draft = Draft(key, self.blocks.group(key.place), self.new_writer(key, self.bring), self.numbers)
            self.drafts[key] = draft
            if len(self.completed.groups) == 1:
                for tensor in (*self.graph.inputs, *(t for t, _ in self.graph.constants)):
                    self._take(draft, tensor)
        return self.drafts[key]

    def _take(self, draft: Draft, tensor: PTensor) -> None:
        everywhere = tensor in self.constants
        draft.take(tensor, Layout.replicated(draft.group, tensor.shape) if everywhere else self.completed.inputs[tensor])

    def bring(self, program: tuple[int, int], tensor: PTensor, layout: Layout) -> None:
        """Define ``tensor``, which another program has, in a program: in ``layout``, or close to it."""
        key = ProgramKey(*program)
        draft, in_loop = self.draft(key), self.phases[key.phase].loop is not None
        if tensor in self.constants or (self._lies(tensor, draft.group) and not in_loop):
            self._take(draft, tensor)
        elif in_loop and not self._in_body(tensor):
            self._hand_on(draft, tensor, layout)
        elif in_loop and tensor in self.slices:
            if key not in self.indices:
                self.indices[key] = next(self.numbers)
            draft.import_value(tensor, Layout.replicated(draft.group, ()), self.indices[key])
        elif (value := self._at_loop(tensor, draft.group, in_loop)) is not None:
            draft.import_value(tensor, value.layout, value.number)
        elif (tensor, key.place) in self.held:
            front = self.drafts[self.held[tensor, key.place]]
            self._pass_on(front, tensor, front.writer.nearest(tensor, between(layout)), draft)
        else:
            self._cross(draft, tensor, layout)
        self.held.setdefault((tensor, key.place), key)

    def _at_loop(self, tensor: PTensor, group: DeviceMesh, in_loop: bool) -> Value | None:
        """What a loop over groups finds, or has left, on ``group``: it is there for both places of it."""
        values = (ends.get(tensor) for ends in ((self.carried, self.finals) if in_loop else (self.finals,)))
        here = (v for v in values if v is not None and self.completed.group_of(v.layout.mesh) == group)
        return next(here, None)

    def _lies(self, tensor: PTensor, group: DeviceMesh) -> bool:
        return tensor in self.completed.inputs and self.completed.inputs[tensor].mesh == group

    def _in_body(self, tensor: PTensor) -> bool:
        """Whether an iteration makes ``tensor``, at this turn or an earlier one, or finds it."""
        earlier = tensor in self.made and self.phases[self.made[tensor].program.phase].loop is not None
        return earlier or tensor in self.blocks.of_tensor or tensor in self.slices

    def _hand_on(self, draft: Draft, tensor: PTensor, layout: Layout) -> None:
        """What all iterations read of the program around them is brought to its layout once, in front of the loop."""
        if self._lies(tensor, draft.group) and self.completed.inputs[tensor] == layout:
            self._take(draft, tensor)
        else:
            front = self.draft(ProgramKey(self.phases[draft.key.phase].first - 1, draft.key.place))
            self._pass_on(front, tensor, between(layout), draft)

    def _pass_on(self, front: Draft, tensor: PTensor, layout: Layout, draft: Draft) -> None:
        """From an earlier program of the same group; what that has only been given is taken from where it comes from."""
        slot = front.writer.read(tensor, layout)
        origin = front.given.get(slot)
        if isinstance(origin, PTensor):
            self._take(draft, tensor)
        elif origin is not None:
            arrived = next(end for end in front.imports if end.slot == slot)
            draft.import_value(tensor, arrived.layout, origin)
        else:
            draft.import_value(tensor, layout, front.leave(tensor, layout, None))

    def _cross(self, draft: Draft, tensor: PTensor, layout: Layout) -> None:
        """From another place: out of the program that makes it, or that has been given it."""
        made = self.made.get(tensor)
        origin, level = (ProgramKey(draft.key.phase, self._place_of(tensor)), START) if made is None else made[:2]
        holder = self.draft(origin)
        if tensor not in holder.writer.slots:
            self.bring(origin, tensor, layout)
        held = [_in_order(known, holder.group) for known, _ in holder.writer.slots[tensor]]
        wanted = _in_order(layout, draft.group)
        inside = holder.group == wanted.mesh
        leaving, arriving = (self._inside(tensor, held, wanted),) * 2 if inside else self._ends(tensor, held, wanted)
        source = holder.given.get(holder.writer.read(tensor, leaving))
        if isinstance(source, int):
            level = FRONT  # given to it from in front of its phase
        else:
            source = holder.leave(tensor, leaving, level)
        target = source
        if not inside:
            target = next(self.numbers)
            crossing = Crossing.bare(leaving, arriving)
            self.transfers.append(Transfer(tensor, source, target, crossing, BlockKey(*origin, level)))
        is_behind = origin.phase == draft.key.phase and level != FRONT
        draft.import_value(tensor, arriving, target, Level(level.number + 1) if is_behind else START)

    def leaving(self, tensor: PTensor, layout: Layout, phase: int) -> Draft:
        """The program of ``phase``, on the group of ``layout``, that ``tensor`` leaves: its maker's, if that is there."""
        number, made = self.blocks.number_of(layout), self.made.get(tensor)
        is_here = made is not None and self.blocks.group(made.program.place) == self.blocks.group(number)
        return self.draft(ProgramKey(phase, made.program.place if made is not None and is_here else number))

    def _place_of(self, tensor: PTensor) -> int:
        """Where an argument lies, or what a loop over groups finds and leaves."""
        value = self.carried.get(tensor) or self.finals.get(tensor)
        return self.blocks.number_of(value.layout if value is not None else self.completed.inputs[tensor])

    def _inside(self, tensor: PTensor, held: Sequence[Layout], wanted: Layout) -> Layout:
        """How a tensor lies that goes from one place of a group to the other: as it would arrive from a group beside it, so
        that layers behind the model's first end are the program that they are behind others.
        """
        groups, group, own = self.completed.groups, wanted.mesh, self.blocks.number_of(wanted)
        near = [groups[n] for n in (own - 1, own + 1) if 0 <= n < len(groups)]
        beside = [g for g in near if g.axes == group.axes and not {*g.devices} & {*group.devices}]
        if not beside:
            return between(held[0])
        pairs = list(zip(group.devices, beside[0].devices, strict=True))
        _, arriving = self._ends(tensor, held, on_devices(wanted, dict(pairs)))
        return on_devices(arriving, {there: here for here, there in pairs})

    def _ends(self, tensor: PTensor, held: Sequence[Layout], wanted: Layout) -> tuple[Layout, Layout]:
        """How a tensor that is ``held`` leaves its group, and how it arrives where it is ``wanted``."""
        if not wanted.sizes or jax.dtypes.issubdtype(tensor.dtype, jax.dtypes.extended):  # a key is not cut into pieces
            return Layout.replicated(held[0].mesh, tensor.shape), Layout.replicated(wanted.mesh, tensor.shape)
        crossings = (find_crossing(known, wanted, tensor.itemsize, self.cost) for known in dict.fromkeys(held))
        best = min(crossings, key=lambda found: found.cost)
        return best.leave.target, best.arrive.source


def between(layout: Layout) -> Layout:
    """How a value may lie between blocks: a scalar, which has no dim to stand in, as it is on every device."""
    return layout if layout.sizes else Layout.replicated(layout.mesh, ())


def _in_order(layout: Layout, group: DeviceMesh) -> Layout:
    """``layout`` in the order of its program's mesh, in which values leave and arrive."""
    return layout if layout.mesh.devices == group.devices else dataclasses.replace(layout, mesh=group)
