"""``Memory``: what one device holds while a step runs, by what it is for, and when it holds most."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend import core

from jscaler.estimate.block import Value
from jscaler.estimate.lifetimes import Moment, lifetimes
from jscaler.estimate.steps import Blocks, nbytes
from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import TensorKind, tensor_kinds
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.segment import Segment

ARGUMENTS = ("parameter", "optimizer", "input")
Held = str  # a TensorKind, or "temporary"


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
class Memory:
    """Bytes on each device; with uneven parts, on the one with the largest.

    Attributes:
        parameters, optimizer, inputs: the step's arguments by what they are, held throughout. Constants are inputs.
        gradients, activations, temporaries: the rest at the peak: gradients of parameters; what forward ops leave; what
            backward and update ops hold, workspaces, and results that are no argument's next version.
        peak: all of it, at the worst moment.
        at: the path of the op that runs then.
        live: the buffers of the rest, largest first.
        timeline: for each kernel in order its primitive, its op, and the bytes of everything that lives, in all and by kind
            (``parameter``, ``optimizer``, ``input``, ``gradient``, ``activation``, ``temporary``); of a loop those of one
            iteration.
    """

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    activations: int
    temporaries: int
    peak: int
    at: str
    live: tuple[LiveTensor, ...]
    timeline: tuple[Moment, ...]

    @property
    def arguments(self) -> int:
        return self.parameters + self.optimizer + self.inputs


def memory_of(graph: Graph, segment: Segment, donated: bool = True) -> Memory:
    """Predict the memory of a device of a group, as XLA will allocate it on a GPU.

    Args:
        graph: the graph that the group's program runs, which says what its tensors are.
        donated: whether state is updated in place: the next version of a leaf takes its buffer.
    """
    kinds, flat = tensor_kinds(graph), segment.flat
    blocks = Blocks(flat.origins.op)
    block = blocks.program(flat)
    held: dict[Held, int] = dict.fromkeys(ARGUMENTS, 0)
    for tensor, var in zip(segment.program.tensors, flat.inputs, strict=True):
        held[kinds[tensor]] += nbytes(var)
    arguments = sum(held.values())
    over = _in_place(graph, segment, blocks) if donated else {}
    variables = {value: var for var, value in blocks.values.items()}

    @functools.cache
    def describe(value: Value) -> LiveTensor:
        return _described(graph, flat, kinds, value, variables.get(value))

    found = lifetimes(block, over, lambda value: describe(value).kind)
    live = tuple(map(describe, found.live))
    gradients, activations = (sum(t.nbytes for t in live if t.kind == kind) for kind in ("gradient", "activation"))
    timeline = tuple(Moment(m.name, m.op, arguments + m.nbytes, {**held, **m.kinds}) for m in found.timeline)
    return Memory(
        held["parameter"], held["optimizer"], held["input"],
        gradients, activations, found.peak - gradients - activations,
        arguments + found.peak, _op_near(timeline, found.moment), live, timeline,
    )  # fmt: skip


def _in_place(graph: Graph, segment: Segment, blocks: Blocks) -> dict[Value, Value]:
    """Output -> the argument whose next version it is."""
    inputs = dict(zip(segment.program.tensors, segment.flat.inputs, strict=True))
    outputs = dict(zip(segment.program.results, segment.flat.outputs, strict=True))
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
