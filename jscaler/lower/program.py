"""``Program``: what every device of the group executes, as data: computes, adapters and halo exchanges over slots.

A slot holds one local array: a PTensor in one layout. The program is the same for all devices of the group; what
differs per device are the part indices, which come from its place in the mesh.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax.extend import core

from jscaler.cost import FEW_STEPS, CostModel
from jscaler.ir import Graph, Op, PTensor
from jscaler.materialize import Adapter, Completed, DeviceMesh, Layout, find_adapter
from jscaler.materialize.edges import Edge, extended_shape, halo_bytes
from jscaler.rules.book import RuleBook

Slot = int


@dataclass(frozen=True)
class Compute:
    """Run ``jaxpr`` (a local body) of ``op``; its last operands are the part indices along ``parts``."""

    op: Op
    jaxpr: core.Jaxpr
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    parts: tuple[tuple[str, ...], ...] = ()
    after: tuple[Slot, ...] = ()  # what op_order puts before it, beside its data


@dataclass(frozen=True)
class Adapt:
    """Bring ``tensor`` from one layout to another.

    Attributes:
        reduce_dtype: the dtype in which value shares are added; None for the tensor's own.
    """

    tensor: PTensor
    adapter: Adapter
    input: Slot
    output: Slot
    reduce_dtype: str | None = None

    def sent(self, itemsize: int) -> Iterator[tuple[str, float]]:
        """Kind and bytes per device of every step, for elements of ``itemsize`` bytes where no ``reduce_dtype`` holds."""
        if self.reduce_dtype is not None and self.adapter.adds:
            itemsize = jnp.dtype(self.reduce_dtype).itemsize
        for layout, step in self.adapter.walk:
            yield step.kind, step.bytes(layout, itemsize)


@dataclass(frozen=True)
class Extend:
    """Bring a part of ``tensor``, which lies in ``layout``, the rows around it that its reader's windows reach."""

    tensor: PTensor
    layout: Layout
    edges: tuple[Edge, ...]
    input: Slot
    output: Slot

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of an extended part."""
        return extended_shape(self.layout, self.edges)

    def sent(self, itemsize: int) -> Iterator[tuple[str, float]]:
        """``halo`` and the bytes per device of every message."""
        for nbytes in halo_bytes(self.layout, self.edges, itemsize):
            yield "halo", nbytes


Task = Compute | Adapt | Extend


@dataclass(frozen=True)
class Program:
    """One segment: the whole step on one device group."""

    mesh: DeviceMesh
    tasks: tuple[Task, ...]
    inputs: tuple[tuple[Slot, Layout], ...]  # step inputs, then constants
    outputs: tuple[tuple[Slot, Layout], ...]

    @property
    def adapters(self) -> tuple[Adapt, ...]:
        return tuple(t for t in self.tasks if isinstance(t, Adapt))

    @property
    def halos(self) -> tuple[Extend, ...]:
        return tuple(t for t in self.tasks if isinstance(t, Extend))


def make_program(
    graph: Graph,
    order: Sequence[Op],
    completed: Completed,
    book: RuleBook,
    after: Mapping[str, Sequence[str]],
    cost: CostModel = FEW_STEPS,
    reduce_dtype: str | None = None,
) -> Program:
    """Lay the ops out in ``order``, with an adapter wherever a reader wants another layout than is at hand.

    Args:
        after: op path -> paths of ops that ``op_order`` puts before it.
        cost: what adapters cost.
        reduce_dtype: the dtype in which gradients are added between devices.
    """
    gradients = {t for op in order if op.kind == "backward" for t in op.outputs if t.shape}
    floating = [t for t in gradients if jnp.issubdtype(t.dtype, jnp.floating) and t.dtype != reduce_dtype]
    writer = _Writer(completed, book, cost, dict.fromkeys(floating, reduce_dtype))
    inputs = [writer.define(t, completed.inputs[t]) for t in graph.inputs]
    constants = [writer.define(t, Layout.replicated(completed.mesh, t.shape)) for t, _ in graph.constants]
    for op in order:
        writer.compute(op, after.get(op.path, ()))
    outputs = [writer.read(t, layout) for t, layout in zip(graph.outputs, completed.outputs, strict=True)]
    held = [
        *((s, completed.inputs[t]) for s, t in zip(inputs, graph.inputs, strict=True)),
        *((s, Layout.replicated(completed.mesh, t.shape)) for s, (t, _) in zip(constants, graph.constants, strict=True)),
    ]
    return Program(completed.mesh, tuple(writer.tasks), tuple(held), tuple(zip(outputs, completed.outputs, strict=True)))


@dataclass
class _Writer:
    completed: Completed
    book: RuleBook
    cost: CostModel
    reduce_dtypes: Mapping[PTensor, str | None]
    tasks: list[Task] = field(default_factory=list)
    slots: dict[PTensor, list[tuple[Layout, Slot]]] = field(default_factory=dict)
    extended: dict[tuple[Slot, tuple[Edge, ...]], Slot] = field(default_factory=dict)
    count: int = 0

    def define(self, tensor: PTensor, layout: Layout) -> Slot:
        slot = self.count
        self.count += 1
        self.slots.setdefault(tensor, []).append((layout, slot))
        return slot

    def read(self, tensor: PTensor, layout: Layout) -> Slot:
        """The slot that holds ``tensor`` in ``layout``, adapted from the cheapest layout at hand."""
        held = self.slots[tensor]
        for known, slot in held:
            if known == layout:
                return slot
        narrow = self.reduce_dtypes.get(tensor)
        itemsize = jnp.dtype(narrow).itemsize if narrow else tensor.itemsize
        options = [(find_adapter(known, layout, itemsize, self.cost), slot) for known, slot in held]
        adapter, slot = min(options, key=lambda o: o[0].cost)
        if adapter.nothing:
            held.append((layout, slot))
            return slot
        output = self.define(tensor, layout)
        self.tasks.append(Adapt(tensor, adapter, slot, output, self.reduce_dtypes.get(tensor)))
        return output

    def extend(self, tensor: PTensor, layout: Layout, edges: tuple[Edge, ...]) -> Slot:
        """The slot that holds ``tensor`` in ``layout`` with the rows of ``edges``."""
        slot = self.read(tensor, layout)
        if not edges:
            return slot
        if (slot, edges) not in self.extended:
            self.extended[slot, edges] = self.count
            self.tasks.append(Extend(tensor, layout, edges, slot, self.count))
            self.count += 1
        return self.extended[slot, edges]

    def compute(self, op: Op, after: Sequence[str]) -> None:
        laid = self.completed.ops[op.path]
        parts = laid.placement.parts(self.completed.mesh)
        jaxpr, indexed = self.book.local(op, parts, laid.placement.sizes, laid.placement.chunks)
        inputs = tuple(
            self.extend(t, layout, laid.edges_of(i))
            for i, (t, layout) in enumerate(zip(op.inputs, laid.inputs, strict=True))
        )
        outputs = tuple(self.define(t, layout) for t, layout in zip(op.outputs, laid.outputs, strict=True))
        axes = tuple(laid.placement.factors[f] for f in indexed)
        before = tuple(slot for path in after for slot in self._results_of(path))
        self.tasks.append(Compute(op, jaxpr, inputs, outputs, axes, before))

    def _results_of(self, path: str) -> tuple[Slot, ...]:
        return next((t.outputs for t in self.tasks if isinstance(t, Compute) and t.op.path == path), ())
