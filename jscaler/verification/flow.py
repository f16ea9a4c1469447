"""The flow through a step's program: which part of which tensor lies in each slot, from producer to consumer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jscaler.capture.jaxprs import shape
from jscaler.errors import VerificationError
from jscaler.ir import PTensor
from jscaler.ir.mask import Mask
from jscaler.lower.emit_collectives import exchange
from jscaler.lower.halo import extend
from jscaler.lower.program import Adapt, Compute, Extend, Program, Repeat, Task, all_tasks
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import DeviceMesh, Layout
from jscaler.materialize.edges import Edge
from jscaler.verification.arrival import Arrival
from jscaler.verification.collectives import COLLECTIVES
from jscaler.verification.frames import Frame, path_of
from jscaler.verification.symbols import Patterns

Masks = tuple[Mask, ...]


def emitted_exchange(group: DeviceMesh, task: Adapt | Extend) -> Callable[[Any], Any]:
    """What ``emit`` runs for an exchange of a program on ``group``. Nowhere else the verifier knows how it is called."""
    if isinstance(task, Extend):
        return lambda local: extend(task.edges, local, group, task.layout.mesh)
    return lambda local: exchange(task.adapter, local, group, task.reduce_dtype)


def max_carries(tasks: Sequence[Task]) -> int:
    """The most carries that one loop has."""
    return max((len(t.carries) for t in all_tasks(tasks) if isinstance(t, Repeat)), default=0)


@dataclass(frozen=True)
class HeldSlot:
    """A slot's content: each device's mask of a tensor, and the rows around it."""

    tensor: PTensor
    masks: Masks
    edges: tuple[Edge, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local arrays."""
        sizes = list(Frame(self.masks).shape)
        for edge in self.edges:
            sizes[edge.dim] += edge.before + edge.after
        return tuple(sizes)


