"""The choices of all ops as an integer program.

    minimise  seconds of the nodes' choices + of what is brought from layout to layout + of parameters' modes
    such that each node takes one choice, what a node reads is brought in its layout, and no moment holds too much

Layouts are what edges lead between, not choices. What goes from one maker to one reader is a transport problem, whose
variables need not be whole; where several readers share what is brought, each pair of layouts is paid once.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jscaler.clusters import Cluster
from jscaler.estimate.prices.in_time import InTime
from jscaler.estimate.prices.one_device import OneDevice
from jscaler.ir import Op
from jscaler.ir.walk import grouped
from jscaler.materialize.layout import Layout
from jscaler.plan_search.program.again import Again
from jscaler.plan_search.program.choices import Choice, Node, Nodes
from jscaler.plan_search.program.flows import Edge, Flows, Read
from jscaler.plan_search.program.leaves import Leaf, Leaves, State
from jscaler.plan_search.program.linear import Linear, Row, Solution, Terms, TimeIsOverError, UnprovedError
from jscaler.plan_search.program.memory import Memory
from jscaler.plan_search.program.seconds import Seconds
from jscaler.plan_search.program.tie_rows import check_ties, tie_rows
from jscaler.spaces.allowed import Allowed

Ends = Mapping[Any, Sequence[int]]  # layout (or the state of a parameter) -> the choices that make it, or want it
Pair = tuple[Any, Any]
Price = Callable[[Layout, Layout], float]
NOTHING = 1e-6  # of a variable that is not taken
UNIT = 1e9  # bytes in rows
LEAST = 1.0  # seconds for a solver


class Program:
    """The integer program of a graph on one device group.

    Attributes:
        fixed: seconds of a step that no choice changes: what updates make of scalars.
        constraints: between ops, as they were written -> the numbers of their rows.
    """

    def __init__(
        self, nodes: Nodes, program: OneDevice, in_time: InTime, cluster: Cluster, microbatches: int,
        zeros: Callable[[str], Collection[int]], begins: np.ndarray, may_run_again: Callable[[Op], bool] | None,
    ):  # fmt: skip
        self.nodes, self.zeros = nodes, zeros
        self.seconds = Seconds(nodes, program, in_time, cluster)
        self.flows = Flows(nodes, in_time)
        self.leaves = Leaves(self.flows, self.seconds, microbatches)
        self.linear = Linear()
        self.constraints: dict[str, set[int]] = {}
        self._moments: dict[int, None] = {}  # that have been rows
        self._open: dict[int, Callable[[], float]] = {}  # variables with a price that may be too low
        self.takes: dict[str, list[int]] = {}  # of each node the variables of its choices
        self.modes: dict[str, dict[State, list[int]]] = {}  # of each parameter those of its states
        for node in nodes.by_name.values():
            own = [self._variable(lambda n=node, c=choice: self.seconds.of(n, c), whole=True) for choice in node.choices]
            self.takes[node.name] = own
            self.linear.one_of(own)
        owned = {op.path for updates, _ in self.leaves.updated.values() for op, _ in updates}
        rest = (op for op in nodes.graph.of_kind("update") if op.path not in owned)
        self.fixed = math.fsum(self.seconds.of_op(op, {}) for op in rest if not any(t.shape for t in op.outputs))
        self.memory = Memory(nodes, self.leaves, program, self.takes, begins)
        self.again = None
        if may_run_again is not None:
            self.again = Again(nodes, self.flows, self.seconds, self.linear, self.takes, may_run_again)
        for edge in self.flows.edges():
            self._edge(edge)
        for leaf in self.leaves.by_name.values():
            self._leaf(leaf)
        self.memory.finish(self.again)

    def constrain(self, space: Allowed) -> None:
        """Add what a space says of several ops.

        Raises:
            PlanError: that leaves nothing.
        """
        rows = [*tie_rows(self.nodes, space.ties)]
        check_ties(self.nodes, rows)
        for row in rows:
            self._constrain(row.tie.text, *row.terms(self.takes))
        runs = {} if self.again is None else self.again.runs
        for text, ops in space.as_one.items():
            names = dict.fromkeys(self.nodes.folded.kind(path) for path in ops)
            for first, second in itertools.pairwise(runs[name] for name in names if name in runs):
                self._constrain(text, {first: 1.0, second: -1.0}, 0.0, 0.0)

    def _constrain(self, text: str, terms: Terms, least: float, most: float) -> None:
        self.constraints.setdefault(text, set()).add(len(self.linear.rows))
        self.linear.row(terms, least, most)

    def _variable(self, price: Callable[[], float], whole: bool = False) -> int:
        """A variable that costs at least what it is said to cost; exactly that once it is in a solution."""
        self.seconds.guessed = False
        found = self.linear.variable(price(), whole)
        if self.seconds.guessed:
            self._open[found] = price
        return found

    def solve(
        self, seconds: float, gap: float, most: float = math.inf, rows: Sequence[Row] = (), without: str = ""
    ) -> Solution | None:  # fmt: skip
        """Solve it, and plan the adapters of the solution, until these are planned; None where nothing fits.

        First without whole numbers, which is quick. What is not planned costs no more than it is said to, and a moment that
        is no row holds no more than it may: so the last solution is the best, and its bound holds.

        Args:
            most: bytes that a device may hold.
            rows: what is demanded beside the program's own rows.
            without: a constraint between ops that does not count.
        """
        lifted = self.constraints.get(without, ())
        kept = [row for number, row in enumerate(self.linear.rows) if number not in lifted]
        end, linear = time.monotonic() + seconds, dataclasses.replace(self.linear, rows=[*kept, *rows])
        best, bound, found = None, 0.0, None
        for moment in self._moments if most < math.inf else ():
            self._hold(linear, moment, most)
        for whole in (False, True):
            while found is None or time.monotonic() < end:
                try:
                    found = linear.solve(max(LEAST, end - time.monotonic()), gap, whole)
                except TimeIsOverError:
                    break
                if found is None:
                    return None
                changed = self._planned(linear, found.values)
                held = self.memory.worst(self.memory.timeline(found.values), most * (1 + NOTHING))
                for moment in held:
                    self._hold(linear, moment, most)
                bound, before = max(bound, found.bound), bound
                if whole and not held:
                    cost = float(np.array(linear.costs) @ found.values)
                    best = min(best or (cost, found.values), (cost, found.values), key=lambda pair: pair[0])
                done = best is not None and best[0] <= bound * (1 + gap)
                near = not whole and not held and found.objective <= before * (1 + gap / 10)
                if done or near or not (changed or held):
                    break
        if best is None:
            raise UnprovedError(f"no plan within {seconds:.3g} s; give more, or a smaller space", bound + self.fixed)
        return Solution(best[1], best[0], min(bound, best[0]), best[0] <= bound * (1 + gap))

    def _planned(self, linear: Linear, values: np.ndarray) -> bool:
        """Plan the adapters of a solution; whether some were not planned."""
        taken = [v for v in self._open if values[v] > NOTHING]
        self.seconds.exact = True
        for variable in taken:
            linear.costs[variable] = self._open.pop(variable)()
        self.seconds.exact = False
        for variable in [*self._open] if taken else ():  # the same is brought elsewhere, too
            self.seconds.guessed = False
            linear.costs[variable] = self._open[variable]()
            if not self.seconds.guessed:
                del self._open[variable]
        return bool(taken)

    def _hold(self, linear: Linear, moment: int, most: float, less: int | None = None) -> None:
        """At a moment no more than ``most`` is held, or than that part of it which a variable says."""
        self._moments[moment] = None
        terms, fixed = self.memory.row(moment)
        row = {v: n / UNIT for v, n in terms.items()}
        if less is None:
            linear.row(row, most=(most - fixed) / UNIT)
        else:
            linear.row({**row, less: -most / UNIT}, most=-fixed / UNIT)

    def least(self, seconds: float) -> float | None:
        """Bytes that no solution can save, not even in parts; None where that takes longer."""
        end = time.monotonic() + seconds
        linear = Linear([0.0] * len(self.linear.costs), [False] * len(self.linear.costs), [*self.linear.rows])
        part, whole = linear.variable(1.0), float(sum(one.nbytes for one in self.memory.program.buffers)) + UNIT
        whole += self.memory.rest + sum(self.memory.always.values())
        moments = dict(self._moments)
        while (left := end - time.monotonic()) > 0:
            for moment in moments:
                self._hold(linear, moment, whole, part)
            try:
                found = linear.solve(left, 0.0, whole=False)
            except TimeIsOverError:
                return None
            assert found is not None
            peak = float(found.values[part] * whole)
            moments = dict.fromkeys(self.memory.worst(self.memory.timeline(found.values), peak * (1 + NOTHING) + 1))
            if not moments:
                return peak
        return None

    def peak(self, solution: Solution) -> float:
        """The most that a device holds."""
        return float(self.memory.timeline(solution.values).max())

    def choices(self, solution: Solution) -> dict[str, Choice]:
        """By node what is taken."""
        return {
            name: next(c for c, v in zip(self.nodes.by_name[name].choices, own, strict=True) if solution.takes(v))
            for name, own in self.takes.items()
        }

    def states(self, solution: Solution) -> dict[str, State]:
        """By parameter how it lies."""
        found = {}
        for name, states in self.modes.items():
            found[name] = max(states, key=lambda state: sum(solution.values[v] for v in states[state]))
        return found

    def _by(self, node: Node, layout: Callable[[Choice], Layout]) -> dict[Layout, list[int]]:
        """The variables of a node's choices by a layout that follows from them."""
        return grouped((layout(c), v) for c, v in zip(node.choices, self.takes[node.name], strict=True))

    def _edge(self, edge: Edge) -> None:
        made = self._by(edge.node, lambda choice: edge.made(self.nodes, choice))
        wants = [self._by(read.node, lambda choice, read=read: read.layout(self.nodes, choice)) for read in edge.reads]
        itemsize, carried = edge.tensor.itemsize, edge.source.carried

        def price(source: Layout, target: Layout) -> float:
            return edge.weight * self.seconds.moved(source, target, itemsize, edge.part, carried)

        flows = self.brought(made, wants, price)
        self.memory.add_edge(edge, flows)
        if self.again is not None:
            self.again.add_edge(edge, flows)

    def brought(self, made: Ends, wants: Sequence[Ends], price: Price) -> Mapping[Pair, int]:
        """Have each reader find what it wants; by source and target the variable that says whether it is brought."""
        targets = list(dict.fromkeys(layout for want in wants for layout in want))
        costs = {pair for pair in itertools.product(made, targets) if price(*pair)}
        if not costs:
            return {}
        if len(wants) == 1:
            return self.transport(made, wants[0], price)
        paid = {pair: self._variable(lambda pair=pair: price(*pair)) for pair in costs}
        within = {target: [t for t in targets if t != target and not price(t, target)] for target in targets}
        for want in wants:
            for (source, target), flow in self.transport(made, want, lambda *pair: 0.0).items():
                if (source, target) in paid:
                    ways = [target, *(t for t in within[target] if (source, t) in paid)]
                    self.linear.row({flow: 1.0, **{paid[source, t]: -1.0 for t in ways}}, most=0.0)
        return paid

    def transport(self, made: Ends, want: Ends, price: Callable[[Any, Any], float]) -> dict[Pair, int]:
        """Variables that say what comes from where: as much as is made, and as much as is wanted."""
        pairs = itertools.product(made, want)
        flows = {pair: self._variable(lambda pair=pair: price(*pair)) for pair in pairs}
        for side, ends in enumerate((made, want)):
            own = grouped((pair[side], flow) for pair, flow in flows.items())
            for end, variables in ends.items():
                self.linear.row({**dict.fromkeys(own[end], 1.0), **dict.fromkeys(variables, -1.0)}, 0.0, 0.0)
        return flows

    def _leaf(self, leaf: Leaf) -> None:
        leaves, zeros = self.leaves, self.zeros(leaf.name)
        together = leaf.maker is not None and self.nodes.of_op[leaf.maker.path] is leaf.node
        read = leaf.main[0]
        rows = grouped(
            ((read.layout(self.nodes, choice), leaves.made(leaf, choice) if together else None), variable)
            for choice, variable in zip(leaf.node.choices, self.takes[leaf.node.name], strict=True)
        )
        modes: dict[State, list[int]] = {}
        each: list[tuple[int, State, Layout | None]] = []
        for (layout, made), variables in rows.items():
            own = []
            for state in leaves.states(leaf, layout, zeros):
                own.append(self._variable(lambda state=state, made=made: leaves.cost(leaf, state, made), whole=True))
                modes.setdefault(state, []).append(own[-1])
                each.append((own[-1], state, made))
            self.linear.row({**dict.fromkeys(own, 1.0), **dict.fromkeys(variables, -1.0)}, 0.0, 0.0)
        self.modes[leaf.name] = modes
        self.memory.add_leaf(leaf, each)
        if leaf.maker is not None and not together:
            made_by = self._by(self.nodes.of_op[leaf.maker.path], lambda choice: leaves.made(leaf, choice))
            self._to_states(leaf, made_by, modes)
        for reads in grouped((other.node.name, other) for other in leaf.others).values():
            self._from_states(leaf, reads, modes)

    def _to_states(self, leaf: Leaf, made: Ends, modes: Ends) -> None:
        """Bring a gradient that another node makes to where it is updated."""
        self.transport(made, modes, lambda at, state: self.leaves.gradient(leaf, state, at))

    def _from_states(self, leaf: Leaf, reads: Sequence[Read], modes: Ends) -> None:
        """Bring a parameter to a node that it does not follow."""
        want = self._by(reads[0].node, lambda choice: reads[0].layout(self.nodes, choice))
        self.transport(modes, want, lambda state, at: sum(self.leaves.fetched(leaf, read, state, at) for read in reads))
