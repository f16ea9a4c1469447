"""Fill in what a policy left open of an op: axis by axis, the use that makes its adapters cheapest.

how its inputs lie ──► candidates per axis ──► prices ──► the cheapest, and the runner-up
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jscaler.ir import Graph, Op, PTensor, Rule
from jscaler.ir.mask import Combiner
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes
from jscaler.materialize.placement import Combiners, Placement, RunnerUp
from jscaler.rules.rule_book import RuleBook


@dataclass(frozen=True)
class Filling:
    """One op, and what its placement depends on.

    Attributes:
        at_hand: the layouts in which its inputs lie on its group.
        chunks: of the op's factors, the number of parts that run one after another.
        price: of a placement, its adapters included.
        late: whether among equals value shares are passed on before they are joined.
    """

    op: Op
    book: RuleBook
    at_hand: Mapping[PTensor, Sequence[Layout]]
    chunks: Mapping[str, int]
    price: Callable[[Placement], float]
    late: bool = False

    def of(self, chosen: Placement) -> Placement:
        """Give each axis that ``chosen`` leaves open its cheapest use; among equals the earlier candidate."""
        op = self.op
        used = {a for axes in chosen.factors.values() for a in axes}
        touching = {a for t in op.inputs if t in self.at_hand for a in _axes_of(self.at_hand[t][0])}
        open_axes = [a for a in chosen.group.names if a in touching - used]
        if not open_axes:
            return chosen
        rule = self.book.rule(op)
        # Axis by axis may stick: two gradients in shares of both axes are cheap to join before either is reduced.
        starts = [chosen, *self._all_shared(chosen, open_axes), *self._as_cut(rule, chosen, open_axes)]
        found = sorted((self._axis_by_axis(rule, start, open_axes) for start in starts), key=lambda entry: entry[0])
        cost, best = found[0]
        others = tuple(
            RunnerUp(other.describe(), "", price - cost)
            for price, other in found[1:]
            if (other.factors, other.shares, other.sizes) != (best.factors, best.shares, best.sizes)
        )
        return dataclasses.replace(best, runners_up=(*best.runners_up, *others[:1]))

    def _axis_by_axis(self, rule: Rule, chosen: Placement, open_axes: Sequence[str]) -> tuple[float, Placement]:
        cost = 0.0
        runners_up: list[RunnerUp] = []
        for axis in open_axes:
            if axis in chosen.shares or any(axis in axes for axes in chosen.factors.values()):
                cost = self.price(chosen)  # decided together with another axis
                continue
            costs = [(self.price(c), i, c) for i, c in enumerate(self._candidates(rule, chosen, axis))]
            costs.sort(key=lambda entry: entry[:2])
            cost, _, chosen = costs[0]
            if len(costs) > 1:
                runners_up.append(RunnerUp(costs[1][2].describe(), axis, costs[1][0] - cost))
        return cost, dataclasses.replace(chosen, runners_up=tuple(runners_up))

    def _all_shared(self, chosen: Placement, open_axes: Sequence[str]) -> list[Placement]:
        """Value shares along several axes, passed on along all of them."""
        along: dict[str, Combiners] = {a: tuple(self._share_along(t, a) for t in self.op.inputs) for a in open_axes}
        shares = {axis: c for axis, c in along.items() if any(c) and self.book.passes(self.op, c) is not None}
        return [dataclasses.replace(chosen, shares={**chosen.shares, **shares})] if len(shares) > 1 else []

    def _as_cut(self, rule: Rule, chosen: Placement, open_axes: Sequence[str]) -> list[Placement]:
        """A factor split by several axes at once, in the order in which they cut an input: a shard of a part."""
        found: dict[tuple[str, Axes], Placement] = {}
        for tensor, dims in zip(self.op.inputs, rule.operands, strict=True):
            for layout in self.at_hand.get(tensor, [])[:1]:
                for sizes, names, cuts in zip(layout.subdims, dims, layout.by_dim, strict=True):
                    several = len(sizes) == 1 and names and len(cuts[0]) > 1 and set(cuts[0]) <= set(open_axes)
                    factor = rule.factors[names[0]] if several else None
                    if factor is None or factor.kind == "blocked" or factor.name in chosen.factors or not layout.even:
                        continue
                    if factor.size % (chosen.group.size(cuts[0]) * self.chunks.get(factor.name, 1)) == 0:
                        made = dataclasses.replace(chosen, factors={**chosen.factors, factor.name: cuts[0]})
                        found[factor.name, cuts[0]] = made
        return list(found.values())

    def _candidates(self, rule: Rule, chosen: Placement, axis: str) -> list[Placement]:
        found = [chosen]
        op, chunks = self.op, self.chunks
        for name, factor in rule.factors.items():
            if factor.kind == "blocked" or name in chosen.sizes:  # one split has all sizes
                continue
            if self._lies_split(rule, name, axis):
                axes = (*chosen.factors.get(name, ()), axis)
                if factor.size % (chosen.group.size(axes) * chunks.get(name, 1)) == 0:
                    found.append(dataclasses.replace(chosen, factors={**chosen.factors, name: axes}))
            for axes, sizes in () if factor.even_only or name in chunks else self._lies_uneven(rule, name, axis):
                used = {a for others in chosen.factors.values() for a in others} | set(chosen.shares)
                if name not in chosen.factors and not used & set(axes):
                    both = {"factors": {**chosen.factors, name: axes}, "sizes": {**chosen.sizes, name: sizes}}
                    found.append(dataclasses.replace(chosen, **both))
        combiners: Combiners = tuple(self._share_along(t, axis) for t in op.inputs)
        if any(combiners) and self.book.passes(op, combiners) is not None:
            share = dataclasses.replace(chosen, shares={**chosen.shares, axis: combiners})
            found.insert(0 if self.late else len(found), share)
        return found

    def _lies_split(self, rule: Rule, factor: str, axis: str) -> bool:
        """Whether some input is cut by ``axis`` on a dim that carries ``factor``."""
        for tensor, dims in zip(self.op.inputs, rule.operands, strict=True):
            for layout in self.at_hand.get(tensor, [])[:1]:
                pairs = zip(dims, layout.by_dim, strict=True)
                if any(factor in names and any(axis in cut for cut in cuts) for names, cuts in pairs):
                    return True
        return False

    def _lies_uneven(self, rule: Rule, factor: str, axis: str) -> list[tuple[Axes, tuple[int, ...]]]:
        """How inputs are cut into unequal parts along ``factor`` by axes with ``axis`` among them."""
        found: dict[tuple[Axes, tuple[int, ...]], None] = {}
        for tensor, dims in zip(self.op.inputs, rule.operands, strict=True):
            for layout in self.at_hand.get(tensor, [])[:1]:
                for dim, names in enumerate(dims):
                    cut = layout.uneven_rows(dim) if names[:1] == (factor,) else None
                    minor = math.prod(rule.factors[f].size for f in names[1:])
                    if cut is not None and axis in cut[0] and all(rows % minor == 0 and rows for rows in cut[1]):
                        found[cut[0], tuple(rows // minor for rows in cut[1])] = None
        return list(found)

    def _share_along(self, tensor: PTensor, axis: str) -> Combiner | None:
        layouts = self.at_hand.get(tensor)
        return dict(layouts[0].values).get(axis) if layouts else None


def _axes_of(layout: Layout) -> set[str]:
    """The axes along which the devices differ."""
    return {a for axes in layout.cuts for a in axes} | {a for a, _ in layout.values}


def summands(graph: Graph) -> set[str]:
    """The ops whose results only go into what a loop sums up."""
    found: set[str] = set()
    for op in reversed(graph.ops):
        readers = [r for t in op.outputs for r in graph.consumers.get(t, ())]
        if readers and all(r.path in found or r.anywhere == "sum" for r in readers):
            found.add(op.path)
    return found