@dataclass
class SlotFlow:
    """Walks the tasks of a group's program. What an exchange leaves is taken at its word here, and proven apart from it.

    Attributes:
        values: what goes from segment to segment, by number.
        exchanges: each with what lies in its input slot, and what its readers are promised.
        num_reads: the VTensors checked so far, each on all devices.
    """

    step: StepPlan
    program: Program
    names: Sequence[Any]
    values: Mapping[int, PTensor] = field(default_factory=dict)
    slots: dict[int, HeldSlot] = field(default_factory=dict)
    exchanges: list[tuple[Adapt | Extend, HeldSlot, HeldSlot]] = field(default_factory=list)
    num_reads: int = 0
    _same: set[tuple[Masks, Masks]] = field(default_factory=set)
    _masks: dict[Any, Masks] = field(default_factory=dict)
    _shapes: dict[Any, tuple[tuple[int, ...], Masks]] = field(default_factory=dict)

    def walk(self, taken: Mapping[PTensor, PartitionSpec], left: Mapping[int, PartitionSpec]) -> None:
        """Check every read of every op, and that the step's results lie as their specs say.

        Args:
            taken: how the emitted program cuts the inputs of the step that it takes.
            left: how it cuts the results that it leaves, by number.

        Raises:
            VerificationError: an op's VTensor is not what its slot holds.
        """
        program = self.program
        own = len(program.inputs) - len(program.imports)
        ends = list(zip(program.tensors, program.inputs, strict=True))
        for tensor, (slot, layout) in ends[:own]:
            spec = taken[tensor] if tensor in taken else layout.partition_spec()  # a constant is cut as its layout says
            assert spec is not None, f"{layout} is not stored"
            self.slots[slot] = HeldSlot(tensor, self._cut(spec, tensor.shape))
        for tensor, (slot, layout) in ends[own:]:  # what other segments leave is looked at where they leave it
            self.slots[slot] = HeldSlot(tensor, self._all(layout))
        wanted = self._first_readers()
        self._tasks(program.tasks, wanted)
        for index, (slot, _) in zip(program.results, program.outputs, strict=False):
            tensor = self.step.graph.outputs[index]
            promised = HeldSlot(tensor, self._cut(left[index], tensor.shape))
            self._check(self.slots[slot], promised, lambda index=index, tensor=tensor: f"output {index} '{tensor.name}'")
        for value, (slot, layout) in self._exports():
            tensor = self.values[value]
            promised = HeldSlot(tensor, self._all(layout))
            self._check(self.slots[slot], promised, lambda tensor=tensor: f"'{tensor.name}', which leaves its segment")

    def _exports(self) -> list[tuple[int, tuple[int, Layout]]]:
        """What other segments read; what goes from stage to stage of one segment, its own readers are held to."""
        program = self.program
        left = zip(program.exports, program.outputs[len(program.results) :], strict=True)
        return [(value, end) for value, end in left if value in self.values]

    def _tasks(self, tasks: Sequence[Task], wanted: Mapping[int, HeldSlot]) -> None:
        for task in tasks:
            if isinstance(task, Compute):
                self._compute(task)
            elif isinstance(task, Repeat):
                self._repeat(task, wanted)
            elif task.output in wanted:  # what nobody reads promises nothing
                self.exchanges.append((task, self.slots[task.input], wanted[task.output]))
                self.slots[task.output] = wanted[task.output]

    def _repeat(self, task: Repeat, wanted: Mapping[int, HeldSlot]) -> None:
        """By induction: a carry comes as an iteration takes it, and an iteration leaves it so."""
        loop = task.loop
        before, after = self._loop_reads(task)
        for slot, held in before:
            self._check(self.slots[slot], held, lambda held=held: f"loop '{loop.name}', '{held.tensor.name}'")
        laid = self.step.completed.loops[loop.name]
        for carry, layout, (_, inside, _, final) in zip(loop.carries, laid.carries, task.carries, strict=True):
            self.slots[inside] = HeldSlot(carry.inside, self._all(layout))
            self.slots[final] = HeldSlot(carry.final, self._all(layout))
        for x, layout, (_, piece) in zip(loop.xs, laid.xs, task.xs, strict=True):
            self.slots[piece] = HeldSlot(x.slice, self._all(layout))
        self._tasks(task.tasks, wanted)
        for slot, held in after:
            self._check(self.slots[slot], held, lambda held=held: f"end of loop '{loop.name}', '{held.tensor.name}'")
        for y, layout, (_, stack) in zip(loop.ys, laid.ys, task.ys, strict=True):
            self.slots[stack] = HeldSlot(y.stack, self._all(layout.stacked(loop.length)))

    def _loop_reads(self, task: Repeat) -> tuple[list[tuple[int, HeldSlot]], list[tuple[int, HeldSlot]]]:
        """What a loop reads before its first iteration, and what each iteration must leave."""
        loop, laid = task.loop, self.step.completed.loops[task.loop.name]
        before, after = [], []
        for carry, layout, (init, _, out, _) in zip(loop.carries, laid.carries, task.carries, strict=True):
            before.append((init, HeldSlot(carry.init, self._all(layout))))
            after.append((out, HeldSlot(carry.out, self._all(layout))))
        for x, layout, (stack, _) in zip(loop.xs, laid.xs, task.xs, strict=True):
            before.append((stack, HeldSlot(x.stack, self._all(layout.stacked(loop.length)))))
        for y, layout, (piece, _) in zip(loop.ys, laid.ys, task.ys, strict=True):
            after.append((piece, HeldSlot(y.slice, self._all(layout))))
        return before, after

    def _compute(self, task: Compute) -> None:
        laid = self.step.completed.ops[task.op.path]
        count = len(task.inputs)
        for index, slot in enumerate(task.inputs):
            wanted = HeldSlot(task.op.inputs[index], self._all(laid.inputs[index]), laid.edges_of(index))
            here = f"op '{task.op.path}', input {index} '{wanted.tensor.name}'"
            self._check(self.slots[slot], wanted, lambda here=here: here)
            self._check_shape(here, wanted, task.jaxpr.invars[:count][index])
        for index, slot in enumerate(task.outputs):
            left = HeldSlot(task.op.outputs[index], self._all(laid.outputs[index]))
            self._check_shape(f"op '{task.op.path}', output {index}", left, task.jaxpr.outvars[index])
            self.slots[slot] = left
        for eqn in task.jaxpr.eqns:
            if eqn.primitive.name in COLLECTIVES:
                raise VerificationError(f"op '{task.op.path}' runs a {eqn.primitive.name} of its own")

    def _first_readers(self) -> dict[int, HeldSlot]:
        """For each slot what its first reader wants there; the others are held to the same."""
        program = self.program
        found: dict[int, HeldSlot] = {}
        self._find_readers(program.tasks, found)
        for (slot, _), index in zip(program.outputs, program.results, strict=False):
            found.setdefault(slot, HeldSlot(self.step.graph.outputs[index], self._all(self.step.completed.outputs[index])))
        for value, (slot, layout) in self._exports():
            found.setdefault(slot, HeldSlot(self.values[value], self._all(layout)))
        return found

    def _find_readers(self, tasks: Sequence[Task], found: dict[int, HeldSlot]) -> None:
        for task in tasks:
            if isinstance(task, Compute):
                laid = self.step.completed.ops[task.op.path]
                for i, (slot, tensor, layout) in enumerate(zip(task.inputs, task.op.inputs, laid.inputs, strict=True)):
                    found.setdefault(slot, HeldSlot(tensor, self._all(layout), laid.edges_of(i)))
            elif isinstance(task, Extend):
                found.setdefault(task.input, HeldSlot(task.tensor, self._all(task.layout)))
            elif isinstance(task, Repeat):
                before, after = self._loop_reads(task)
                for slot, held in before:
                    found.setdefault(slot, held)
                self._find_readers(task.tasks, found)
                for slot, held in after:
                    found.setdefault(slot, held)

    def _cut(self, spec: PartitionSpec, shape: tuple[int, ...]) -> Masks:
        """What devices have of an array under ``spec``."""
        if (spec, shape) not in self._masks:
            self._masks[spec, shape] = spec_masks(spec, dict(self.program.group.axes), shape)
        return self._masks[spec, shape]

    def _all(self, layout: Layout) -> Masks:
        """A layout's masks, by position in the program's mesh (the layout's own may have another order)."""
        if layout not in self._masks:
            position = {device: p for p, device in enumerate(layout.mesh.devices)}
            self._masks[layout] = tuple(layout.mask(position[d]) for d in self.program.group.devices)
        return self._masks[layout]

    def _check(self, held: HeldSlot, wanted: HeldSlot, where: Callable[[], str]) -> None:
        if held.tensor != wanted.tensor:
            raise VerificationError(f"{where()}: its slot holds '{held.tensor.name}'")
        if held.edges != wanted.edges:
            around = [", ".join(map(str, h.edges)) or "nothing" for h in (held, wanted)]
            raise VerificationError(f"{where()}: parts with {around[0]} around them, where {around[1]} is read")
        self.num_reads += 1
        if held.masks != wanted.masks and (held.masks, wanted.masks) not in self._same:
            same_parts(held.masks, wanted.masks, held.tensor.shape, self.names, where)
            self._same.add((held.masks, wanted.masks))

    def _check_shape(self, where: str, held: HeldSlot, atom: Any) -> None:
        key = id(held.masks), held.edges  # hashing the masks of 1,024 devices takes longer than all else here
        if key not in self._shapes:
            self._shapes[key] = held.shape, held.masks  # which are kept, so that no others get their identity
        expected, _ = self._shapes[key]
        if shape(atom) != expected:
            raise VerificationError(f"{where}: a local array of {list(shape(atom))} for parts of {list(expected)}")


