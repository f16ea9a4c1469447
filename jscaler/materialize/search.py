"""The cheapest path between two layouts on the same devices.

A path walks through the source's mesh, takes at most one permute, and walks on through the target's mesh (mostly the
same one). More permutes are never needed: two in a row are one, and what lies between could be done before or after.
A* over axis assignments: a state's estimate is the cost of the bytes that the devices need and do not hold, which no
path can avoid, so that the first arrival is the optimum (``tests/materialize/oracle.py`` holds it against brute force).
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from jscaler.clusters import BYTES, CostModel, Line
from jscaler.materialize.bounds import HeldPart, sends_to_join
from jscaler.materialize.canonical import in_primes, on_common_mesh
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.materialize.notation import OpenLayout
from jscaler.materialize.relabel import MOST_AXES, relabelings
from jscaler.materialize.transitions import State, Transition, advance, line_of, price_of, steps_from

MOST_STATES = 400  # expanded in proof of the optimum; then the search hurries, and says how far off it may be
GREED = 2.0  # the weight of the estimate grows by this factor with every further MOST_STATES
MOST_PRIME_AXES = 5  # meshes without a common refinement are refined to primes while that stays small


@dataclass(frozen=True)
class Path:
    """A way from one layout to another.

    Attributes:
        start: the source, on the mesh that the search used.
        steps: the transitions.
        cost: in the cost model's unit.
        floor: what no path over these mesh axes can cost less than; ``cost`` itself where the optimum is proven.
        explored: states that the search expanded.
    """

    start: Layout
    steps: tuple[Transition, ...]
    cost: float
    floor: float
    explored: int

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts on the way: ``start``, and what follows each step."""
        return tuple(itertools.accumulate(self.steps, lambda here, step: step.apply(here), initial=self.start))


@lru_cache(maxsize=65536)
def cheapest_path(source: Layout, target: Layout | OpenLayout, itemsize: int, cost: CostModel = BYTES) -> Path | None:
    """The cheapest path from ``source`` to ``target``: layouts of the same sub-dims whose cuts divide them.

    An ``OpenLayout`` as target takes the cheapest device order that the source's axes lead to. None where the value
    shares' nesting fits no mesh.
    """
    return _best(source, target, itemsize, cost, frozenset())


def runners_up(source: Layout, target: Layout | OpenLayout, itemsize: int, cost: CostModel, count: int) -> list[Path]:
    """The next cheapest paths that leave the best one somewhere, cheapest first."""
    best = cheapest_path(source, target, itemsize, cost)
    if best is None:
        return []
    banned = [(here, step) for here, step in zip(best.layouts, best.steps, strict=False)]
    others = [_best(source, target, itemsize, cost, frozenset([edge])) for edge in banned]
    found = {path.steps: path for path in others if path is not None}
    return sorted(found.values(), key=lambda p: p.cost)[:count]


Banned = frozenset[tuple[Layout, Transition]]


def _best(source: Layout, target: Layout | OpenLayout, itemsize: int, cost: CostModel, banned: Banned) -> Path | None:
    assert source.subdims == target.subdims
    if isinstance(target, OpenLayout):
        goal, fine = _Goal(target.cuts, target.values, None), in_primes(source)
        first = fine if len(fine.mesh.axes) <= MOST_PRIME_AXES else source
        return _Search(first, None, goal, itemsize, cost, banned).run()
    both = on_common_mesh(source, target)
    if both is not None:
        return _Search(*both, _Goal.of(both[1]), itemsize, cost, banned).run()
    fine = [in_primes(layout) for layout in (source, target)]
    first, last = fine if max(len(f.mesh.axes) for f in fine) <= MOST_PRIME_AXES else (source, target)
    return _Search(first, last, _Goal.of(last), itemsize, cost, banned).run()


class _Goal(NamedTuple):
    """What the search must reach: the numbers of parts, and the very axes where the order is decided."""

    parts: tuple[int, ...]
    shares: tuple[tuple[int, str], ...]
    state: State | None

    @staticmethod
    def of(layout: Layout) -> "_Goal":
        parts = tuple(layout.mesh.size(axes) for axes in layout.cuts)
        return _Goal(parts, layout.shares, State(layout.cuts, layout.values))


