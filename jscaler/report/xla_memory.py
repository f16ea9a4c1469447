"""What a device's memory holds while a step runs: parameters, gradients, optimizer state, activations, temporaries.

Every byte is one of XLA's own account (`buffers`): arguments and results as they are, and of the buffer of temporaries
what lies in it at the moment when most of it is in use. What a value is to the step is said by the op that made it, whose
name the instruction carries: values of forward ops, which are kept for the backward or computed again, are activations;
of backward ops the gradients of parameters are gradients, and all else (cotangents, scratch space) is temporary.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jscaler.capture.jaxprs import nbytes
from jscaler.estimate.live import LiveTensors
from jscaler.estimate.memory import HELD_AS, MEMORY_KINDS, Memory, MemoryKind, arguments_on, run_name
from jscaler.estimate.waiting import Devices, Held, Waiting
from jscaler.ir import Op, PTensor
from jscaler.ir.loop import chain_of
from jscaler.ir.walk import closure
from jscaler.lower.alike import own_names
from jscaler.lower.scopes import adapter_scope, op_scope
from jscaler.lower.step_plan import StepPlan
from jscaler.report.buffers import Allocation, BufferValue, Dump, fullest, twins
from jscaler.report.hlo_scopes import Scopes

IDLE = "reserved, not in use at the peak"
_FOLDED = re.compile(r"(?<=[_/.])\d+(?=/|@|$|\.)")  # layer numbers
_LEAF = re.compile(r"leaves\[(\d+)\]")


@dataclass(frozen=True)
class Contributor:
    """Arrays that are held at the peak, of like ops (layer numbers folded).

    Attributes:
        op: an op's path, the name of an argument, of a loop's stack or of a tensor that is on its way.
        source: ``file:line`` of the user's code that made it; empty where there is none.
        shape: of each array, in HLO.
    """

    kind: MemoryKind
    op: str
    source: str
    shape: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of each of ``devices``, and what takes it up at its worst moment, the largest first.

    Attributes:
        block: the number of the block that runs then; ``at`` says which it is, where there are several.
    """

    devices: tuple[int, ...]
    memory: Memory
    contributors: tuple[Contributor, ...]
    block: int = 0
    at: str = ""


def compiled_memory(
    step: StepPlan, dumps: Sequence[Dump], named: Sequence[int], donate: Sequence[int], capacity: Callable[[Devices], int]
) -> tuple[DeviceMemory, ...]:
    """The memory of all sets of devices that hold alike.

    Over the instructions of a step on several groups: its arguments, what waits in slots, and what XLA allocates beside
    for the block that runs.

    Args:
        step: the plan that was compiled.
        dumps: what XLA wrote about each block.
        named: the number of the block of the same program whose names stand there.
        donate: the step's inputs whose buffers it may reuse.
        capacity: bytes of each of a set of devices.
    """
    if len(dumps) == 1:
        (dump,) = dumps
        memory, contributors = _added_up(_held(_Owners(step, 0, 0, dump), dump), capacity(step.blocks[0].group.devices))
        assert memory.peak == dump.peak, "what is held is not what XLA allocates"
        return (DeviceMemory(step.blocks[0].group.devices, memory, contributors),)
    names = LiveTensors(step.graph)
    waiting = Waiting(step, names, frozenset(donate))
    needs = [dump.peak - dump.size("argument") for dump in dumps]
    found = []
    worst = waiting.worst(needs).values()
    for run, waits in zip(worst, waiting.at(worst), strict=True):
        owners = _Owners(step, run.block, named[run.block], dumps[run.block])
        rows = [owners.waits(held) for held in waits]
        rows += _beside_arguments(owners, dumps[run.block])
        held = sum(run.waiting.values()) + needs[run.block]
        assert sum(row[-1] for row in rows) == held, "what is held is not what waits, and what XLA allocates"
        memory, contributors = _added_up([*_arguments(step, names, run.devices[0]), *rows], capacity(run.devices))
        found.append(DeviceMemory(run.devices, memory, contributors, run.block, run_name(step, run)))
    return tuple(found)


Row = tuple[MemoryKind, str, str, str, int]


