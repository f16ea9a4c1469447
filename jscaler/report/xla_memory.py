"""What a device's memory holds while a step runs: parameters, gradients, optimizer state, activations, temporaries.

Every byte is one of XLA's own account (`buffers`): arguments and results as they are, and of the buffer of temporaries
what lies in it at the moment when most of it is in use. What a value is to the step is said by the op that made it, whose
name the instruction carries: values of forward ops, which are kept for the backward or computed again, are activations;
of backward ops the gradients of parameters are gradients, and all else (cotangents, scratch space) is temporary.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jscaler.estimate.memory import MEMORY_KINDS, Memory, MemoryKind
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.loop import chain_of
from jscaler.ir.walk import closure
from jscaler.lower.scopes import adapter_scope, op_scope
from jscaler.lower.step_plan import StepPlan
from jscaler.report.buffers import Allocation, BufferValue, Dump, fullest, twins
from jscaler.report.hlo_scopes import Scopes

_ARGUMENTS: dict[str, MemoryKind] = {"parameter": "parameters", "optimizer": "optimizer"}
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


def compiled_memory(step: StepPlan, dump: Dump, capacity: int) -> tuple[Memory, tuple[Contributor, ...]]:
    """The memory of one device, and what takes it up, the largest first.

    Args:
        step: the plan that was compiled.
        dump: what XLA wrote about the program.
        capacity: bytes of a device.
    """
    found: dict[tuple[MemoryKind, str, str, str], list[tuple[str, int]]] = {}
    totals = dict.fromkeys(MEMORY_KINDS, 0)
    for kind, op, source, shape, nbytes in _held(_Owners(step, dump), dump):
        found.setdefault((kind, _FOLDED.sub("*", op), source, shape), []).append((op, nbytes))
        totals[kind] += nbytes
    contributors = []
    for (kind, folded, source, shape), ones in found.items():
        names = {op for op, _ in ones}
        name = folded if len(names) > 1 else names.pop()
        contributors.append(Contributor(kind, name, source, shape, len(ones), sum(nbytes for _, nbytes in ones)))
    memory = Memory(**totals, capacity=capacity)
    assert memory.peak == dump.peak, "what is held is not what XLA allocates"
    return memory, tuple(sorted(contributors, key=lambda c: -c.nbytes))


Row = tuple[MemoryKind, str, str, str, int]


def _held(owners: "_Owners", dump: Dump) -> Iterator[Row]:
    for allocation in dump.allocations:
        if allocation.kind == "argument":
            yield (*owners.argument(allocation), allocation.size)
        elif allocation.kind == "temporary":
            used = 0
            for held in fullest(allocation):
                used += held.nbytes
                yield (*owners.owner(allocation, held.value), held.value.shape, held.nbytes)
            yield "temporaries", IDLE, "", "", allocation.size - used
        else:
            kind: MemoryKind = "outputs" if allocation.kind == "output" else "inputs"
            shape = allocation.values[0].shape if allocation.values else ""
            yield kind, f"{allocation.kind}s", "", shape, allocation.size


class _Owners:
    """To which op or tensor of the step the values of its program belong."""

    def __init__(self, step: StepPlan, dump: Dump):
        self.step = step
        self.graph = step.graph
        self.ops = {op_scope(op): op for op in step.graph.ops}
        moved = [task for one in step.segments for task in (*one.program.adapters, *one.program.halos)]
        self.moved = {adapter_scope(task.tensor): task.tensor for task in moved}
        self.scopes = Scopes(dump.text, [*self.ops, *self.moved])
        self.stacks = self._stacks()

    @cached_property
    def kinds(self) -> Mapping[PTensor, str]:
        """The kinds of tensors; what a loop stacks up, or a join adds up, to a gradient is one, too."""
        kinds = tensor_kinds(self.graph)

        def sources(tensor: PTensor) -> list[PTensor]:
            maker = self.graph.producer.get(tensor)
            parts = maker.inputs if maker is not None and "@join" in maker.path else ()
            linked = (other for other, _ in self.graph.linked.get(tensor, ()))
            return [t for t in (*parts, *linked) if t not in kinds]

        gradients = closure((t for t, kind in kinds.items() if kind == "gradient"), sources)
        return {**kinds, **dict.fromkeys(gradients, "gradient")}

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
        tensor = self.graph.inputs[int(leaf[1])]
        shape = hlo_shape(self.step.completed.inputs[tensor].local_shape, tensor.dtype)
        return _ARGUMENTS.get(self.kinds[tensor], "inputs"), tensor.name, "", shape

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
        same = closure([tensor], lambda t: [other for other, _ in self.graph.linked.get(t, ())])
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
