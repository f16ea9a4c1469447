"""Complete a plan: give every op a placement and every tensor its layouts, in the order of the program.

`choose_placement` says how one op is placed, and `layouts_at_hand` how the tensors lie by then. An op waits if
all that it reads are inputs of the step without a layout (the decay of a momentum). It takes the layout that its reader
wants, so optimizer state follows its parameter. Everything is deterministic.

Loops: a body is placed once, for all iterations. A carry has one layout, in which each iteration takes it and leaves it:
the one in which it comes, or the one in which the body leaves it, where the body then leaves it so again; else each
iteration brings it back. Value shares in a carry are joined, except where the carry only sums up a gradient: that is
reduced once, after the loop. A stack lies as its slices do, whole along the iterations. The forward loop has a saved
stack at hand in several layouts; the first reader in the backward loop chooses one.
"""

from collections.abc import Sequence

from jscaler.clusters import FEW_STEPS, CostModel
from jscaler.ir import Nest, Op, PTensor
from jscaler.ir.loop import Item, chain_of
from jscaler.ir.walk import grouped
from jscaler.materialize.choose_placement import PlacementChoice
from jscaler.materialize.completed import Completed, LoopLayouts, OpLayouts
from jscaler.materialize.groups import OnGroups
from jscaler.materialize.layout import Layout
from jscaler.materialize.layouts_at_hand import LayoutsAtHand
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.placement import Placement
from jscaler.materialize.shards import find_shards
from jscaler.materialize.stored import storable, stored_layouts
from jscaler.primitives import Plan
from jscaler.rules.rule_book import RuleBook


def complete(placed: OnGroups, plan: Plan, book: RuleBook, cost: CostModel = FEW_STEPS) -> Completed:
    """Fill in what the policy left open.

    A reader on another group than its operand's finds it there in the layout that it reads: `lower.passing` crosses.

    Raises:
        PlanError: incomplete or contradictory decisions.
    """
    grids = placed.groups.grids
    shards = find_shards(placed.graph, plan, grids)
    at_hand = LayoutsAtHand(placed, shards, stored_layouts(placed.graph, plan, grids), cost)
    return _Completion(placed, PlacementChoice(placed, plan, book, cost, at_hand), at_hand).run()