class _Frame:
    """One mesh, with the costs of its collectives at hand."""

    def __init__(self, layout: Layout, itemsize: int, cost: CostModel):
        self.layout = layout
        self.mesh: DeviceMesh = layout.mesh
        self.sizes = layout.sizes
        self.itemsize = itemsize
        self.cost = cost
        self.table = dict(self.mesh.axes)
        self.lines: dict[tuple[str, Axes], Line] = {}
        self.layouts: dict[State, Layout] = {}

    def parts(self, state: State) -> tuple[int, ...]:
        return tuple(math.prod(self.table[a] for a in axes) for axes in state.cuts)

    def shares(self, state: State) -> tuple[tuple[int, str], ...]:
        runs = itertools.groupby(state.values, key=lambda v: v[1])
        return tuple((math.prod(self.table[a] for a, _ in run), combiner) for combiner, run in runs)

    def local_bytes(self, state: State) -> float:
        return math.prod(self.sizes) * self.itemsize / math.prod(self.parts(state))

    def at(self, state: State) -> Layout:
        if state not in self.layouts:
            self.layouts[state] = dataclasses.replace(self.layout, cuts=state.cuts, values=state.values)
        return self.layouts[state]

    def steps(self, state: State) -> Iterator[tuple[Transition, float]]:
        local = self.local_bytes(state)
        for step in steps_from(self.mesh, self.sizes, state):
            line = self.lines.get((step.kind, step.axes)) or self._line(step)
            yield step, line.fixed + line.per_byte * local

    def _line(self, step: Transition) -> Line:
        self.lines[step.kind, step.axes] = line_of(self.mesh, step, self.cost)
        return self.lines[step.kind, step.axes]


class _Node(NamedTuple):
    """A state before (``moved`` False) or after the permute."""

    moved: bool
    state: State


