"""``Memory``: what one device holds while a step runs, by what it is for; and what of it an estimate sees."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from jax.extend import core

from jscaler.capture.jaxprs import nbytes
from jscaler.estimate.live import HeldKind, LiveTensor, LiveTensors
from jscaler.estimate.waiting import BlockRun, Devices, Held, Waiting
from jscaler.estimate.works import translated
from jscaler.ir import PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.lower.donation import donated_imports, donated_inputs
from jscaler.lower.instructions import Run, microbatch_text
from jscaler.lower.step_plan import StepPlan
from jscaler.xla_model.block import Value
from jscaler.xla_model.lifetimes import Lifetimes, Moment, lifetimes

ARGUMENTS = ("parameter", "optimizer", "input")
MemoryKind = Literal["parameters", "gradients", "optimizer", "inputs", "activations", "temporaries", "outputs"]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
HELD_AS: dict[HeldKind, MemoryKind] = {  # from what lies there all the time to what comes and goes
    "parameter": "parameters", "optimizer": "optimizer", "input": "inputs",
    "gradient": "gradients", "activation": "activations", "temporary": "temporaries",
}  # fmt: skip
PREALLOCATED = 0.75  # of a device, that JAX takes at its first computation unless it is told otherwise


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at the worst moment of a step, as estimated or as XLA has laid them out.

    With uneven parts, of the device with the largest.

    Attributes:
        parameters, optimizer, inputs: the step's arguments, held throughout; constants are inputs. State is updated where
            it lies if it is donated.
        gradients, activations, temporaries: the rest: gradients of parameters; what forward ops leave; what backward and
            update ops hold, and workspaces.
        outputs: results that lie in no argument's place; an estimate has them among the temporaries.
        capacity: what the device has; 0 where that is not known.
        at: the path of the op that runs then, where that is known.
    """

    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    temporaries: int
    outputs: int = 0
    capacity: int = 0
    at: str = ""

    @property
    def arguments(self) -> int:
        return self.parameters + self.optimizer + self.inputs

    @property
    def by_kind(self) -> dict[MemoryKind, int]:
        return {kind: getattr(self, kind) for kind in MEMORY_KINDS}

    @property
    def peak(self) -> int:
        return sum(self.by_kind.values())

    @property
    def headroom(self) -> int:
        """What is left at the peak; negative where it does not fit."""
        return self.capacity - self.peak

    @property
    def fits(self) -> bool | None:
        """Whether it does; None where the capacity is not known."""
        return self.headroom >= 0 if self.capacity else None

    def as_json(self) -> dict[str, Any]:
        """Plain data, with what follows from it."""
        figures = {"peak": self.peak, "capacity": self.capacity, "headroom": self.headroom, "fits": self.fits}
        return {**self.by_kind, **figures, "at": self.at}


@dataclass(frozen=True)
class MemoryEstimate:
    """What a device will hold, and when.

    Attributes:
        live: the buffers beside the arguments at the worst moment, largest first.
        timeline: for each kernel in order its primitive, its op, and the bytes of everything that lives, in all and by kind
            (``parameter``, ``optimizer``, ``input``, ``gradient``, ``activation``, ``temporary``); of a loop those of one
            iteration. Of a step on several device groups for each run of a block its worst moment.
        devices: those that hold so.
    """

    memory: Memory
    live: tuple[LiveTensor, ...]
    timeline: tuple[Moment, ...]
    devices: Devices = ()


def not_known(devices: Devices) -> int:
    """What a device has, where nobody says."""
    return 0


def estimated_memory(step: StepPlan, donated: bool = True) -> MemoryEstimate:
    """Predict the memory of the devices that hold most, as XLA will allocate it on a GPU.

    Args:
        donated: whether state is updated in place: the next version of a leaf takes its buffer.
    """
    return max(memory_by_devices(step, donated), key=lambda found: found.memory.peak)


