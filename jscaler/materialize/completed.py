"""What a completed plan says: how every op is placed, and how every tensor lies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jscaler.ir import Op, PTensor, VTensor
from jscaler.materialize.edges import Edge, extended_mask
from jscaler.materialize.groups import Home
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh, by_devices
from jscaler.materialize.placement import Placement


@dataclass(frozen=True)
class OpLayouts:
    """How one op is placed, and the layouts it reads and leaves; per input the edges at which it reads beyond its part."""

    placement: Placement
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    edges: tuple[tuple[Edge, ...], ...] = ()

    def edges_of(self, index: int) -> tuple[Edge, ...]:
        """Where the op reads beyond its part of input ``index``."""
        return self.edges[index] if self.edges else ()

    def vtensors(self, op: Op, device: int) -> tuple[tuple[VTensor, ...], tuple[VTensor, ...]]:
        """What the cell on logical ``device``, one of the op's group, reads and what it writes."""
        position = self.placement.group.devices.index(device)
        reads = tuple(
            VTensor(t, extended_mask(layout.mask(position), self.edges_of(i)))
            for i, (t, layout) in enumerate(zip(op.inputs, self.inputs, strict=True))
        )
        return reads, tuple(VTensor(t, layout.mask(position)) for t, layout in zip(op.outputs, self.outputs, strict=True))


@dataclass(frozen=True)
class LoopLayouts:
    """How a loop's carries lie, and the slices of the stacks that it reads and writes."""

    carries: tuple[Layout, ...]
    xs: tuple[Layout, ...]
    ys: tuple[Layout, ...]


@dataclass(frozen=True)
class Completed:
    """A complete plan: placements for all ops, layouts for all inputs and outputs of the step and of its loops.

    Attributes:
        groups: the device groups, each a mesh; every placement and every layout is on the devices of one of them, those of
            inputs and outputs in its order.
        homes: op path -> the group that it runs on, its stage, and why.
    """

    groups: tuple[DeviceMesh, ...]
    ops: Mapping[str, OpLayouts]
    inputs: Mapping[PTensor, Layout]
    outputs: tuple[Layout, ...]
    loops: Mapping[str, LoopLayouts] = field(default_factory=dict)
    gradients: Mapping[PTensor, Layout] = field(default_factory=dict)  # those of sharded parameters, as updates get them
    shards: Mapping[PTensor, Axes] = field(default_factory=dict)  # the axes that sharded parameters are cut by, if stored
    homes: Mapping[str, Home] = field(default_factory=dict)

    def group_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The group on whose devices ``mesh`` lies, in whatever order."""
        return self._by_devices[mesh.unordered]

    @cached_property
    def _by_devices(self) -> dict[Any, DeviceMesh]:
        return by_devices(self.groups)
