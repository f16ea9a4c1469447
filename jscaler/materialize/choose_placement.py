"""Choose the placement of one op, given how tensors lie: the policy's, its forward's, or the cheapest.

What the policy placed stays. A backward op mirrors its forward through their common factors. Every other op takes, axis by
axis, the use that makes its adapters cheapest. An op that waits is placed as its reader wants its result.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from jscaler.clusters import CostModel
from jscaler.errors import PlanError
from jscaler.ir import Graph, Op, PTensor, Rule
from jscaler.materialize.adapter import find_adapter
from jscaler.materialize.completed import OpLayouts
from jscaler.materialize.edges import Edge, edges_of, halo_cost
from jscaler.materialize.filling import Filling, divides
from jscaler.materialize.groups import OnGroups
from jscaler.materialize.layout import Layout, without_values
from jscaler.materialize.layouts_at_hand import LayoutsAtHand
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.materialize.placement import (
    Placement,
    chunked_ops,
    operand_layout,
    placed_grids,
    placement_of,
    result_layout,
)
from jscaler.materialize.relabel import shared_out
from jscaler.materialize.shards import ShardCut
from jscaler.primitives import Plan
from jscaler.rules.rule_book import RuleBook


class PlacementChoice:
    """The choice of a placement for each op, given the layouts at hand, which it leaves as they are.

    Attributes:
        open: paths of the ops that completion may split: they run on several devices, and the policy does not place them.
    """

    def __init__(self, placed: OnGroups, plan: Plan, book: RuleBook, cost: CostModel, at_hand: LayoutsAtHand):
        graph, grids, on_mesh = placed.graph, placed_grids(placed.decided), placed.groups.grids
        self.graph, self.homes, self.pieces, self.decided = graph, placed.homes, placed.pieces, placed.decided
        self.book, self.cost, self.at_hand, self.shards = book, cost, at_hand, at_hand.shards
        self.policy = {p: placement_of(d, *on_mesh[grids[p]]) for p, d in placed.decided.items() if not d.any_order}
        unplaced = (op for op in graph.ops if op.path not in placed.decided and op.inputs and not op.anywhere)
        self.open = frozenset(op.path for op in unplaced if self.homes[op.path].group.axes)
        self.chunks = _chunks_of_ops(placed, chunked_ops(plan), book)
        pairs = [pair for call in graph.calls for pair in zip(call.gradients, call.wrt, strict=True)]
        self.joined = {g: p for g, p in pairs if g in graph.producer and graph.producer[g].forward is None}
        self.summands = _summands(graph)
        # Equal ops share results, keyed by all that these depend on; a placement's key and a layout have their group.
        self._layouts: dict[Any, tuple[tuple[Layout, ...], tuple[Layout, ...], tuple[tuple[Edge, ...], ...]]] = {}
        self._filled: dict[Any, Placement] = {}

    def waits(self, op: Op) -> bool:
        """Whether nothing that ``op`` reads lies anywhere yet, so that its first reader may choose."""
        if op.anywhere == "zeros":
            return True
        large = [t for t in op.inputs if t.shape]
        if op.path not in self.open or not op.outputs or not large or op.forward is not None or op.again is not None:
            return False
        group = self.homes[op.path].group
        return all(t in self.shards.whole or not self.at_hand.on_group(t, group) for t in large)

    def placement(self, op: Op) -> Placement:
        """The placement of ``op`` where its inputs lie as they do; the ops that it mirrors are placed.

        Raises:
            PlanError: no order of devices gives its grid the parts that the policy wants.
        """
        group = self.homes[op.path].group
        if op.path in self.open and op.again is not None:
            return dataclasses.replace(self.at_hand.ops[op.again.path].placement, origin="mirrored", runners_up=())
        if op.path in self.open:
            start = self._mirrored(op, op.forward, group) if op.forward is not None else Placement(group, origin="filled")
            return self._fill(op, start)
        if op.path in self.decided and self.decided[op.path].any_order and group.axes:
            return self._in_cheapest_order(op, group)
        return self.policy.get(op.path, Placement(group, origin="filled"))

    def for_reader(self, op: Op, tensor: PTensor, wanted: Layout) -> OpLayouts:
        """The layouts of a waiting ``op`` whose first reader takes its output ``tensor`` as ``wanted``.

        The op makes that layout if a placement does, and else a copy. If all its operands are shards, it makes shards.
        """
        group = self.homes[op.path].group
        near, copy = wanted.mesh.unordered == group.unordered, Placement(group, origin="filled")
        if op.anywhere == "zeros":
            layout = wanted if near and wanted.memory == "device" else self.at_hand.whole(tensor, group)
            return OpLayouts(copy, (), (layout,))
        rule, chunks = self.book.rule(op), self.chunks.get(op.path, {})
        placement = _making(rule, op.outputs.index(tensor), wanted, chunks) or copy if near else copy
        if any(t in self.at_hand.by_tensor for t in op.inputs if t.shape):  # the norm of a parameter is split as that lies
            placement = self._fill(op, placement)
        name, axes = self.shards.factor(op, placement.group)
        return self.layouts(op, _split_further(rule, placement, chunks, name, axes))

    def price(self, op: Op, placement: Placement) -> float:
        """The cost of ``op`` under ``placement``, a number of the cost model's unit.

        It counts the adapters and halos of the inputs, from the layouts at hand, and the adapters that bring its results
        to where they are joined. An input that lies nowhere is free.
        """
        laid = self.layouts(op, placement)
        total = 0.0
        for index, (tensor, layout) in enumerate(zip(op.inputs, laid.inputs, strict=True)):
            total += halo_cost(layout, laid.edges_of(index), tensor.itemsize, self.cost)
            options = self.at_hand.on_group(tensor, placement.group)
            if op.kind == "update" and tensor in self.shards.stored:  # whole while it is used, then no more
                options = options[:1]
            total += min((find_adapter(x, layout, tensor.itemsize, self.cost).cost for x in options), default=0.0)
        for tensor, layout in zip(op.outputs, laid.outputs, strict=True):
            plain = without_values(layout)
            goal = None if tensor in self.shards.gradients else self._goal(tensor)
            goal = goal or self.shards.gradient(tensor, plain)
            if goal != layout and goal.mesh.unordered == layout.mesh.unordered:
                total += find_adapter(layout, goal, tensor.itemsize, self.cost).cost
        return total

    def layouts(self, op: Op, placement: Placement) -> OpLayouts:
        """The layouts that ``op`` reads and leaves under ``placement``, with the chunks into which its parts divide."""
        chunks, parts = self.chunks.get(op.path, {}), placement.parts
        # A backward op may be split in another way than its forward op, whose chunks it has.
        fitting = (f for f, n in chunks.items() if divides(self.book.rule(op), f, parts.get(f, 1) * n))
        fit = {f: chunks[f] for f in fitting if f not in placement.sizes}
        if fit != placement.chunks:
            placement = dataclasses.replace(placement, chunks=fit)
        if placement.as_it_lies(op):
            return OpLayouts(placement, *self.at_hand.as_it_lies(op))
        if not placement.factors and not placement.shares:
            inputs, outputs = (
                tuple(self.at_hand.whole(t, placement.group) for t in tensors) for tensors in (op.inputs, op.outputs)
            )
            return OpLayouts(placement, inputs, outputs)
        rule = self.book.rule(op)
        key = (op.body, rule.key, placement.key)
        if key not in self._layouts:
            passed = {axis: self.book.passes(op, combiners) for axis, combiners in placement.shares.items()}
            shares = {axis: combiners for axis, combiners in passed.items() if combiners is not None}
            assert len(shares) == len(passed), f"{op.path} does not pass the shares it was given"
            inputs = tuple(operand_layout(rule, placement, op, i) for i in range(len(op.inputs)))
            outputs = tuple(result_layout(rule, placement, op, i, shares) for i in range(len(op.outputs)))
            edges = tuple(edges_of(rule, dict(placement.factors), i) for i in range(len(op.inputs)))
            self._layouts[key] = inputs, outputs, edges if any(edges) else ()
        return OpLayouts(placement, *self._layouts[key])

    def _in_cheapest_order(self, op: Op, group: DeviceMesh) -> Placement:
        """The placement of an op whose grid the policy leaves in any order."""
        decided = self.decided[op.path]
        parts = decided.parts
        deals = shared_out(dict(group.axes), group.names, tuple(parts.values()))
        choices = [Placement(group, dict(zip(parts, axes, strict=True)), sizes=decided.sizes) for axes in deals]
        if not choices:
            raise PlanError(
                f"'{op.path}' is split {dict(parts)} on any order of devices that the plan's other grids cut into "
                f"{[s for _, s in group.axes]}; give it a device order"
            )
        return min(choices, key=lambda choice: self.price(op, choice))

    def _mirrored(self, op: Op, forward: Op, group: DeviceMesh) -> Placement:
        """The placement of ``forward``, without the factors that its backward ``op`` lacks or cannot split."""
        axes: dict[str, Axes] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        for path in self.pieces.get(forward.path, (forward.path,)):
            laid = self.at_hand.ops.get(path)  # none, if it waits in a loop, and its backward reads no activation
            if laid is not None and laid.placement.group.unordered == group.unordered:  # axes are those of one group
                axes.update(laid.placement.factors)
                sizes.update(laid.placement.sizes)
        _, shards = self.shards.factor(forward, group)  # a gradient is scattered when it is done
        rule = self.book.rule(op)
        legal = [f for f in axes if divides(rule, f) and not (f in sizes and rule.factors[f].even_only)]
        factors = {f: tuple(a for a in axes[f] if a not in shards) for f in legal}
        return Placement(group, factors, sizes={f: sizes[f] for f in sizes if f in factors}, origin="mirrored")

    def _fill(self, op: Op, chosen: Placement) -> Placement:
        """Give each axis that ``chosen`` leaves open its cheapest use; equal ops whose inputs lie alike have the same."""
        rule, chunks = self.book.rule(op), self.chunks.get(op.path, {})
        options = [self.at_hand.on_group(t, chosen.group) for t in op.inputs]
        lie = tuple((layouts, t in self.shards.stored) for layouts, t in zip(options, op.inputs, strict=True))
        goals = tuple((self._goal(t), self.shards.gradients.get(t)) for t in op.outputs)
        # Backward ops reduce late: a gradient may yet meet others, and their sum is reduced once. So do summands of a loop.
        late = op.kind == "backward" or op.path in self.summands
        key = (op.body, rule.key, op.kind, late, chosen.key, tuple(chunks.items()), lie, goals)
        if key not in self._filled:
            price = functools.partial(self.price, op)
            first = [next(iter(layouts), None) for layouts in options]
            filled = Filling(op, rule, self.book, first, chunks, price, late).of(chosen)
            scattered = [*_scattered(op, rule, filled, chunks, self.shards.gradients)]
            self._filled[key] = min([filled, *scattered], key=price) if scattered else filled
        return self._filled[key]

    def _goal(self, tensor: PTensor) -> Layout | None:
        """The layout in which several gradients meet in their sum ``tensor``; None for all other tensors.

        The sum for a parameter lies as the parameter does, and the sum for an activation as its maker left it.
        """
        parameter = self.joined.get(tensor)
        if parameter is not None and parameter in self.at_hand.by_tensor:
            return self.at_hand.by_tensor[parameter][0]
        maker = self.graph.producer.get(tensor)
        if maker is None or maker.kind != "backward" or maker.forward is not None or maker.again is not None:
            return None
        readers = ((op.forward, i) for op in self.graph.consumers.get(tensor, ()) for i, t in op.cotangents if t == tensor)
        ops = self.at_hand.ops
        outputs = (ops[op.path].outputs[i] for op, i in readers if op is not None and op.path in ops)
        # A part of a gradient has another shape, and no goal.
        return next((without_values(layout) for layout in outputs if layout.shape == tensor.shape), None)


def _chunks_of_ops(placed: OnGroups, chunked: Mapping[str, Mapping[str, int]], book: RuleBook) -> dict[str, dict[str, int]]:
    """Op path -> the chunks of its factors: the policy's, or for a backward op those of its forward op."""
    table: dict[str, dict[str, int]] = {}
    for op in placed.graph.ops:
        paths: tuple[str, ...] = (op.path,)
        if op.forward is not None and op.path not in chunked:
            paths = placed.pieces.get(op.forward.path, (op.forward.path,))
        chunks = {factor: n for path in paths for factor, n in chunked.get(path, {}).items()}
        if chunks:
            rule = book.rule(op)
            overlapping = {name for name, _, _ in rule.halos}
            table[op.path] = {f: n for f, n in chunks.items() if divides(rule, f) and f not in overlapping}
    return table


