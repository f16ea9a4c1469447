"""Complete a plan: give every op a placement and every tensor its layouts.

What the policy placed stays. A backward op mirrors its forward through their common factors. Every other op takes,
axis by axis, the use that makes its adapters cheapest, given how its inputs lie. An op that reads nothing but inputs of
the step which lie nowhere yet (the decay of a momentum) waits, and then takes the layout that its reader wants: so
optimizer state follows its parameter. Everything is deterministic.

Loops: a body is placed once, for all iterations. A carry has one layout, in which each iteration takes it and leaves it:
the one in which it comes, or the one in which the body leaves it, where the body then leaves it so again; else each
iteration brings it back. Value shares in a carry are joined, except where the carry only sums up a gradient: that is
reduced once, after the loop. A stack lies as its slices do, whole along the iterations. What the forward loop saves lies
as the first reader in the backward loop wants it, of the layouts at hand in the forward.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jscaler.clusters import FEW_STEPS, CostModel
from jscaler.errors import PlanError
from jscaler.ir import Nest, Op, PTensor, Rule
from jscaler.ir.loop import Item, chain_of
from jscaler.materialize.adapter import find_adapter
from jscaler.materialize.completed import Completed, LoopLayouts, OpLayouts
from jscaler.materialize.edges import Edge, edges_of, halo_cost
from jscaler.materialize.filling import Filling, summands
from jscaler.materialize.groups import OnGroups
from jscaler.materialize.layout import Layout, without_values
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.materialize.placement import (
    Decided,
    Placement,
    chunked_ops,
    operand_layout,
    placed_grids,
    placement_of,
    result_layout,
)
from jscaler.materialize.relabel import shared_out
from jscaler.materialize.shards import find_shards
from jscaler.materialize.stored import storable, stored_layouts
from jscaler.primitives import Plan
from jscaler.rules.rule_book import RuleBook

Laid = tuple[tuple[Layout, ...], tuple[Layout, ...], tuple[tuple[Edge, ...], ...]]


def complete(placed: OnGroups, plan: Plan, book: RuleBook, cost: CostModel = FEW_STEPS) -> Completed:
    """Fill in what the policy left open.

    A reader on another group than its operand's finds it there in the layout that it reads: `lower.passing` crosses.

    Raises:
        PlanError: incomplete or contradictory decisions.
    """
    return _Completer(placed, plan, book, cost).run()


class _Completer:
    def __init__(self, placed: OnGroups, plan: Plan, book: RuleBook, cost: CostModel):
        graph = placed.graph
        self.graph = graph
        self.book = book
        self.cost = cost
        self.pieces = placed.pieces
        decided, where = placed.decided, placed.groups.grids
        grids = placed_grids(decided)
        self.given = {p: placement_of(d, *where[grids[p]]) for p, d in decided.items() if not d.any_order}
        self.unordered = {p: d for p, d in decided.items() if d.any_order}
        self.chunks = chunked_ops(plan)
        self.shards = find_shards(graph, plan, where)
        self.groups, self.group_of = placed.groups.meshes, placed.groups.group_of
        self.homes = placed.homes
        self.home = {path: one.group for path, one in placed.homes.items()}  # op path -> the group that it runs on
        self.of_loop = {op.loop: self.home[op.path] for op in reversed(graph.ops)}  # loop -> the group of its first op
        self.in_loop: dict[str, set[DeviceMesh]] = {}  # loop -> the groups of all ops in it
        for op in graph.ops:
            for name in chain_of(op.loop, graph.loops):
                self.in_loop.setdefault(name, set()).add(placed.of_op[op.path])
        self.ops: dict[str, OpLayouts] = {}
        # what equal ops share, by all that it depends on; a placement's key and a layout have their group
        self.laid: dict[Any, Laid] = {}
        self.filled: dict[Any, Placement] = {}
        self.wholes: dict[tuple[DeviceMesh, tuple[int, ...]], Layout] = {}
        # The layouts in which a tensor is at hand: as produced first, then as adapted for its readers so far.
        self.at_hand: dict[PTensor, list[Layout]] = {
            t: [self._whole(t, g) for g in self.groups] for t, _ in graph.constants
        }
        self.inputs = stored_layouts(graph, plan, where)
        self.at_hand.update({t: [layout] for t, layout in self.inputs.items()})
        self.left: dict[PTensor, Layout] = {}  # how loops leave the stacks that they write
        self.step_inputs = frozenset(graph.inputs)
        self.state = frozenset(graph.inputs[i] for i in graph.next_version.values())
        pairs = [pair for call in graph.calls for pair in zip(call.gradients, call.wrt, strict=True)]
        self.joined = {g: p for g, p in pairs if g in graph.producer and graph.producer[g].forward is None}
        self.summands = summands(graph)
        self.waiting: dict[PTensor, Op] = {}  # by output: ops that take the layout their first reader wants
        self.wanted: dict[PTensor, Layout] = {}  # how zeros are made: whatever their reader wants, they are right for it
        self.fetches: dict[str, Op] = {}  # fences of stored parameters, in loops over micro-batches
        self.fetched: dict[PTensor, PTensor] = {}  # what comes out of them -> what goes in
        self.undecided: set[PTensor] = set()  # slices that may lie in any of the layouts at hand, until they are read
        # saved stack -> what it is a stack of, and how many of them
        loops = graph.loops.values()
        self.saved = {y.stack: (y.slice, loop.length) for loop in loops for y in loop.ys if y.saved}

    def run(self) -> Completed:
        self.visit_all(self.graph.tree)
        for tensor in list(self.waiting):
            self._settle_whole(tensor)
        for path, op in self.fetches.items():
            for tensor in op.outputs:
                self._read(tensor, self._whole(tensor, self.home[path]))
            layouts = tuple(self._first_held(t, self.home[path]) for t in op.inputs)
            self.ops[path] = OpLayouts(Placement(self.home[path], origin="filled"), layouts, layouts)
        for tensor in self.graph.inputs:
            self.inputs.setdefault(tensor, self._whole(tensor, self.groups[0]))
        outputs = tuple(self._output(i, t) for i, t in enumerate(self.graph.outputs))
        gradients = {t: self.at_hand[t][0] for t in self.shards.gradients if t in self.at_hand}
        laid = self.inputs, outputs, self.loop_layouts(), gradients
        return Completed(self.groups, self.ops, *laid, self.shards.axes, self.homes)

    def visit_all(self, items: Sequence[Item]) -> None:
        for item in items:
            if not isinstance(item, Op):
                self.visit_loop(item)
            elif item.anywhere == "fence" and item.kind == "forward":  # it takes what lies as its readers will want it
                self.fetches[item.path] = item
                self.fetched.update(zip(item.outputs, item.inputs, strict=True))
            elif self._waits(item):
                self.waiting.update(dict.fromkeys(item.outputs, item))
            else:
                self._settle(item, self._place(item))

    def _waits(self, op: Op) -> bool:
        """Whether nothing that ``op`` reads lies anywhere yet, so that its readers may choose."""
        if op.anywhere == "zeros":
            return True
        placed = op.path in self.given or op.path in self.unordered or op.forward or op.again or op.anywhere
        if not self.home[op.path].axes or not op.outputs or placed:
            return False
        large = [t for t in op.inputs if t.shape]
        return bool(large) and all(not self._held(t, self.home[op.path]) or t in self.shards.whole for t in large)

    def _held(self, tensor: PTensor, group: DeviceMesh) -> list[Layout]:
        """The layouts in which ``tensor`` is at hand on ``group``."""
        held = self.at_hand.get(tensor, [])
        return held if len(self.groups) == 1 else [layout for layout in held if layout.mesh.unordered == group.unordered]

    def _first_held(self, tensor: PTensor, group: DeviceMesh) -> Layout:
        """How ``tensor`` lies on ``group``; whole, where it lies on another."""
        return next(iter(self._held(tensor, group)), self._whole(tensor, group))

    def _settle(self, op: Op, placement: Placement) -> None:
        """Fix the placement of ``op``; what it reads of waiting ops settles them."""
        todo = [(op, placement)]
        while todo:
            op, placement = todo.pop()
            chunks = self._fitting_chunks(op, placement)
            placement = placement if chunks == placement.chunks else dataclasses.replace(placement, chunks=chunks)
            done = self._lay_out(op, placement)
            self.ops[op.path] = done
            if op.anywhere == "sum":
                self.at_hand[op.inputs[0]] = [done.inputs[0]]
            for tensor, layout in zip(op.outputs, done.outputs, strict=True):
                self.at_hand[tensor] = [self.shards.gradient(tensor, layout)]
                self.waiting.pop(tensor, None)
            for tensor, layout in zip(op.inputs, done.inputs, strict=True):
                maker = self.waiting.get(tensor)
                if maker is None:
                    self._read(tensor, layout)
                elif all(maker is not waiting for waiting, _ in todo):
                    todo.append((maker, self._as_wanted(maker, tensor, layout)))

    def _settle_waiting(self, tensor: PTensor, wanted: Layout) -> None:
        if tensor in self.waiting:
            self._settle(self.waiting[tensor], self._as_wanted(self.waiting[tensor], tensor, wanted))

    def _settle_whole(self, tensor: PTensor) -> None:
        if tensor in self.waiting:
            self._settle_waiting(tensor, self._whole(tensor, self.home[self.waiting[tensor].path]))

    def _as_wanted(self, op: Op, tensor: PTensor, wanted: Layout) -> Placement:
        """The placement of ``op`` that makes ``tensor`` as its reader wants it; what is made of shards, in shards."""
        if op.anywhere == "zeros":
            here = self.home[op.path]
            right = wanted.mesh.unordered == here.unordered and wanted.memory == "device"
            self.wanted[tensor] = wanted if right else self._whole(tensor, here)
            return Placement(here, origin="filled")
        made = self._making(op, tensor, wanted)
        if any(t in self.at_hand for t in op.inputs if t.shape):  # a parameter that lies: its norm is split as it is
            made = self._fill(op, made)
        return self._on_shards(op, made)

    def _on_shards(self, op: Op, placement: Placement) -> Placement:
        """``placement`` split further, where ``op`` makes something of sharded parameters alone."""
        name, axes = self.shards.factor(op, placement.group)
        return self._split_further(op, placement, name, axes)

    def _split_further(self, op: Op, placement: Placement, name: str, axes: Axes) -> Placement:
        """``placement`` with factor ``name`` split along those of ``axes`` that split nothing, if it can be."""
        open_axes = tuple(a for a in axes if all(a not in used for used in placement.factors.values()))
        factor = self.book.rule(op).factors.get(name) if open_axes else None
        both = (*placement.factors.get(name, ()), *open_axes)
        parts = placement.group.size(both) * self._chunks(op).get(name, 1)
        if factor is None or factor.kind == "blocked" or factor.size % parts:
            return placement
        return dataclasses.replace(placement, factors={**placement.factors, name: both})

    def _making(self, op: Op, tensor: PTensor, wanted: Layout) -> Placement:
        """The placement of ``op`` that makes ``tensor`` in this layout; a copy where none does."""
        copy = Placement(self.home[op.path], origin="filled")
        here = wanted.mesh.unordered == copy.group.unordered
        if wanted.values or not any(wanted.cuts) or not wanted.even or not here:
            return copy
        copy = dataclasses.replace(copy, group=wanted.mesh)
        rule = self.book.rule(op)
        factors: dict[str, Axes] = {}
        dims = zip(rule.results[op.outputs.index(tensor)], wanted.subdims, wanted.by_dim, strict=True)
        for names, sizes, cuts in dims:
            if not any(cuts):
                continue
            if len(sizes) == 1:  # a cut of a whole dim is one of its major factor
                names = names[:1]
            if len(names) != len(cuts):
                return copy
            factors.update({name: axes for name, axes in zip(names, cuts, strict=True) if axes})
        chunks = self._chunks(op)
        legal = all(
            rule.factors[f].kind != "blocked" and rule.factors[f].size % (copy.group.size(axes) * chunks.get(f, 1)) == 0
            for f, axes in factors.items()
        )
        return dataclasses.replace(copy, factors=factors) if legal else copy

    def _whole(self, tensor: PTensor, group: DeviceMesh) -> Layout:
        shape = tensor.aval.shape
        if (found := self.wholes.get((group, shape))) is None:
            found = self.wholes[group, shape] = Layout.replicated(group, tensor.shape)
        return found

    def _read(self, tensor: PTensor, layout: Layout) -> None:
        if tensor in self.undecided:
            self.decide(tensor, layout)
        if tensor in self.fetched and tensor not in self.at_hand:
            self._want(self.fetched[tensor], layout)
            self.at_hand[tensor] = [self.at_hand[self.fetched[tensor]][0]]
        if tensor not in self.at_hand:  # an input of the step lies as its first reader wants it
            self.at_hand[tensor] = [self.shards.leaf(tensor, self._storable(layout, tensor in self.state))]
            if tensor in self.step_inputs:
                self.inputs[tensor] = self.at_hand[tensor][0]
        if layout not in self.at_hand[tensor]:
            self.at_hand[tensor] = [*self.at_hand[tensor], layout]  # no list changes: `_state` keeps them

    def _output(self, index: int, tensor: PTensor) -> Layout:
        """A state leaf leaves as it came; anything else as it was made, with value shares joined."""
        if index in self.graph.next_version:
            return self.inputs[self.graph.inputs[self.graph.next_version[index]]]
        layout = self.at_hand[tensor][0] if tensor in self.at_hand else self.inputs[tensor]
        return self._storable(layout)

    def _storable(self, layout: Layout, is_state: bool = False) -> Layout:
        """How an array lies that is read, or made, in ``layout``: in the order of its group's mesh.

        State stays in parts, if of another dim: it lies so between steps.
        """
        mesh = self.group_of(layout.mesh)
        here = layout if mesh is layout.mesh else dataclasses.replace(layout, mesh=mesh)
        return storable(here, elsewhere=is_state)

    def _place(self, op: Op) -> Placement:
        group = self.home[op.path]
        if op.path in self.unordered and group.axes:
            return self._ordered(op, self.unordered[op.path])
        if not group.axes or not op.inputs or op.anywhere:
            return self.given.get(op.path, Placement(group, origin="filled"))
        if op.path in self.given:
            return self.given[op.path]
        if op.again is not None:
            for tensor in op.again.outputs:
                self._settle_whole(tensor)
            return dataclasses.replace(self.ops[op.again.path].placement, origin="mirrored", runners_up=())
        if op.forward is not None:
            for tensor in op.forward.outputs:
                self._settle_whole(tensor)
            factors: dict[str, Axes] = {}
            sizes: dict[str, tuple[int, ...]] = {}
            for path in self.pieces.get(op.forward.path, (op.forward.path,)):
                # what reads no activation may run before its forward, which waits in a loop; axes are those of one group
                if path in self.ops and self.ops[path].placement.group.unordered == group.unordered:
                    factors.update(self.ops[path].placement.factors)
                    sizes.update(self.ops[path].placement.sizes)
            _, shards = self.shards.factor(op.forward, group)  # a gradient is scattered when it is done
            factors = {f: tuple(a for a in axes if a not in shards) for f, axes in factors.items()}
            return self._fill(op, self._possible(op, Placement(group, factors, sizes=sizes, origin="mirrored")))
        return self._fill(op, Placement(group, origin="filled"))

    def _ordered(self, op: Op, decided: Decided) -> Placement:
        """The cheapest device order for a grid that the policy placed in any order."""
        parts, group = decided.parts, self.home[op.path]
        ways = shared_out(dict(group.axes), group.names, tuple(parts.values()))
        choices = [Placement(group, dict(zip(parts, axes, strict=True)), sizes=decided.sizes) for axes in ways]
        if not choices:
            raise PlanError(
                f"'{op.path}' is split {dict(parts)} on any order of devices that the plan's other grids cut into "
                f"{[s for _, s in group.axes]}; give it a device order"
            )
        costs = sorted((self._cost(op, choice), i) for i, choice in enumerate(choices))
        return choices[costs[0][1]]

    def _possible(self, op: Op, placement: Placement) -> Placement:
        """``placement``, mirrored from a forward op, without the factors that its backward lacks or cannot split."""
        if not placement.factors:
            return placement
        factors = self.book.rule(op).factors
        legal = {
            f: axes
            for f, axes in placement.factors.items()
            if f in factors and factors[f].kind != "blocked" and not (f in placement.sizes and factors[f].even_only)
        }
        return dataclasses.replace(placement, factors=legal, sizes=_only(placement.sizes, legal))

    def _chunks(self, op: Op) -> Mapping[str, int]:
        """The chunks of ``op``: the policy's, or those of the forward op whose backward it is."""
        found = dict(self.chunks.get(op.path, {}))
        if op.forward is not None and op.path not in self.chunks:
            for path in self.pieces.get(op.forward.path, (op.forward.path,)):
                found.update(self.chunks.get(path, {}))
        if not found:
            return found
        rule = self.book.rule(op)
        overlapping = {name for name, _, _ in rule.halos}
        return {
            f: n
            for f, n in found.items()
            if f in rule.factors and rule.factors[f].kind != "blocked" and f not in overlapping
        }

    def _fitting_chunks(self, op: Op, placement: Placement) -> Mapping[str, int]:
        """The chunks of ``op`` that its parts divide into: a backward may be split in another way than its forward."""
        chunks = self._chunks(op)
        if not chunks:
            return chunks
        factors, parts = self.book.rule(op).factors, placement.parts
        return {
            f: n for f, n in chunks.items() if f not in placement.sizes and factors[f].size % (parts.get(f, 1) * n) == 0
        }

    def _fill(self, op: Op, chosen: Placement) -> Placement:
        """Give each axis that ``chosen`` leaves open its cheapest use. Equal ops whose inputs lie alike are filled once."""
        chunks = self._chunks(op)

        def price(placement: Placement) -> float:
            return self._cost(op, placement)

        at_hand = {t: held for t in op.inputs if (held := self._held(t, chosen.group))}
        lie = tuple((tuple(at_hand.get(t, ())), t in self.shards.stored) for t in op.inputs)
        goals = tuple((self._goal(t), self.shards.gradients.get(t)) for t in op.outputs)
        # Backward ops reduce late: a gradient may yet meet others, and their sum is reduced once. So do summands of a loop.
        late = op.kind == "backward" or op.path in self.summands
        key = (op.body, id(self.book.rule(op)), op.kind, late, chosen.key, tuple(chunks.items()), lie, goals)
        if key not in self.filled:
            found = Filling(op, self.book, at_hand, chunks, price, late).of(chosen)
            for scattered in self._scattered(op, found):
                found = scattered if price(scattered) < price(found) else found
            self.filled[key] = found
        return self.filled[key]

    def _scattered(self, op: Op, placement: Placement) -> Iterator[Placement]:
        """``placement``, and a gradient that ``op`` makes for a sharded parameter split as its readers get it.

        So that what it is the sum of (shares of the batch, and a penalty that all devices know) is scattered, not reduced.
        """
        for index, tensor in enumerate(op.outputs):
            cut = self.shards.gradients.get(tensor)
            names = self.book.rule(op).results[index][cut.dim] if cut is not None else ()
            if cut is None or not names:
                continue
            made = self._split_further(op, placement, names[0], cut.axes)
            shares = {axis: c for axis, c in made.shares.items() if axis not in cut.axes}
            yield dataclasses.replace(made, shares=shares)

    def _cost(self, op: Op, placement: Placement) -> float:
        """In the cost model's unit: the adapters of the inputs, and what bringing the results on will take."""
        laid = self._lay_out(op, placement)
        total = 0.0
        for index, (tensor, wanted) in enumerate(zip(op.inputs, laid.inputs, strict=True)):
            total += halo_cost(wanted, laid.edges_of(index), tensor.itemsize, self.cost)
            held = self._held(tensor, placement.group)
            if held:
                passing = op.kind == "update" and tensor in self.shards.stored  # whole while it is used, then no more
                held = held[:1] if passing else held
                total += min(find_adapter(h, wanted, tensor.itemsize, self.cost).cost for h in held)
        for tensor, left in zip(op.outputs, laid.outputs, strict=True):
            plain = without_values(left)
            sharded = tensor in self.shards.gradients
            goal = self.shards.gradient(tensor, plain) if sharded else self._goal(tensor) or plain
            within = goal != left and goal.mesh.unordered == left.mesh.unordered
            total += find_adapter(left, goal, tensor.itemsize, self.cost).cost if within else 0.0
        return total

    def _goal(self, tensor: PTensor) -> Layout | None:
        """Where several gradients of one tensor go when they are joined: a parameter's update follows the parameter, and
        the backward of what has made an activation runs as that did."""
        parameter = self.joined.get(tensor)
        if parameter is not None and parameter in self.at_hand:
            return self.at_hand[parameter][0]
        maker = self.graph.producer.get(tensor)
        if maker is None or maker.kind != "backward" or maker.forward is not None or maker.again is not None:
            return None
        readers = ((op.forward, i) for op in self.graph.consumers.get(tensor, ()) for i, t in op.cotangents if t == tensor)
        made = [self.ops[op.path].outputs[i] for op, i in readers if op is not None and op.path in self.ops]
        alike = (layout for layout in made if layout.shape == tensor.shape)  # a part of a gradient has none
        found = next(alike, None)
        return None if found is None else without_values(found)

    def _lay_out(self, op: Op, placement: Placement) -> OpLayouts:
        if placement.as_it_lies(op):
            inputs, outputs = self.layouts_at_hand(op)
            return OpLayouts(placement, inputs, outputs)
        if not placement.factors and not placement.shares:
            inputs, outputs = (tuple(self._whole(t, placement.group) for t in ts) for ts in (op.inputs, op.outputs))
            return OpLayouts(placement, inputs, outputs)
        rule = self.book.rule(op)
        key = (op.body, id(rule), placement.key)
        if key not in self.laid:
            self.laid[key] = self._layouts(op, rule, placement)
        return OpLayouts(placement, *self.laid[key])

    def _layouts(self, op: Op, rule: Rule, placement: Placement) -> Laid:
        """The layouts of an op's inputs and outputs, and the edges beyond its parts of the inputs."""
        passed = {axis: self.book.passes(op, combiners) for axis, combiners in placement.shares.items()}
        known = {axis: combiners for axis, combiners in passed.items() if combiners is not None}
        assert len(known) == len(passed), f"{op.path} does not pass the shares it was given"
        inputs = tuple(operand_layout(rule, placement, op, i) for i in range(len(op.inputs)))
        outputs = tuple(result_layout(rule, placement, op, i, known) for i in range(len(op.outputs)))
        edges = tuple(edges_of(rule, dict(placement.factors), i) for i in range(len(op.inputs)))
        return inputs, outputs, edges if any(edges) else ()

    # -- loops: a body is placed once, for all iterations

    def visit_loop(self, nest: Nest) -> None:
        """Place what stands in a loop, and the loop's carries and stacks."""
        start = self._state()
        arriving = [self._arriving(c.init, self._group(nest, c.out)) for c in nest.loop.carries]
        taken, left = self._pass(nest, arriving)
        if taken != left:
            self._restore(start)
            again, kept = self._pass(nest, left)
            if again != kept:  # each iteration brings its carries back
                self._restore(start)
                self._pass(nest, taken)
        self._leave(nest)

    def _group(self, nest: Nest, tensor: PTensor) -> DeviceMesh:
        """Where a loop leaves ``tensor``, or finds it: on its own group; of several where it is made, or else read."""
        if len(self.groups) == 1:
            return self.groups[0]
        own = self.in_loop[nest.loop.name]
        if len(own) == 1:
            return next(iter(own))
        readers = self.graph.consumers.get(tensor, ())
        op = self.graph.flow.maker(tensor) or next(iter(readers), None)
        return self.home[op.path if op is not None else next(iter(nest.ops())).path]

    def _pass(self, nest: Nest, carried: Sequence[Layout | None]) -> tuple[list[Layout], list[Layout]]:
        """Place the body for carries that come in these layouts; returns how it took them and how it leaves them."""
        loop = nest.loop
        for carry, layout in zip(loop.carries, carried, strict=True):
            if layout is not None and not carry.is_sum:
                self.at_hand[carry.inside] = [layout]
        for x in loop.xs:
            options = [layout.sliced() for layout in self._options(x.stack, self._group(nest, x.slice))]
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
            self._settle_whole(tensor)
        taken, left = [], []
        for carry in loop.carries:
            group = self._group(nest, carry.out)
            leaves = self._arriving(carry.out, group) or self._whole(carry.out, group)
            takes = self.at_hand.setdefault(carry.inside, [leaves])[0]
            taken.append(takes)
            left.append(takes if takes in self.at_hand.get(carry.out, ()) or carry.is_sum else leaves)
        return taken, left

    def _leave(self, nest: Nest) -> None:
        """Fix what the loop takes from outside, and say how its results lie."""
        loop = nest.loop
        for carry in loop.carries:
            layout = self.at_hand[carry.inside][0]
            self._want(carry.out, layout)
            self._want(carry.init, layout)
            self.at_hand[carry.final] = [self.shards.gradient(carry.final, layout)]
        for x in loop.xs:
            if x.slice in self.undecided:
                self.decide(x.slice, self.at_hand[x.slice][0])
            layout = self.at_hand.setdefault(x.slice, [self._whole(x.slice, self._group(nest, x.slice))])[0]
            if x.stack not in self.at_hand and x.stack in self.saved:
                self.at_hand[x.stack] = [self._as_saved(x.stack, layout.stacked(loop.length))]
            self._want(x.stack, layout.stacked(loop.length))
        for y in loop.ys:
            if not y.saved:
                if y.slice not in self.at_hand:
                    self._want(y.slice, self._whole(y.slice, self._group(nest, y.slice)))
                held = self.at_hand[y.slice]
                joined = held if loop.forward is not None else [h for h in held if not h.values] or held
                layout = joined[0].stacked(loop.length)
                scattered = self.shards.gradient(y.stack, layout)
                self.at_hand[y.stack] = [scattered]
                layers_cut = any(scattered.by_dim[0])  # whole layers lie apart: no iteration can scatter its own
                self.left[y.stack] = layout if layers_cut else scattered

    def _as_saved(self, stack: PTensor, wanted: Layout) -> Layout:
        """How a loop leaves a stack that another wants to read so: thus, or whole where it lies on another group."""
        group = self.of_loop.get(self.graph.homes[self.saved[stack][0]], wanted.mesh)
        here = group.unordered == wanted.mesh.unordered
        return wanted if here else next(iter(self._options(stack, group)), self._whole(stack, group))

    def loop_layouts(self) -> dict[str, LoopLayouts]:
        """The layouts of all loops, once everything is placed."""
        loops = self.graph.loops
        found = {}
        for name in sorted(loops, key=lambda name: len(chain_of(name, loops))):
            loop = loops[name]
            ys = []
            for y in loop.ys:
                layout = (
                    self.left.get(y.stack)
                    or self.at_hand.get(y.stack, [self._whole(y.stack, self.of_loop.get(name, self.groups[0]))])[0]
                )
                layout = layout.sliced()
                self.at_hand.setdefault(y.slice, [layout])  # a stack that another loop saves
                ys.append(layout)
            carries = tuple(self.at_hand[c.inside][0] for c in loop.carries)
            found[name] = LoopLayouts(carries, tuple(self.at_hand[x.slice][0] for x in loop.xs), tuple(ys))
        return found

    def decide(self, tensor: PTensor, wanted: Layout) -> None:
        """A slice that may lie in several ways lies as its first reader wants it."""
        self.undecided.discard(tensor)
        options = self.at_hand[tensor]
        if wanted in options:
            best = wanted
        else:
            costs = [find_adapter(o, wanted, tensor.itemsize, self.cost).cost for o in options]
            best = options[costs.index(min(costs))]
        self.at_hand[tensor] = [best]

    def layouts_at_hand(self, op: Op) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts of an op that is right for any part."""
        if op.anywhere == "zeros":
            (made,) = op.outputs
            return (), (self.wanted[made],)
        if op.anywhere == "sum":
            group = self.home[op.path]
            held = self._options(op.inputs[1], group)  # (none, where its maker waits for a reader)
            layout = held[0] if held else self._whole(op.inputs[1], group)
            if any(combiner != "add" for _, combiner in layout.values):
                layout = without_values(layout)
            return (layout, layout), (layout,)
        layouts = tuple(self._fenced(t, self.home[op.path]) for t in op.inputs)
        return layouts, layouts

    def _fenced(self, tensor: PTensor, group: DeviceMesh) -> Layout:
        held = self._options(tensor, group) or [self._whole(tensor, group)]
        if tensor.role == "gradient":  # its shares may be passed on
            return held[0]
        return next((h for h in held if not h.values), held[0])

    def _arriving(self, tensor: PTensor, group: DeviceMesh) -> Layout | None:
        """The layout in which a carry comes, value shares joined; None where it lies nowhere yet."""
        held = self._options(tensor, group)
        return next((h for h in held if not h.values), without_values(held[0])) if held else None

    def _want(self, tensor: PTensor, layout: Layout) -> None:
        self._settle_waiting(tensor, layout)
        self._read(tensor, layout)

    def _options(self, tensor: PTensor, group: DeviceMesh) -> list[Layout]:
        """The layouts in which a tensor is at hand on ``group``, or in which it could have been saved."""
        if tensor in self.at_hand:
            return self._held(tensor, group)
        saved = self.saved.get(tensor)
        if saved is None:
            return []
        source, length = saved
        options = self._options(source, group)
        if source in self.shards.stored:  # what is made of shards is made whole again
            options = options[:1]
        return [layout.stacked(length) for layout in options]

    def _state(self) -> tuple[Any, ...]:
        return dict(self.ops), dict(self.at_hand), dict(self.inputs), dict(self.waiting), set(self.undecided)

    def _restore(self, state: tuple[Any, ...]) -> None:
        ops, at_hand, inputs, waiting, undecided = state
        self.ops, self.at_hand, self.inputs = dict(ops), dict(at_hand), dict(inputs)
        self.waiting, self.undecided = dict(waiting), set(undecided)


def _only(sizes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Axes]) -> dict[str, tuple[int, ...]]:
    return {f: own for f, own in sizes.items() if f in factors}
