"""Layouts of loops: a body is placed once, for all iterations.

A carry has one layout, in which each iteration takes it and leaves it: the one in which it comes, or the one in which
the body leaves it, where the body then leaves it so again; else each iteration brings it back. Value shares in a carry
are joined, except where the carry only sums up a gradient: that is reduced once, after the loop. A stack lies as its
slices do, whole along the iterations.

What the forward loop saves lies as the first reader in the backward loop wants it, of the layouts at hand in the forward.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jscaler.cost import CostModel
from jscaler.ir import Graph, Loop, Nest, Op, PTensor
from jscaler.ir.loop import Item, chain_of
from jscaler.materialize.adapter import find_adapter
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.shards import Shards


@dataclass(frozen=True)
class LoopLayouts:
    """How a loop's carries lie, and the slices of the stacks that it reads and writes."""

    carries: tuple[Layout, ...]
    xs: tuple[Layout, ...]
    ys: tuple[Layout, ...]


class Completer(Protocol):
    """What the loops need of the completion around them."""

    graph: Graph
    mesh: DeviceMesh
    cost: CostModel
    ops: dict[str, Any]
    at_hand: dict[PTensor, list[Layout]]
    inputs: dict[PTensor, Layout]
    waiting: dict[PTensor, Op]
    undecided: set[PTensor]
    shards: Shards
    left: dict[PTensor, Layout]

    def visit_all(self, items: Sequence[Item]) -> None: ...
    def _whole(self, tensor: PTensor) -> Layout: ...
    def _read(self, tensor: PTensor, layout: Layout) -> None: ...
    def _settle_waiting(self, tensor: PTensor, wanted: Layout) -> None: ...


