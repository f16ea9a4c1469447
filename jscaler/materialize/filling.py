"""Fill in what a policy left open of an op: axis by axis, the use that makes its adapters cheapest.

how its inputs lie ──► candidates per axis ──► prices ──► the cheapest, and the runner-up
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jscaler.ir import Op, Rule
from jscaler.ir.rule import TensorFactors
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes
from jscaler.materialize.placement import Combiners, Placement, RunnerUp
from jscaler.rules.rule_book import RuleBook


@dataclass(frozen=True)
class Filling:
    """One op, and what its placement depends on.

    Attributes:
        rule: the factors of the op.
        operands: the layout in which each input lies on the op's group; None where it lies elsewhere, or nowhere.
        chunks: factor -> the number of its parts that run one after another.
        price: of a placement, its adapters included.
        late: whether among equals value shares are passed on before they are joined.
    """

    op: Op
    rule: Rule
    book: RuleBook
    operands: Sequence[Layout | None]
    chunks: Mapping[str, int]
    price: Callable[[Placement], float]
    late: bool = False

    def of(self, chosen: Placement) -> Placement:
        """Give each axis that ``chosen`` leaves open its cheapest use; among equals the earlier candidate."""
        used = {a for axes in chosen.factors.values() for a in axes}
        replicated = [set(layout.free) for layout, _ in self._lying]
        open_axes = [a for a in chosen.group.names if a not in used and any(a not in free for free in replicated)]
        if not open_axes:
            return chosen
        # Axis by axis may stick: two gradients in shares of both axes are cheap to join before either is reduced.
        starts = [chosen, *self._all_shared(chosen, open_axes), *self._as_cut(chosen, open_axes)]
        ends = sorted((self._axis_by_axis(start, open_axes) for start in starts), key=lambda end: end[0])
        cost, best = ends[0]
        others = tuple(
            RunnerUp(other.describe(), "", price - cost)
            for price, other in ends[1:]
            if (other.factors, other.shares, other.sizes) != (best.factors, best.shares, best.sizes)
        )
        return dataclasses.replace(best, runners_up=(*best.runners_up, *others[:1]))

    @cached_property
    def _lying(self) -> list[tuple[Layout, TensorFactors]]:
        """The layouts of the inputs that lie somewhere, each with the factors of its dims."""
        pairs = zip(self.operands, self.rule.operands, strict=True)
        return [(layout, dims) for layout, dims in pairs if layout is not None]

    def _axis_by_axis(self, chosen: Placement, open_axes: Sequence[str]) -> tuple[float, Placement]:
        cost = 0.0
        runners_up: list[RunnerUp] = []
        for axis in open_axes:
            if axis in chosen.shares or any(axis in axes for axes in chosen.factors.values()):
                cost = self.price(chosen)  # decided together with another axis
                continue
            costs = [(self.price(c), i, c) for i, c in enumerate(self._candidates(chosen, axis))]
            costs.sort(key=lambda entry: entry[:2])
            cost, _, chosen = costs[0]
            if len(costs) > 1:
                runners_up.append(RunnerUp(costs[1][2].describe(), axis, costs[1][0] - cost))
        return cost, dataclasses.replace(chosen, runners_up=tuple(runners_up))

    def _all_shared(self, chosen: Placement, open_axes: Sequence[str]) -> list[Placement]:
        """Value shares along several axes, passed on along all of them."""
        along = {a: self._shares_along(a) for a in open_axes}
        shares = {axis: c for axis, c in along.items() if any(c) and self.book.passes(self.op, c) is not None}
        return [dataclasses.replace(chosen, shares={**chosen.shares, **shares})] if len(shares) > 1 else []

    def _as_cut(self, chosen: Placement, open_axes: Sequence[str]) -> list[Placement]:
        """A factor split by several axes at once, in the order in which they cut an input: a shard of a part."""
        table: dict[tuple[str, Axes], Placement] = {}
        for layout, dims in self._lying:
            for sizes, names, cuts in zip(layout.subdims, dims, layout.by_dim, strict=True):
                several = len(sizes) == 1 and names and len(cuts[0]) > 1 and set(cuts[0]) <= set(open_axes)
                if several and names[0] not in chosen.factors and layout.even and self._divides(chosen, names[0], cuts[0]):
                    factors = {**chosen.factors, names[0]: cuts[0]}
                    table[names[0], cuts[0]] = dataclasses.replace(chosen, factors=factors)
        return list(table.values())

    def _candidates(self, chosen: Placement, axis: str) -> list[Placement]:
        candidates = [chosen]
        for name, factor in self.rule.factors.items():
            if factor.kind == "blocked" or name in chosen.sizes:  # one split has all sizes
                continue
            axes = (*chosen.factors.get(name, ()), axis)
            if self._lies_split(name, axis) and self._divides(chosen, name, axes):
                candidates.append(dataclasses.replace(chosen, factors={**chosen.factors, name: axes}))
            for axes, sizes in () if factor.even_only or name in self.chunks else self._lies_uneven(name, axis):
                used = {a for others in chosen.factors.values() for a in others} | set(chosen.shares)
                if name not in chosen.factors and not used & set(axes):
                    both = {"factors": {**chosen.factors, name: axes}, "sizes": {**chosen.sizes, name: sizes}}
                    candidates.append(dataclasses.replace(chosen, **both))
        combiners = self._shares_along(axis)
        if any(combiners) and self.book.passes(self.op, combiners) is not None:
            share = dataclasses.replace(chosen, shares={**chosen.shares, axis: combiners})
            candidates.insert(0 if self.late else len(candidates), share)
        return candidates

    def _divides(self, chosen: Placement, name: str, axes: Axes) -> bool:
        return divides(self.rule, name, chosen.group.size(axes) * self.chunks.get(name, 1))

    def _lies_split(self, factor: str, axis: str) -> bool:
        """Whether some input is cut by ``axis`` on a dim that carries ``factor``."""
        pairs = (pair for layout, dims in self._lying for pair in zip(dims, layout.by_dim, strict=True))
        return any(factor in names and any(axis in cut for cut in cuts) for names, cuts in pairs)

    def _lies_uneven(self, factor: str, axis: str) -> list[tuple[Axes, tuple[int, ...]]]:
        """How inputs are cut into unequal parts along ``factor`` by axes with ``axis`` among them."""
        splits: dict[tuple[Axes, tuple[int, ...]], None] = {}
        for layout, dims in self._lying:
            for dim, names in enumerate(dims):
                cut = layout.uneven_rows(dim) if names[:1] == (factor,) else None
                minor = math.prod(self.rule.factors[f].size for f in names[1:])
                if cut is not None and axis in cut[0] and all(rows % minor == 0 and rows for rows in cut[1]):
                    splits[cut[0], tuple(rows // minor for rows in cut[1])] = None
        return list(splits)

    def _shares_along(self, axis: str) -> Combiners:
        """Per input, the combiner of the value shares in which it lies along ``axis``."""
        return tuple(dict(layout.values).get(axis) if layout is not None else None for layout in self.operands)


def divides(rule: Rule, name: str, parts: int = 1) -> bool:
    """Whether ``rule`` has a factor ``name`` that can be split into so many equal parts."""
    factor = rule.factors.get(name)
    return factor is not None and factor.kind != "blocked" and factor.size % parts == 0