def _added_up(rows: Iterable[Row], capacity: int) -> tuple[Memory, tuple[Contributor, ...]]:
    """Rows of like ops together."""
    found: dict[tuple[MemoryKind, str, str, str], list[tuple[str, int]]] = {}
    totals = dict.fromkeys(MEMORY_KINDS, 0)
    for kind, op, source, shape, size in rows:
        found.setdefault((kind, _FOLDED.sub("*", op), source, shape), []).append((op, size))
        totals[kind] += size
    contributors = []
    for (kind, folded, source, shape), ones in found.items():
        names = {op for op, _ in ones}
        name = folded if len(names) > 1 else names.pop()
        contributors.append(Contributor(kind, name, source, shape, len(ones), sum(size for _, size in ones)))
    return Memory(**totals, capacity=capacity), tuple(sorted(contributors, key=lambda c: -c.nbytes))


def _held(owners: "_Owners", dump: Dump) -> Iterator[Row]:
    """All that the only block of a step holds."""
    for allocation in dump.allocations:
        if allocation.kind == "argument":
            yield (*owners.argument(allocation), allocation.size)
        elif allocation.kind == "temporary":
            yield from _in_use(owners, allocation)
        else:
            kind: MemoryKind = "outputs" if allocation.kind == "output" else "inputs"
            shape = allocation.values[0].shape if allocation.values else ""
            yield kind, f"{allocation.kind}s", "", shape, allocation.size


def _beside_arguments(owners: "_Owners", dump: Dump) -> Iterator[Row]:
    """What one of several blocks holds beside what it was given: its results are others' activations, or gradients."""
    for allocation in dump.allocations:
        if allocation.kind in ("temporary", "output"):
            yield from _in_use(owners, allocation)
        elif allocation.kind == "constant":
            yield "inputs", "constants", "", "", allocation.size


def _in_use(owners: "_Owners", allocation: Allocation) -> Iterator[Row]:
    """What lies in an allocation when most of it is in use."""
    used = 0
    for held in fullest(allocation):
        used += held.nbytes
        yield (*owners.owner(allocation, held.value), held.value.shape, held.nbytes)
    yield "temporaries", IDLE, "", "", allocation.size - used


def _arguments(step: StepPlan, names: LiveTensors, device: int) -> Iterator[Row]:
    """The step's arguments and constants on a device."""
    for tensor, var in arguments_on(step, device).items():
        shape = hlo_shape(var.aval.shape, var.aval.dtype)  # type: ignore[attr-defined]
        yield HELD_AS[names.kinds[tensor]], tensor.name, "", shape, nbytes(var)