class _Completion:
    """A walk over the items of a graph; it visits a loop until its carries leave an iteration as they enter it."""

    def __init__(self, placed: OnGroups, choice: PlacementChoice, at_hand: LayoutsAtHand):
        graph = placed.graph
        self.graph, self.groups, self.homes = graph, placed.groups, placed.homes
        self.choice, self.at_hand = choice, at_hand
        self.of_loop = {op.loop: placed.homes[op.path].group for op in reversed(graph.ops)}  # that of its first op
        chains = ((name, op) for op in graph.ops for name in chain_of(op.loop, graph.loops))
        in_loop = grouped((name, placed.of_op[op.path]) for name, op in chains)
        self.in_loop = {name: set(groups) for name, groups in in_loop.items()}  # those of all ops in it
        # Fences of stored parameters in loops over micro-batches take their inputs as the readers want the outputs.
        self.fetches = {op.path: op for op in graph.ops if op.anywhere == "fence" and op.kind == "forward"}
        ends = (zip(op.outputs, op.inputs, strict=True) for op in self.fetches.values())
        self.fetched = {output: source for pairs in ends for output, source in pairs}
        self.stacks: dict[PTensor, Layout] = {}  # as loops leave those that they write

    def run(self) -> Completed:
        """Place all ops, and settle the tensors that nobody has read."""
        graph, at_hand = self.graph, self.at_hand
        meshes, group_of = self.groups.meshes, self.groups.group_of
        self._visit(graph.tree)
        for tensor in list(at_hand.waiting):
            self._settle_waiting(tensor)
        for path, op in self.fetches.items():
            group = self.homes[path].group
            for tensor in op.outputs:
                self._want(tensor, at_hand.whole(tensor, group))
            layouts = tuple(at_hand.first(t, group) for t in op.inputs)
            at_hand.ops[path] = OpLayouts(Placement(group, origin="filled"), layouts, layouts)
        for tensor in graph.inputs:
            at_hand.inputs.setdefault(tensor, at_hand.whole(tensor, meshes[0]))
        state = {index: at_hand.inputs[graph.inputs[i]] for index, i in graph.next_version.items()}  # leaves as it came
        first = at_hand.inputs | {t: layouts[0] for t, layouts in at_hand.by_tensor.items()}
        outputs = [state.get(i) or storable(first[t], group_of(first[t].mesh)) for i, t in enumerate(graph.outputs)]
        gradients = {t: first[t] for t in at_hand.shards.gradients if t in at_hand.by_tensor}
        laid = at_hand.inputs, tuple(outputs), self._loop_layouts(), gradients
        return Completed(meshes, at_hand.ops, *laid, at_hand.shards.axes, self.homes)

    def _visit(self, items: Sequence[Item]) -> None:
        for item in items:
            if not isinstance(item, Op):
                self._visit_loop(item)
            elif self.choice.waits(item):
                self.at_hand.waiting.update(dict.fromkeys(item.outputs, item))
            elif item.path not in self.fetches:
                source = (item.again or item.forward) if item.path in self.choice.open else None
                for tensor in source.outputs if source is not None else ():
                    self._settle_waiting(tensor)
                self._settle(item, self.choice.layouts(item, self.choice.placement(item)))

    def _settle(self, op: Op, layouts: OpLayouts) -> None:
        """Fix how ``op`` is laid out; the waiting ops that it reads follow."""
        todo = [(op, layouts)]
        while todo:
            op, layouts = todo.pop()
            self.at_hand.fix(op, layouts)
            for tensor, layout in zip(op.inputs, layouts.inputs, strict=True):
                maker = self.at_hand.waiting.get(tensor)
                if maker is None:
                    self._want(tensor, layout)
                elif all(maker is not other for other, _ in todo):
                    todo.append((maker, self.choice.for_reader(maker, tensor, layout)))

    def _settle_waiting(self, tensor: PTensor, layout: Layout | None = None) -> None:
        """Place the op of ``tensor``, if it waits, so that it makes the layout; None stands for the whole tensor."""
        if tensor in self.at_hand.waiting:
            maker = self.at_hand.waiting[tensor]
            layout = layout or self.at_hand.whole(tensor, self.homes[maker.path].group)
            self._settle(maker, self.choice.for_reader(maker, tensor, layout))

    def _want(self, tensor: PTensor, layout: Layout) -> None:
        """Have ``tensor`` in ``layout`` for a reader."""
        self._settle_waiting(tensor, layout)
        if tensor in self.fetched and tensor not in self.at_hand.by_tensor:
            source = self.fetched[tensor]
            self._want(source, layout)
            self.at_hand.by_tensor[tensor] = self.at_hand.on_group(source, layout.mesh)[:1]
        self.at_hand.read(tensor, layout)

    def _visit_loop(self, nest: Nest) -> None:
        """Place all ops in a loop, and lay out its carries and stacks."""
        start = self.at_hand.snapshot()
        arriving = [self.at_hand.arriving(c.init, self._group(nest, c.out)) for c in nest.loop.carries]
        entries, exits = self._pass(nest, arriving)
        if entries != exits:
            self.at_hand.restore(start)
            second_entries, second_exits = self._pass(nest, exits)
            if second_entries != second_exits:  # each iteration brings its carries back
                self.at_hand.restore(start)
                self._pass(nest, entries)
        self._leave(nest)

    def _group(self, nest: Nest, tensor: PTensor) -> DeviceMesh:
        """The group on which a loop takes or leaves ``tensor``.

        A loop over several groups has it where it is made, or else where it is first read.
        """
        if len(self.groups.meshes) == 1:
            return self.groups.meshes[0]
        groups = self.in_loop[nest.loop.name]
        if len(groups) == 1:
            return next(iter(groups))
        op = self.graph.flow.maker(tensor) or next(iter((*self.graph.consumers.get(tensor, ()), *nest.ops())))
        return self.homes[op.path].group

    def _pass(self, nest: Nest, carried: Sequence[Layout | None]) -> tuple[list[Layout], list[Layout]]:
        """Place the body for carries that come in these layouts, None for any.

        Returns:
            The layouts in which an iteration takes its carries, and those in which it leaves them.
        """
        loop, at_hand = nest.loop, self.at_hand
        for carry, layout in zip(loop.carries, carried, strict=True):
            if layout is not None and not carry.is_sum:
                at_hand.by_tensor[carry.inside] = (layout,)
        for x in loop.xs:
            options = dict.fromkeys(layout.sliced() for layout in at_hand.options(x.stack, self._group(nest, x.slice)))
            if options:
                at_hand.by_tensor[x.slice] = tuple(sorted(options, key=lambda layout: bool(layout.values)))
            if len(options) > 1:
                at_hand.undecided.add(x.slice)
        self._visit(nest.items)
        for carry in loop.carries:
            if carry.inside in at_hand.by_tensor:
                self._settle_waiting(carry.out, at_hand.by_tensor[carry.inside][0])
        inside = set(nest.tensors())
        for tensor in [t for t in at_hand.waiting if t in inside]:
            self._settle_waiting(tensor)
        entries, exits = [], []
        for carry in loop.carries:
            group = self._group(nest, carry.out)
            layout = at_hand.arriving(carry.out, group) or at_hand.whole(carry.out, group)
            entries.append(at_hand.by_tensor.setdefault(carry.inside, (layout,))[0])
            stays = entries[-1] in at_hand.by_tensor.get(carry.out, ()) or carry.is_sum
            exits.append(entries[-1] if stays else layout)
        return entries, exits

    def _leave(self, nest: Nest) -> None:
        """Fix the layouts of a loop's operands and results, once its body is placed."""
        loop, at_hand, lying = nest.loop, self.at_hand, self.at_hand.by_tensor
        for carry in loop.carries:
            layout = lying[carry.inside][0]
            self._want(carry.out, layout)
            self._want(carry.init, layout)
            lying[carry.final] = (at_hand.shards.gradient(carry.final, layout),)
        for x in loop.xs:
            layout = lying.setdefault(x.slice, (at_hand.whole(x.slice, self._group(nest, x.slice)),))[0]
            at_hand.read(x.slice, layout)
            stacked = layout.stacked(loop.length)
            if x.stack not in lying and x.stack in at_hand.saved:
                # The loop that saves it leaves it as this one reads it; on another group, as it can.
                source, _ = at_hand.saved[x.stack]
                maker = self.graph.producer.get(source)
                home = self.of_loop.get(self.graph.homes[source], layout.mesh)
                group = home if maker is None else self.homes[maker.path].group
                near = group.unordered == layout.mesh.unordered
                lying[x.stack] = (stacked if near else at_hand.first(x.stack, group),)
            self._want(x.stack, stacked)
        for y in loop.ys:
            if y.saved:
                continue
            if y.slice not in lying:
                self._want(y.slice, at_hand.whole(y.slice, self._group(nest, y.slice)))
            joined = [layout for layout in lying[y.slice] if not layout.values or loop.forward is not None]
            layout = (joined or lying[y.slice])[0].stacked(loop.length)
            lying[y.stack] = (at_hand.shards.gradient(y.stack, layout),)
            layers_cut = any(lying[y.stack][0].by_dim[0])  # whole layers lie apart: no iteration can scatter its own
            self.stacks[y.stack] = layout if layers_cut else lying[y.stack][0]

    def _loop_layouts(self) -> dict[str, LoopLayouts]:
        """The layouts of all loops, once everything is placed."""
        loops, lying = self.graph.loops, self.at_hand.by_tensor
        table = {}
        for name in sorted(loops, key=lambda name: len(chain_of(name, loops))):
            loop, group = loops[name], self.of_loop.get(name, self.groups.meshes[0])
            ys = []
            for y in loop.ys:
                layout = self.stacks.get(y.stack) or lying.get(y.stack, (self.at_hand.whole(y.stack, group),))[0]
                ys.append(layout.sliced())
                lying.setdefault(y.slice, (ys[-1],))  # a stack that another loop saves
            carries, xs = (lying[c.inside][0] for c in loop.carries), (lying[x.slice][0] for x in loop.xs)
            table[name] = LoopLayouts(tuple(carries), tuple(xs), tuple(ys))
        return table