def _summands(graph: Graph) -> set[str]:
    """The ops whose results only go into what a loop sums up."""
    paths: set[str] = set()
    for op in reversed(graph.ops):
        readers = [r for t in op.outputs for r in graph.consumers.get(t, ())]
        if readers and all(r.path in paths or r.anywhere == "sum" for r in readers):
            paths.add(op.path)
    return paths


def _making(rule: Rule, index: int, wanted: Layout, chunks: Mapping[str, int]) -> Placement | None:
    """The placement that makes result ``index`` in layout ``wanted``; a copy, if none does.

    None stands for a layout that no placement is sought for: value shares, no cuts, or unequal parts.
    """
    if wanted.values or not any(wanted.cuts) or not wanted.even:
        return None
    copy = Placement(wanted.mesh, origin="filled")
    factors: dict[str, Axes] = {}
    for names, sizes, cuts in zip(rule.results[index], wanted.subdims, wanted.by_dim, strict=True):
        if not any(cuts):
            continue
        if len(sizes) == 1:  # a cut of a whole dim is one of its major factor
            names = names[:1]
        if len(names) != len(cuts):
            return copy
        factors.update({name: axes for name, axes in zip(names, cuts, strict=True) if axes})
    legal = all(divides(rule, f, wanted.mesh.size(axes) * chunks.get(f, 1)) for f, axes in factors.items())
    return dataclasses.replace(copy, factors=factors) if legal else copy