class _Search:
    def __init__(self, source: Layout, target: Layout | None, goal: _Goal, itemsize: int, cost: CostModel, banned: Banned):
        self.first = _Frame(source, itemsize, cost)
        self.one_mesh = target is None or target.mesh == source.mesh
        self.last = self.first if target is None or self.one_mesh else _Frame(target, itemsize, cost)
        self.goal, self.cost, self.banned = goal, cost, banned
        self.start = _Node(False, State(source.cuts, source.values))
        self.whole = math.prod(source.sizes) * itemsize
        self.devices = len(source.mesh.devices)
        self.joined = math.prod(n for n, _ in goal.shares)
        self.wanted = self.whole / math.prod(goal.parts)  # bytes of one device's block in the target
        self.overlap = HeldPart(self.last.mesh, goal.state.cuts if goal.state is not None else [])
        self.combiners = {combiner for _, combiner in goal.shares}
        self.known: dict[_Node, float] = {self.start: 0.0}
        self.origin: dict[_Node, tuple[_Node, Transition]] = {}
        self.estimates: dict[_Node, float] = {}
        self.hops: dict[tuple[Axes, Axes, int], float] = {}

    def run(self) -> Path | None:
        tick, weight, floor = itertools.count(), 1.0, 0.0
        heap = [(self._rest(self.start), next(tick), 0.0, self.start)]
        done: set[_Node] = set()
        while heap:
            least, _, cost, here = heapq.heappop(heap)
            if here in done:
                continue
            floor = max(floor, least) if weight == 1 else floor
            if self._arrived(here):
                floor = cost if weight == 1 else floor
                return Path(self.first.at(self.start.state), self._steps_to(here), cost, floor, len(done))
            done.add(here)
            for step, beyond, price in self._edges(here):
                reached = cost + price
                if beyond not in done and reached < self.known.get(beyond, math.inf):
                    self.known[beyond], self.origin[beyond] = reached, (here, step)
                    heapq.heappush(heap, (reached + weight * self._rest(beyond), next(tick), reached, beyond))
            if len(done) % MOST_STATES == 0:
                weight *= GREED
                heap = [(cost + weight * self._rest(node), tie, cost, node) for _, tie, cost, node in heap]
                heapq.heapify(heap)
        return None

    def _frame(self, node: _Node) -> _Frame:
        return self.last if node.moved else self.first

    def _arrived(self, node: _Node) -> bool:
        if self.goal.state is not None:
            return node.state == self.goal.state and (node.moved or self.one_mesh)
        return self.first.parts(node.state) == self.goal.parts and self.first.shares(node.state) == self.goal.shares

    def _edges(self, node: _Node) -> Iterator[tuple[Transition, _Node, float]]:
        frame = self._frame(node)
        before = self.origin[node][1] if node in self.origin else None
        for step, price in frame.steps(node.state):
            if self._useful(node.state, before, step) and not (self.banned and (frame.at(node.state), step) in self.banned):
                yield step, _Node(node.moved, advance(frame.mesh.names, node.state, step)), price
        masked = before is not None and before.line.shares == "made"
        few = self.goal.state is not None or len(self.first.mesh.axes) <= MOST_AXES
        if few and not node.moved and not (masked and self.one_mesh):
            yield from self._permutes(node)

    def _useful(self, state: State, before: Transition | None, step: Transition) -> bool:
        """Of steps that commute one order is enough: slices by dim, value masks last or right before a reduction."""
        if step.line.shares == "made":
            return self._masked(state, step)
        if before is not None and before.line.shares == "made":
            return step.line.shares == "joined" and before.axes[0] in step.axes
        if before is not None and before.kind == step.kind == "slice":
            return step.target >= before.target  # type: ignore[operator]
        return True

    def _masked(self, state: State, step: Transition) -> bool:
        """Whether the value mask ``step`` leads somewhere: to the goal's shares, or to a wider reduction.

        One ring over all devices of a few hosts may cost less than two that share the hosts' networks.
        """
        if state.values and state.values[-1][1] == step.combiner:
            return True
        known = self.goal.state is None or not self.one_mesh or (step.axes[0], step.combiner) in self.goal.state.values
        return known and step.combiner in self.combiners

    def _permutes(self, node: _Node) -> Iterator[tuple[Transition, _Node, float]]:
        here = self.first.at(node.state)
        parts, shares = self.first.parts(node.state), self.first.shares(node.state)
        for state in relabelings(self.last.mesh, parts, shares, self.goal.state):
            if self.one_mesh and state == node.state:
                continue
            beyond = _Node(True, state)
            reached = self.known[node] + self.cost.local_step
            if reached >= self.known.get(beyond, math.inf):
                continue
            step = Transition("permute", to=self.last.at(state))
            if not (self.banned and (here, step) in self.banned):
                yield step, beyond, self._hop(here, step)

    def _hop(self, here: Layout, step: Transition) -> float:
        """The price of a permute; the messages of two are equal where the same axes number the blocks."""
        assert step.to is not None
        key = (_numbering(here), _numbering(step.to), math.prod(here.local_sizes))
        if key not in self.hops:
            self.hops[key] = price_of(here, step, self.first.itemsize, self.cost)
        return self.hops[key]

    def _rest(self, node: _Node) -> float:
        """No path from ``node`` to the goal costs less."""
        if node not in self.estimates:
            self.estimates[node] = 0.0 if self._arrived(node) else self._estimate(node)
        return self.estimates[node]

    def _estimate(self, node: _Node) -> float:
        frame = self._frame(node)
        needed = self.wanted * (1 - self._held(node))
        shares = math.prod(frame.table[a] for a, _ in node.state.values)
        copies = self.devices // math.prod(self.goal.parts)
        joining = self.whole * sends_to_join(shares, copies, self.joined) / self.devices
        return max(self.cost.local_step, self.cost.floor(max(needed, joining)))

    def _held(self, node: _Node) -> float:
        if self.goal.state is not None and (node.moved or self.one_mesh):
            return self.overlap.fraction(node.state.cuts)
        pairs = zip(self.first.parts(node.state), self.goal.parts, strict=True)
        return math.prod(min(1.0, want / have) for have, want in pairs)

    def _steps_to(self, node: _Node) -> tuple[Transition, ...]:
        steps = []
        while node in self.origin:
            node, step = self.origin[node]
            steps.append(step)
        return tuple(steps[::-1])


def _numbering(layout: Layout) -> Axes:
    """The axes whose coordinates are the number of a device's block and share."""
    return (*(a for axes in layout.cuts for a in axes), *(a for a, _ in layout.values))