class LoopMixin:
    """The part of the completion that knows loops."""

    def visit_loop(self: Any, nest: Nest) -> None:
        """Place what stands in a loop, and the loop's carries and stacks."""
        start = self._state()
        arriving = [self._arriving(c.init) for c in nest.loop.carries]
        taken, left = self._pass(nest, arriving)
        if taken != left:
            self._restore(start)
            again, kept = self._pass(nest, left)
            if again != kept:  # each iteration brings its carries back
                self._restore(start)
                self._pass(nest, taken)
        self._leave(nest.loop)

    def _pass(self: Any, nest: Nest, carried: Sequence[Layout | None]) -> tuple[list[Layout], list[Layout]]:
        """Place the body for carries that come in these layouts; returns how it took them and how it leaves them."""
        loop = nest.loop
        for carry, layout in zip(loop.carries, carried, strict=True):
            if layout is not None and not carry.is_sum:
                self.at_hand[carry.inside] = [layout]
        for x in loop.xs:
            options = [self._sliced(layout) for layout in self._options(x.stack)]
            if options:
                self.at_hand[x.slice] = sorted(dict.fromkeys(options), key=lambda layout: bool(layout.values))
            if len(options) > 1:
                self.undecided.add(x.slice)
        self.visit_all(nest.items)
        own = set(nest.tensors())
        for carry in loop.carries:
            if carry.out in self.waiting and carry.inside in self.at_hand:
                self._settle_waiting(carry.out, self.at_hand[carry.inside][0])
        for tensor in [t for t in self.waiting if t in own]:
            self._settle_waiting(tensor, self._whole(tensor))
        taken, left = [], []
        for carry in loop.carries:
            leaves = self._leaving(carry.out)
            takes = self.at_hand.setdefault(carry.inside, [leaves])[0]
            taken.append(takes)
            left.append(takes if takes in self.at_hand.get(carry.out, ()) or carry.is_sum else leaves)
        return taken, left

    def _leave(self: Any, loop: Loop) -> None:
        """Fix what the loop takes from outside, and say how its results lie."""
        for carry in loop.carries:
            layout = self.at_hand[carry.inside][0]
            self._want(carry.out, layout)
            self._want(carry.init, layout)
            self.at_hand[carry.final] = [self.shards.gradient(carry.final, layout)]
        for x in loop.xs:
            if x.slice in self.undecided:
                self.decide(x.slice, self.at_hand[x.slice][0])
            layout = self.at_hand.setdefault(x.slice, [self._whole(x.slice)])[0]
            if x.stack not in self.at_hand and x.stack in self._saved():
                self.at_hand[x.stack] = [layout.stacked(loop.length)]
            self._want(x.stack, layout.stacked(loop.length))
        for y in loop.ys:
            if not y.saved:
                if y.slice not in self.at_hand:
                    self._want(y.slice, self._whole(y.slice))
                held = self.at_hand[y.slice]
                joined = held if loop.forward is not None else [h for h in held if not h.values] or held
                layout = joined[0].stacked(loop.length)
                scattered = self.shards.gradient(y.stack, layout)
                self.at_hand[y.stack] = [scattered]
                layers_cut = any(scattered.by_dim[0])  # whole layers lie apart: no iteration can scatter its own
                self.left[y.stack] = layout if layers_cut else scattered

    def loop_layouts(self: Any) -> dict[str, LoopLayouts]:
        """The layouts of all loops, once everything is placed."""
        loops: Mapping[str, Loop] = self.graph.loops
        found = {}
        for name in sorted(loops, key=lambda name: len(chain_of(name, loops))):
            loop = loops[name]
            ys = []
            for y in loop.ys:
                layout = self.left.get(y.stack) or self.at_hand.get(y.stack, [self._whole(y.stack)])[0]
                layout = layout.sliced()
                self.at_hand.setdefault(y.slice, [layout])  # a stack that another loop saves
                ys.append(layout)
            carries = tuple(self.at_hand[c.inside][0] for c in loop.carries)
            found[name] = LoopLayouts(carries, tuple(self.at_hand[x.slice][0] for x in loop.xs), tuple(ys))
        return found

    def decide(self: Any, tensor: PTensor, wanted: Layout) -> None:
        """A slice that may lie in several ways lies as its first reader wants it."""
        self.undecided.discard(tensor)
        options = self.at_hand[tensor]
        if wanted in options:
            best = wanted
        else:
            costs = [find_adapter(o, wanted, tensor.itemsize, self.cost).cost for o in options]
            best = options[costs.index(min(costs))]
        self.at_hand[tensor] = [best]

    def layouts_at_hand(self: Any, op: Op) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts of an op that takes whatever part lies there."""
        if op.anywhere == "sum":
            layout = (self._options(op.inputs[1]) or [self._whole(op.inputs[1])])[0]  # (its maker waits for a reader)
            if any(combiner != "add" for _, combiner in layout.values):
                layout = without_values(layout)
            return (layout, layout), (layout,)
        layouts = tuple(self._fenced(t) for t in op.inputs)
        return layouts, layouts

    def _fenced(self: Any, tensor: PTensor) -> Layout:
        held = self._options(tensor) or [self._whole(tensor)]
        if tensor.role == "gradient":  # its shares may be passed on
            return held[0]
        return next((h for h in held if not h.values), held[0])

    def _arriving(self: Any, tensor: PTensor) -> Layout | None:
        """The layout in which a carry comes, value shares joined; None where it lies nowhere yet."""
        held = self._options(tensor)
        return next((h for h in held if not h.values), without_values(held[0])) if held else None

    def _leaving(self: Any, tensor: PTensor) -> Layout:
        return self._arriving(tensor) or self._whole(tensor)

    def _want(self: Any, tensor: PTensor, layout: Layout) -> None:
        self._settle_waiting(tensor, layout)
        self._read(tensor, layout)

    def _options(self: Any, tensor: PTensor) -> list[Layout]:
        """The layouts in which a tensor is at hand, or in which it could have been saved."""
        if tensor in self.at_hand:
            return self.at_hand[tensor]
        saved = self._saved().get(tensor)
        if saved is None:
            return []
        source, length = saved
        options = self._options(source)
        if source in self.shards.stored:  # what is made of shards is made whole again
            options = options[:1]
        return [layout.stacked(length) for layout in options]

    def _saved(self: Any) -> dict[PTensor, tuple[PTensor, int]]:
        """Saved stack -> what it is a stack of, and how many of them."""
        if self._saved_table is None:
            loops = self.graph.loops.values()
            self._saved_table = {y.stack: (y.slice, loop.length) for loop in loops for y in loop.ys if y.saved}
        return self._saved_table

    _saved_table: dict[PTensor, tuple[PTensor, int]] | None = None

    def _sliced(self: Any, layout: Layout) -> Layout:
        """The slices of a stack; one that is cut along the iterations has to be put together first."""
        return layout.sliced()

    def _state(self: Any) -> tuple[Any, ...]:
        at_hand = {t: list(layouts) for t, layouts in self.at_hand.items()}
        return dict(self.ops), at_hand, dict(self.inputs), dict(self.waiting), set(self.undecided)

    def _restore(self: Any, state: tuple[Any, ...]) -> None:
        ops, at_hand, inputs, waiting, undecided = state
        self.ops, self.inputs, self.waiting, self.undecided = dict(ops), dict(inputs), dict(waiting), set(undecided)
        self.at_hand = {t: list(layouts) for t, layouts in at_hand.items()}


def without_values(layout: Layout) -> Layout:
    """``layout`` with its value shares joined: the axes that carried them replicate."""
    return dataclasses.replace(layout, values=())