def _split_further(rule: Rule, placement: Placement, chunks: Mapping[str, int], name: str, axes: Axes) -> Placement:
    """``placement`` with factor ``name`` split along those of ``axes`` that split nothing, if it can be."""
    used = {a for axes_of_factor in placement.factors.values() for a in axes_of_factor}
    open_axes = tuple(a for a in axes if a not in used)
    both = (*placement.factors.get(name, ()), *open_axes)
    if not open_axes or not divides(rule, name, placement.group.size(both) * chunks.get(name, 1)):
        return placement
    return dataclasses.replace(placement, factors={**placement.factors, name: both})


def _scattered(
    op: Op, rule: Rule, placement: Placement, chunks: Mapping[str, int], gradients: Mapping[PTensor, ShardCut]
) -> Iterator[Placement]:
    """``placement`` split further, for each gradient of a sharded parameter, so that the gradient is made in its shards.

    Then the sum of the batch's shares and a penalty on all devices is scattered, not reduced.
    """
    for tensor, dims in zip(op.outputs, rule.results, strict=True):
        cut = gradients.get(tensor)
        if cut is not None and dims[cut.dim]:
            axes = cut.on(placement.group)
            split = _split_further(rule, placement, chunks, dims[cut.dim][0], axes)
            yield dataclasses.replace(split, shares={a: c for a, c in split.shares.items() if a not in axes})