def memory_by_devices(
    step: StepPlan, donated: bool = True, capacity: Callable[[Devices], int] = not_known
) -> tuple[MemoryEstimate, ...]:
    """As `estimated_memory`, for each set of devices that hold alike: those of a stage, say.

    A device holds its arguments, what waits in slots for later blocks, and what the block that runs needs beside both.

    Args:
        capacity: what each of a set of devices has; 0 where that is not known.
    """
    donate = frozenset(step.graph.next_version.values()) if donated else frozenset[int]()
    names = LiveTensors(step.graph)
    needs = [_needs(step, number, donate, names) for number in range(len(step.blocks))]
    waiting = Waiting(step, names, donate)
    runs: dict[Devices, list[BlockRun]] = {devices: [] for devices in waiting.alike}
    for run in waiting.runs():
        runs[run.devices].append(run)
    worst = waiting.worst([one.found.peak for one in needs])
    held = zip(worst.values(), waiting.at(worst.values()), strict=True)
    return tuple(_of_devices(step, run, runs[run.devices], needs, waits, capacity(run.devices)) for run, waits in held)


def memory_over_time(
    step: StepPlan, times: Sequence[tuple[float, float]], donated: bool = True
) -> dict[Devices, list[tuple[float, int]]]:
    """For each set of devices that hold alike: times, and the bytes that a device holds from then on.

    Args:
        times: when each run of a block begins and ends, in the order of the instructions.
    """
    donate = frozenset(step.graph.next_version.values()) if donated else frozenset[int]()
    names = LiveTensors(step.graph)
    needs = [_needs(step, number, donate, names).found.peak for number in range(len(step.blocks))]
    waiting = Waiting(step, names, donate)
    places = [place for place, one in enumerate(step.instructions.steps or (Run(0, (), ()),)) if isinstance(one, Run)]
    at = dict(zip(places, times, strict=True))
    held = {devices: sum(held_arguments(step, devices[0]).values()) for devices in waiting.alike}
    found: dict[Devices, list[tuple[float, int]]] = {devices: [] for devices in waiting.alike}
    for run in waiting.runs():
        own, (begin, end) = found[run.devices], at[run.place]
        waits = held[run.devices] + sum(run.waiting.values())
        if own:
            own[-1] = own[-1][0], waits  # between two runs, what waits for the second
        own += [(begin, waits + needs[run.block]), (end, waits)]
    return found


@dataclass(frozen=True)
class _Needs:
    """What a block needs on each device of its group while it runs, beside what it is given."""

    found: Lifetimes
    live: tuple[LiveTensor, ...]


def _needs(step: StepPlan, number: int, donate: frozenset[int], names: LiveTensors) -> _Needs:
    flat = step.blocks[number].flat
    blocks, block = translated(step, number)
    variables = {value: var for var, value in blocks.values.items()}

    @functools.cache
    def describe(value: Value) -> LiveTensor:
        return names.of_variable(flat, variables.get(value), value.nbytes, value)

    over = {blocks.value(new): blocks.value(old) for new, old in in_place(step, number, donate).items()}
    found = lifetimes(block, over, lambda value: describe(value).kind)
    return _Needs(found, tuple(map(describe, found.live)))


def _of_devices(
    step: StepPlan,
    worst: BlockRun,
    runs: Sequence[BlockRun],
    needs: Sequence[_Needs],
    waiting: Sequence[Held],
    capacity: int,
) -> MemoryEstimate:
    """The memory of one device of a set, most of it in ``worst`` of its runs."""
    held = held_arguments(step, worst.devices[0])
    block = needs[worst.block]
    waits = [one.what for one in waiting]
    live = tuple(sorted((*block.live, *waits), key=lambda t: -t.nbytes))
    gradients, activations = (sum(t.nbytes for t in live if t.kind == kind) for kind in ("gradient", "activation"))
    beside = block.found.peak + sum(t.nbytes for t in waits)
    if len(runs) == 1:
        timeline = [_beside(m, held, worst.waiting) for m in block.found.timeline]
    else:
        timeline = [_worst_of(step, run, needs[run.block].found, held) for run in runs]
    at = _op_near(block.found.timeline, block.found.moment)
    memory = Memory(
        held["parameter"], gradients, held["optimizer"], held["input"],
        activations, beside - gradients - activations, capacity=capacity, at=run_name(step, worst, at),
    )  # fmt: skip
    return MemoryEstimate(memory, live, tuple(timeline), worst.devices)