class _Owners:
    """To which op or tensor of the step the values of its program belong."""

    def __init__(self, step: StepPlan, number: int, named: int, dump: Dump):
        self.step, self.block = step, step.blocks[number]
        self.graph = step.graph
        self.kinds = LiveTensors(step.graph).kinds
        paths, tensors = own_names(self.block, step.blocks[named]) if named != number else ({}, {})
        self.ops = {op_scope(op): self.graph[paths.get(op.path, op.path)] for op in step.graph.ops}
        moved = [task for one in step.segments for task in (*one.program.adapters, *one.program.halos)]
        self.moved = {adapter_scope(t.tensor): tensors.get(t.tensor, t.tensor) for t in moved}
        self.scopes = Scopes(dump.text, [*self.ops, *self.moved])
        self.stacks = self._stacks()

    def _stacks(self) -> dict[str, list[tuple[PTensor, PTensor]]]:
        """Local shape -> what loops stack up in arrays of this shape, and the slices of it."""
        found: dict[str, list[tuple[PTensor, PTensor]]] = {}
        for name, loop in self.graph.loops.items():
            for stacked, layout in zip(loop.ys, self.step.completed.loops[name].ys, strict=True):
                shape = hlo_shape(layout.stacked(loop.length).local_shape, stacked.stack.dtype)
                found.setdefault(shape, []).append((stacked.stack, stacked.slice))
        return found

    def argument(self, allocation: Allocation) -> tuple[MemoryKind, str, str, str]:
        """Kind, name, source and shape of an argument; of a result in its place the same."""
        assert allocation.parameter is not None
        leaf = _LEAF.search(self.scopes.parameters[allocation.parameter])
        assert leaf is not None, self.scopes.parameters[allocation.parameter]
        tensor = self.block.takes[int(leaf[1])]
        shape = hlo_shape(self.step.completed.inputs[tensor].local_shape, tensor.dtype)
        return HELD_AS[self.kinds[tensor]], tensor.name, "", shape

    def waits(self, held: Held) -> Row:
        """What lies in a slot."""
        maker = self._maker(held.tensor) if held.tensor is not None else None
        shape = hlo_shape(held.local.shape, held.local.dtype)
        return HELD_AS[held.what.kind], held.what.name, maker.source if maker is not None else "", shape, held.what.nbytes

    def owner(self, allocation: Allocation, value: BufferValue) -> tuple[MemoryKind, str, str]:
        """Kind, name and source of a value among the temporaries."""
        scope, writer = self._scope(allocation, value)
        op = self.ops.get(scope)
        stack = self._stack(value, op) if writer else None
        if stack is not None:
            return self._of_tensor(stack)
        if op is not None:
            return self._of_op(op, value), op.path, op.source
        return self._of_tensor(self.moved[scope]) if scope else ("temporaries", value.instruction, "")

    def _scope(self, allocation: Allocation, value: BufferValue) -> tuple[str, bool]:
        """The scope of a value, and whether a loop writes it slice by slice; then what the body writes speaks for it."""
        made = self.scopes.instructions.get(value.instruction)
        through_loop = made is None or made.opcode in ("while", "parameter")
        others = twins(allocation, value) if through_loop else []
        for candidate in (*others, value):
            inner = self.scopes.instructions.get(candidate.instruction)
            if inner is not None and inner.opcode not in ("while", "parameter") and "broadcast" not in inner.name:
                scope = self.scopes.of(candidate.instruction, candidate.index)
                if scope:
                    return scope, through_loop or "dynamic-update-slice" in inner.opcode or "dynamic_update" in inner.name
        return self.scopes.of(value.instruction, value.index), through_loop

    def _stack(self, value: BufferValue, op: Op | None) -> PTensor | None:
        """The stack that lies in an array, as far as its shape and the op that makes its slices tell."""
        known = self.stacks.get(value.shape, [])
        made_here = [stack for stack, piece in known if op is not None and piece in op.outputs]
        handed_on = [stack for stack, piece in known if op is None and piece not in self.graph.producer]  # of carries
        return next(iter(made_here or handed_on or ([known[0][0]] if len(known) == 1 else [])), None)

    def _of_tensor(self, tensor: PTensor) -> tuple[MemoryKind, str, str]:
        kind, maker = self.kinds.get(tensor), self._maker(tensor)
        if kind == "gradient":
            return "gradients", tensor.name, maker.source if maker else ""
        if maker is None:  # an argument in another layout
            return "temporaries", tensor.name, ""
        return _by_op(maker), tensor.name, maker.source

    def _maker(self, tensor: PTensor) -> Op | None:
        """The op that makes a tensor, or the slices or last iteration of it."""
        same = closure([tensor], self.graph.flow.neighbours)
        return next((self.graph.producer[t] for t in same if t in self.graph.producer), None)

    def _of_op(self, op: Op, value: BufferValue) -> MemoryKind:
        elements, laid = math.prod(map(int, _DIMS.findall(value.shape.partition("[")[2]))), self.step.completed.ops[op.path]
        times = {1, math.prod(self.graph.loops[name].length for name in chain_of(op.loop, self.graph.loops))}

        def holds(tensors: tuple[PTensor, ...], layouts: tuple[Any, ...], kind: str | None) -> bool:
            pairs = zip(tensors, layouts, strict=True)
            same = [t for t, layout in pairs if elements in {n * math.prod(layout.local_shape) for n in times}]
            return any(kind is None or self.kinds.get(t) == kind for t in same)

        if op.kind == "backward" and not op.again and holds(op.outputs, laid.outputs, "gradient"):
            return "gradients"
        copies = holds(op.inputs, laid.inputs, "parameter") and not holds(op.outputs, laid.outputs, None)
        return "temporaries" if copies else _by_op(op)


_DIMS = re.compile(r"\d+")


def _by_op(op: Op) -> MemoryKind:
    return "activations" if op.kind == "forward" or op.again is not None else "temporaries"


def hlo_shape(shape: tuple[int, ...], dtype: Any) -> str:
    """A shape as HLO writes it: ``bf16[8,2048]``; a key is the two words of a threefry key."""
    if not hasattr(dtype, "kind") or "key" in str(dtype):
        return f"u32[{','.join(map(str, (*shape, 2)))}]"
    name = str(dtype).replace("_", "")
    for ours, theirs in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c"), ("bool", "pred")):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    return f"{name}[{','.join(map(str, shape))}]"