def same_parts(
    held: Sequence[Mask], wanted: Sequence[Mask], sizes: tuple[int, ...], names: Sequence[Any], where: Callable[[], str]
) -> None:
    """Check that devices which hold ``held`` have ``wanted``, as it is: perhaps refined in another way."""
    lies, reads = Frame(held), Frame(wanted)
    if lies.shape != reads.shape:
        raise VerificationError(f"{where()}: parts of {list(lies.shape)} lie where {list(reads.shape)} are read")
    if all(_same_rows(lies, reads, position) for position in range(len(held))):
        return
    patterns = Patterns(sizes)
    Arrival(patterns, lies, reads, names, where).check(patterns.held(lies))


def _same_rows(lies: Frame, reads: Frame, position: int) -> bool:
    """Whether a device has in each dim the rows that it reads, in their order, of the same share."""
    if path_of(lies.mask(position)) != path_of(reads.mask(position)):
        return False
    return all(map(np.array_equal, lies.rows(position), reads.rows(position)))


def spec_masks(spec: PartitionSpec, sizes: Mapping[str, int], whole: tuple[int, ...]) -> Masks:
    """What each device has of an array under ``spec``, by its position in a mesh of ``sizes``."""
    names = list(sizes)
    entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec] + [()] * (len(whole) - len(spec))
    masks = []
    for index in np.ndindex(*sizes.values()):
        box = []
        for size, axes in zip(whole, entries, strict=True):
            place, count = 0, 1
            for axis in axes:
                place, count = place * sizes[axis] + index[names.index(axis)], count * sizes[axis]
            box.append(((place * (size // count), (place + 1) * (size // count)),))
        masks.append(Mask(tuple((s,) for s in whole), tuple(box)))
    return tuple(masks)
