"""``Memory``: what one device holds while a step runs, by what it is for; and what of it an estimate sees."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jax.extend import core

from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import TensorKind, tensor_kinds
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.segment import PlacedBlock, Segment
from jscaler.materialize import DeviceMesh
from jscaler.xla_model.block import Value
from jscaler.xla_model.lifetimes import Moment, lifetimes
from jscaler.xla_model.to_block import Blocks, nbytes

ARGUMENTS = ("parameter", "optimizer", "input")
Held = str  # a TensorKind, or "temporary"
MemoryKind = Literal["parameters", "gradients", "optimizer", "inputs", "activations", "temporaries", "outputs"]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
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
class LiveTensor:
    """A buffer at the peak.

    Attributes:
        name: of the tensor whose part it is, or its type where it lies inside an op.
        op: path of the op that made it; "" where a loop or an exchange did.
        kind: ``activation``, ``gradient`` (of a parameter) or ``temporary``.
    """

    name: str
    op: str
    kind: Held
    nbytes: int


@dataclass(frozen=True)
class MemoryEstimate:
    """What a device will hold, and when.

    Attributes:
        live: the buffers beside the arguments at the worst moment, largest first.
        timeline: for each kernel in order its primitive, its op, and the bytes of everything that lives, in all and by kind
            (``parameter``, ``optimizer``, ``input``, ``gradient``, ``activation``, ``temporary``); of a loop those of one
            iteration.
    """

    memory: Memory
    live: tuple[LiveTensor, ...]
    timeline: tuple[Moment, ...]


def estimated_memory(
    graph: Graph,
    segments: Sequence[Segment],
    donated: bool = True,
    capacity: int = 0,
    under_way: Mapping[DeviceMesh, int] | None = None,
) -> MemoryEstimate:
    """Predict the memory of a device of the group whose devices hold most, as XLA will allocate it on a GPU.

    Args:
        graph: the graph that the groups' programs run, which says what its tensors are.
        donated: whether state is updated in place: the next version of a leaf takes its buffer.
        capacity: what a device has; 0 where that is not known.
        under_way: how many micro-batches are under way at most on each group of a loop over groups.
    """
    blocks = [block for segment in segments for block in segment.blocks]
    every = (_of_block(graph, block, blocks, donated, capacity, under_way or {}) for block in blocks)
    return max(every, key=lambda found: found.memory.peak)


def _of_block(
    graph: Graph,
    at: PlacedBlock,
    every: Sequence[PlacedBlock],
    donated: bool,
    capacity: int,
    under_way: Mapping[DeviceMesh, int],
) -> MemoryEstimate:
    """The memory while one block runs: its own, the arguments of its group, and what waits there for later blocks."""
    kinds, flat = tensor_kinds(graph), at.flat
    blocks = Blocks(flat.origins.op)
    block = blocks.program(flat)
    held: dict[Held, int] = dict.fromkeys(ARGUMENTS, 0)
    for tensor, var in _arguments(at, every).items():
        held[kinds[tensor]] += nbytes(var)
    waiting = _waiting(at, every) + (under_way.get(at.group, 1) - 1) * _of_a_microbatch(at, every)
    arguments = sum(held.values()) + waiting
    over = _in_place(graph, at, blocks) if donated else {}
    variables = {value: var for var, value in blocks.values.items()}

    @functools.cache
    def describe(value: Value) -> LiveTensor:
        return _described(graph, flat, kinds, value, variables.get(value))

    found = lifetimes(block, over, lambda value: describe(value).kind)
    live = tuple(map(describe, found.live))
    gradients, activations = (sum(t.nbytes for t in live if t.kind == kind) for kind in ("gradient", "activation"))
    timeline = tuple(Moment(m.name, m.op, arguments + m.nbytes, {**held, **m.kinds}) for m in found.timeline)
    memory = Memory(
        held["parameter"], gradients, held["optimizer"], held["input"],
        activations, found.peak + waiting - gradients - activations,
        capacity=capacity, at=_op_near(timeline, found.moment),
    )  # fmt: skip
    return MemoryEstimate(memory, live, timeline)


def _arguments(at: PlacedBlock, every: Sequence[PlacedBlock]) -> dict[PTensor, core.Var]:
    """All arguments and constants that lie on the group of a block."""
    return {
        t: v for block in every if block.group == at.group for t, v in zip(block.takes, block.flat.inputs, strict=False)
    }


def _waiting(at: PlacedBlock, every: Sequence[PlacedBlock]) -> int:
    """Bytes of the values of other blocks that ``at`` takes, and of those that lie on its group for later ones."""
    place = every.index(at)
    own = [(n, block) for n, block in enumerate(every) if block.group == at.group]
    later = {v for n, block in own if n > place for v in block.imports}
    taken = zip(at.imports, at.flat.inputs[len(at.takes) :], strict=True)
    left = (zip(b.exports, b.flat.outputs[len(b.results) :], strict=True) for n, b in own if n < place)
    kept = [pair for pairs in left for pair in pairs if pair[0] in later]
    return sum(nbytes(var) for var in dict([*taken, *kept]).values() if isinstance(var, core.Var))


def _of_a_microbatch(at: PlacedBlock, every: Sequence[PlacedBlock]) -> int:
    """Bytes that the blocks of a loop over groups keep of one micro-batch, from one block of a group to its next."""
    own = [block for block in every if (block.group, block.phase) == (at.group, at.phase)]
    kept = {v for block in own for v in block.exports} & {v for block in own for v in block.imports}
    exports = {v: x for b in own for v, x in zip(b.exports, b.flat.outputs[len(b.results) :], strict=True)}
    return sum(nbytes(exports[v]) for v in kept if isinstance(exports[v], core.Var))


def _in_place(graph: Graph, at: PlacedBlock, blocks: Blocks) -> dict[Value, Value]:
    """Output -> the argument whose next version it is."""
    inputs = dict(zip(at.takes, at.flat.inputs, strict=False))
    outputs = dict(zip(at.results, at.flat.outputs, strict=False))  # then values for others
    versions = ((o, graph.inputs[i]) for o, i in graph.next_version.items())
    pairs = [(outputs[o], inputs[t]) for o, t in versions if o in outputs and t in inputs]
    return {blocks.value(new): blocks.value(old) for new, old in pairs if isinstance(new, core.Var)}


def _described(
    graph: Graph, flat: FlatProgram, kinds: Mapping[PTensor, TensorKind], value: Value, var: core.Var | None
) -> LiveTensor:
    tensor = flat.origins.tensor.get(var) if var is not None else None
    op = flat.origins.op.get(var, "") if var is not None else ""
    maker = graph.producer.get(tensor) if tensor is not None else graph.by_path.get(op)
    kind: Held = "temporary"
    if tensor is not None and kinds.get(tensor) == "gradient":
        kind = "gradient"
    elif maker is not None:
        kind = "activation" if maker.kind == "forward" else kind
    elif tensor is not None and tensor.role in ("activation", "residual"):
        kind = "activation"  # a loop's
    return LiveTensor(tensor.name if tensor is not None else str(value), op, kind, value.nbytes)


def _op_near(timeline: Sequence[Moment], index: int) -> str:
    """The op of a moment; a collective's is that of the kernel behind it."""
    return next((m.op for m in timeline[index:] if m.op), next((m.op for m in timeline[:index][::-1] if m.op), ""))


def preallocation(peak: int, capacity: int) -> str:
    """What to set where a peak that fits is more than JAX takes of a device; else nothing."""
    if peak <= PREALLOCATED * capacity:
        return ""
    share = min(0.98, round(peak / capacity + 0.02, 2))
    return f"; JAX takes {PREALLOCATED:.0%} of a device by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={share}"