def held_arguments(step: StepPlan, device: int) -> dict[HeldKind, int]:
    """Bytes by kind of all arguments and constants that lie on a device."""
    kinds = tensor_kinds(step.graph)
    held: dict[HeldKind, int] = dict.fromkeys(ARGUMENTS, 0)
    for tensor, var in arguments_on(step, device).items():
        held[kinds[tensor]] += nbytes(var)
    return held


def arguments_on(step: StepPlan, device: int) -> dict[PTensor, core.Var]:
    """All arguments and constants that lie on a device, and a variable that holds its part."""
    here = [block for block in step.blocks if device in block.group.devices]
    return {t: v for block in here for t, v in zip(block.takes, block.flat.inputs, strict=False)}


def _beside(moment: Moment, *more: Mapping[HeldKind, int]) -> Moment:
    """``moment`` where so much is held beside."""
    kinds = dict(moment.kinds)
    for kind, size in (pair for held in more for pair in held.items()):
        kinds[kind] = kinds.get(kind, 0) + size
    return replace(moment, nbytes=moment.nbytes + sum(sum(held.values()) for held in more), kinds=kinds)


def _worst_of(step: StepPlan, run: BlockRun, found: Lifetimes, held: Mapping[HeldKind, int]) -> Moment:
    """The worst moment of a block's run, by its name."""
    inside = found.timeline[found.moment] if found.timeline else Moment("", "", 0)
    return _beside(replace(inside, name=run_name(step, run)), held, run.waiting)


def run_name(step: StepPlan, run: BlockRun, op: str = "") -> str:
    """Where in a step on several groups: ``1F of micro-batch 3, at block_2/mlp/up/dot``; else the op."""
    if len(step.blocks) == 1:
        return op
    name = " of ".join(filter(None, (step.block_name(run.block), microbatch_text(run.microbatches))))
    return f"{name}, at {op}" if op else name


def in_place(step: StepPlan, number: int, donate: frozenset[int]) -> dict[core.Var, core.Var]:
    """Of a block: output -> the argument whose next version it is, or the sum to which it adds."""
    block, graph = step.blocks[number], step.graph
    inputs = dict(zip(block.takes, block.flat.inputs, strict=False))
    given, versions = donated_inputs(step, number, donate), graph.next_version
    pairs = [
        (out, inputs[graph.inputs[versions[i]]])
        for i, out in zip(block.results, block.flat.outputs, strict=False)
        if versions.get(i) in given
    ]
    left = dict(zip(block.exports, block.flat.outputs[len(block.results) :], strict=True))
    sums = {c.inside: left[c.out] for c in (step.spanning.carries if step.spanning else ()) if c.out in left}
    imports = block.flat.inputs[len(block.takes) :]
    pairs += [(sums[block.imports[place]], imports[place]) for place in donated_imports(step, block)]
    return {new: old for new, old in pairs if isinstance(new, core.Var)}


def _op_near(timeline: Sequence[Moment], index: int) -> str:
    """The op of a moment; a collective's is that of the kernel behind it."""
    return next((m.op for m in timeline[index:] if m.op), next((m.op for m in timeline[:index][::-1] if m.op), ""))


def preallocation(peak: float, capacity: float) -> str:
    """What to set where a peak that fits is more than JAX takes of a device; else nothing."""
    if peak <= PREALLOCATED * capacity:
        return ""
    share = min(0.98, round(peak / capacity + 0.02, 2))
    return f"; JAX takes {PREALLOCATED:.0%} of a device by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={share}"
