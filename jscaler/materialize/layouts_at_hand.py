"""Where tensors lie while a plan is completed: the layouts fixed so far, which completion can take back.

A tensor is at hand in the layout in which it is made, and in each layout to which it was adapted for a reader.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jscaler.clusters import CostModel
from jscaler.ir import Op, PTensor
from jscaler.ir.walk import grouped
from jscaler.materialize.adapter import find_adapter
from jscaler.materialize.completed import OpLayouts
from jscaler.materialize.groups import OnGroups
from jscaler.materialize.layout import Layout, without_values
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.shards import Shards
from jscaler.materialize.stored import storable


class LayoutsAtHand:
    """The layouts that a completion has fixed.

    Attributes:
        by_tensor: tensor -> its layouts: first the one in which it is made, then those to which it is adapted.
        ops: op path -> its placement and layouts.
        inputs: input of the step -> its layout between steps.
        waiting: output -> its op, which takes the layout that the first reader wants.
        undecided: slices that may lie in any of their layouts, until they are read.
        saved: stack for a backward loop -> the tensor that it stacks up, and the number of its slices.
    """

    def __init__(self, placed: OnGroups, shards: Shards, stored: Mapping[PTensor, Layout], cost: CostModel):
        graph = placed.graph
        self.groups, self.homes, self.shards, self.cost = placed.groups, placed.homes, shards, cost
        self.of_part = placed.of_part
        self.state = frozenset(graph.inputs[i] for i in graph.next_version.values())
        self.step_inputs = frozenset(graph.inputs)
        loops = graph.loops.values()
        self.saved = {y.stack: (y.slice, loop.length) for loop in loops for y in loop.ys if y.saved}
        self._replicated: dict[tuple[DeviceMesh, tuple[int, ...]], Layout] = {}
        self.ops: dict[str, OpLayouts] = {}
        copies = grouped((graph.copy_of.get(t, t), (t, group)) for t, group in placed.lies.items())
        self.copies = {t: own for own in copies.values() for t, _ in own}  # with what it is a copy of, and their groups
        self.inputs = {t: on for tensor, layout in stored.items() for t, on in self._on_groups(tensor, layout)}
        self.by_tensor = {t: tuple(self.whole(t, g) for g in self.groups.meshes) for t, _ in graph.constants}
        self.by_tensor.update({tensor: (layout,) for tensor, layout in self.inputs.items()})
        self.waiting: dict[PTensor, Op] = {}
        self.undecided: set[PTensor] = set()
        self._tables: tuple[Any, ...] = (self.ops, self.inputs, self.by_tensor, self.waiting, self.undecided)

    def snapshot(self) -> tuple[Any, ...]:
        """The present state, for `restore`; later changes leave it as it is."""
        return tuple(table.copy() for table in self._tables)

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Return to the state of a `snapshot`, which stays valid."""
        for table, content in zip(self._tables, snapshot, strict=True):
            table.clear()
            table.update(content)

    def whole(self, tensor: PTensor, group: DeviceMesh) -> Layout:
        """The layout of ``tensor`` with a full copy on each device of ``group``."""
        key = group, tensor.shape
        if key not in self._replicated:
            self._replicated[key] = Layout.replicated(*key)
        return self._replicated[key]

    def on_group(self, tensor: PTensor, group: DeviceMesh) -> tuple[Layout, ...]:
        """The layouts in which ``tensor`` is at hand on the devices of ``group``."""
        layouts = self.by_tensor.get(tensor, ())
        if len(self.groups.meshes) == 1:
            return layouts
        return tuple(layout for layout in layouts if layout.mesh.unordered == group.unordered)

    def options(self, tensor: PTensor, group: DeviceMesh) -> tuple[Layout, ...]:
        """The layouts in which ``tensor`` is at hand on ``group``, or in which its loop could save it."""
        if tensor in self.by_tensor or tensor not in self.saved:
            return self.on_group(tensor, group)
        source, length = self.saved[tensor]
        layouts = self.options(source, group)
        if source in self.shards.stored:  # a tensor made of shards is made whole again
            layouts = layouts[:1]
        return tuple(layout.stacked(length) for layout in layouts)

    def first(self, tensor: PTensor, group: DeviceMesh) -> Layout:
        """The first of the `options`, or the `whole` without any."""
        return next(iter(self.options(tensor, group)), self.whole(tensor, group))

    def arriving(self, tensor: PTensor, group: DeviceMesh) -> Layout | None:
        """The layout in which a carry comes, value shares joined; None where it lies nowhere yet."""
        layouts = self.options(tensor, group)
        return next((x for x in layouts if not x.values), without_values(layouts[0])) if layouts else None

    def as_it_lies(self, op: Op) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts that a fence or a loop's sum reads, and those it leaves; such an op takes any part of its inputs."""
        group = self.homes[op.path].group
        if op.anywhere == "sum":
            layout = self.first(op.inputs[1], group)
            if any(combiner != "add" for _, combiner in layout.values):
                layout = without_values(layout)
            return (layout, layout), (layout,)
        layouts: list[Layout] = []
        for tensor in op.inputs:
            options = self.options(tensor, group) or (self.whole(tensor, group),)
            joined = () if tensor.role == "gradient" else (x for x in options if not x.values)  # its shares may pass
            layouts.append(next(iter(joined), options[0]))
        return tuple(layouts), tuple(layouts)

    def read(self, tensor: PTensor, layout: Layout) -> None:
        """Note that ``tensor`` is read in ``layout``: if it lies nowhere for certain, this decides where."""
        options = self.by_tensor.get(tensor, ())
        if tensor in self.undecided and layout in options:
            self.by_tensor[tensor] = (layout,)
        elif tensor in self.undecided:  # to a reader on another group it crosses, however it lies
            near = [x for x in options if x.mesh.unordered == layout.mesh.unordered]
            costs = [find_adapter(option, layout, tensor.itemsize, self.cost).cost for option in near]
            self.by_tensor[tensor] = (near[costs.index(min(costs))] if near else options[0],)
        elif tensor in self.of_part and self.of_part[tensor].unordered != layout.mesh.unordered:
            pass  # it crosses from the devices of its range, whose own reader says how it lies there
        elif not options or (tensor in self.of_part and tensor not in self.inputs):
            # sharded state keeps its stored layout, even if the reader cuts another dim
            as_array = storable(layout, self.groups.group_of(layout.mesh), elsewhere=tensor in self.state)
            for other, lying in self._on_groups(tensor, self.shards.leaf(tensor, as_array)):
                self.by_tensor[other] = (lying, *self.by_tensor.get(other, ()))
                if other in self.step_inputs:
                    self.inputs[other] = lying
        self.undecided.discard(tensor)
        self.by_tensor.setdefault(tensor, ())
        # what is stored in parts also arrives in parts, and is made whole where it is used
        for found in (self.shards.leaf(tensor, layout), layout) if not self.on_group(tensor, layout.mesh) else (layout,):
            self.by_tensor[tensor] += (found,) if found not in self.by_tensor[tensor] else ()

    def _on_groups(self, tensor: PTensor, layout: Layout) -> list[tuple[PTensor, Layout]]:
        """``tensor`` and its copies on other groups, which lie as it does in ``layout``."""
        every = self.copies.get(tensor, [(tensor, layout.mesh)])
        return [(other, dataclasses.replace(layout, mesh=group)) for other, group in every]

    def fix(self, op: Op, layouts: OpLayouts) -> None:
        """Lay out ``op`` and its outputs; it no longer waits."""
        self.ops[op.path] = layouts
        if op.anywhere == "sum":  # its carry is taken as the sum leaves it
            self.by_tensor[op.inputs[0]] = (layouts.inputs[0],)
        for tensor, layout in zip(op.outputs, layouts.outputs, strict=True):
            self.by_tensor[tensor] = (self.shards.gradient(tensor, layout),)
            self.waiting.pop(tensor, None)
