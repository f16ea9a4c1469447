"""``fill``: the best plan of a space on one device group, with a bound."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from jscaler import plans
from jscaler.errors import JscalerError, PlanError
from jscaler.estimate.prices import Price, Prices
from jscaler.estimate.prices.candidate import Candidate
from jscaler.estimate.prices.price import sum_begins
from jscaler.ir import Op
from jscaler.ir.walk import grouped
from jscaler.plan_search.program.choices import ByAxis, Nodes
from jscaler.plan_search.program.linear import Row, Solution, UnprovedError
from jscaler.plan_search.program.program import LEAST, Program
from jscaler.plan_search.program.realised import policy_of
from jscaler.plans.batch import BATCH
from jscaler.primitives.planner import Policy
from jscaler.spaces.allowed import ZEROS, Allowed, Options
from jscaler.spaces.space_planner import space_of
from jscaler.stages import transform
from jscaler.text.units import counted, readable_bytes

GAP = 1e-3  # within which a solution is the best
ROUNDS = 6  # of solving for less memory
LESS = 0.995  # of what a plan that does not fit was to hold


class NothingFitsError(PlanError):
    """No plan of a space with holes fits: that is proved.

    Attributes:
        least: bytes that each of its plans holds, where that is known.
    """

    def __init__(self, message: str, least: float | None = None):
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Filling:
    """The integer program of a space on a mesh, and what makes plans of its solutions.

    Attributes:
        batch: path or pattern of the batch among the inputs.
        orders: pairs of ops, of which the first runs in front of the second.
    """

    prices: Prices
    program: Program
    mesh: tuple[int, ...]
    microbatches: int
    batch: str = BATCH
    orders: Sequence[tuple[str, str]] = ()

    def best(
        self, memory: float | None = None, seconds: float = 20.0, like: "Filled | None" = None, rows: Sequence[Row] = (),
        without: str = "",
    ) -> "Filled":  # fmt: skip
        """The plan that takes the fewest seconds.

        A solver finds where a model is too kind: what is found is priced as a plan, and if that holds too much, the program
        is solved again for as much less.

        Args:
            memory: bytes that a device may hold; None: any.
            seconds: for the solver; what it has found by then counts.
            like: another solution, for which it is known how kind the model is.
            rows: what is demanded beside the program's own rows.
            without: a constraint between ops that does not count.

        Raises:
            NothingFitsError: nothing fits, which the solver has proved.
            UnprovedError: nothing was found, for want of time, or since plans hold more than the program says.
        """
        end, program = time.monotonic() + seconds, self.program
        limit, bound, peaks = math.inf if memory is None else memory, 0.0, list[float]()
        most = limit if like is None else min(limit, like.most)
        for _ in range(ROUNDS):
            solution = program.solve(end - time.monotonic(), GAP, most, rows, without)
            if solution is None and most < limit and not peaks:
                most = limit
                continue
            if solution is None:
                break
            bound = bound or solution.bound + program.fixed
            try:
                found = self._filled(solution, bound, most)
            except JscalerError as error:  # other solutions may be legal
                raise UnprovedError(f"what was found for a mesh of {self.mesh} is not legal: {error}", bound) from error
            if memory is None or found.price.peak <= memory:
                return found
            peaks.append(found.price.peak)
            most = min(memory - (found.price.peak - found.peak), LESS * min(most, found.peak))
        within = "" if memory is None else f"{readable_bytes(memory)} "
        where = f"{within}on a mesh of {self.mesh}, in {counted(self.microbatches, 'micro-batch', 'micro-batches')}"
        remedy = "take more micro-batches or devices, or let more be split or computed again"
        if peaks:
            held = readable_bytes(min(peaks))
            raise UnprovedError(f"no plan was found for {where}: those that were tried hold {held}; {remedy}", bound)
        if memory is None:
            raise PlanError(f"what the space says of several ops leaves nothing {where}; leave one of its op_assigns out")
        least = program.least(max(LEAST, end - time.monotonic()))
        said = "" if least is None else f": no plan holds less than {readable_bytes(least)}"
        raise NothingFitsError(f"nothing of the space fits in {where}{said}; {remedy}", least)

    def _filled(self, solution: Solution, bound: float, most: float) -> "Filled":
        prices, program, in_parts = self.prices, self.program, self.microbatches > 1
        nodes = program.nodes.by_name
        choices = {name: c.by_axis for name, c in program.choices(solution).items() if not nodes[name].is_join}
        states = program.states(solution)
        again = program.again.made_again(solution) if program.again is not None else []
        inside = program.again.in_regions(solution) if program.again is not None else []
        policy = policy_of(prices.tables.folded, self.mesh, choices, states, {*again}, {*inside}, in_parts, self.orders)
        if in_parts:
            policy = plans.accumulate(self.microbatches, policy, batch=self.batch)
        price = prices.of(transform(prices.captured, policy, prices.cluster.num_devices, cost=prices.cluster))
        zero = {name: state.zero for name, state in states.items()}
        peak, seconds = program.peak(solution), solution.objective + program.fixed
        proved = seconds <= bound * (1 + GAP)
        return Filled(self, policy, seconds, bound, peak, price, choices, zero, tuple(again), proved, most)


@dataclass(frozen=True)
class Filled:
    """A plan that was found.

    Attributes:
        filling: the program that it is a solution of.
        policy: writes it down for the whole graph.
        seconds: of a step, by the program.
        bound: the program has no solution of fewer seconds.
        peak: bytes on a device, by the program.
        price: of the plan, by `Prices`.
        choices: path of a forward op -> by mesh axis the factor that is split, or None for a copy; of equal layers one's.
        zero: path of a parameter -> its ZeRO mode.
        recomputed: paths of the ops that run again in the backward pass.
        proved: whether no other solution is better by more than a small gap.
        most: bytes within which the program was solved.
    """

    filling: Filling
    policy: Policy
    seconds: float
    bound: float
    peak: float
    price: Price
    choices: Mapping[str, ByAxis]
    zero: Mapping[str, int]
    recomputed: tuple[str, ...]
    proved: bool
    most: float


def fill(
    prices: Prices,
    space: Callable[..., None] | None = None,
    mesh: tuple[int, ...] = (),
    microbatches: int = 1,
    memory: float | None = None,
    seconds: float = 20.0,
) -> Filled:
    """The plan of a space that takes the fewest seconds on a mesh of devices; see `Filling.best`.

    Args:
        space: a policy with holes (see `jscaler.spaces`); by default all that there is.
        mesh: the sizes of its axes, major first.
        microbatches: in which the batch runs, one after another.
        memory: bytes that a device may hold; None: any.
        seconds: for the solver.

    Raises:
        PlanError: nothing is legal.
    """
    return filling_of(prices, space, mesh, microbatches, recompute=memory is not None).best(memory, seconds)


def filling_of(
    prices: Prices, space: Callable[..., None] | None, mesh: tuple[int, ...], microbatches: int, recompute: bool = False,
    batch: str = BATCH,
) -> Filling:  # fmt: skip
    """The integer program of a space on a mesh.

    Args:
        recompute: whether anything may run again, where the space says so: memory counts.
        batch: path or pattern of the batch among the inputs.

    Raises:
        PlanError: nothing is legal.
    """
    holes = space_of(space, prices.graph, mesh, prices.captured.bodies, prices.cluster, batch)
    program = program_of(prices, holes, mesh, microbatches, recompute, batch)
    return Filling(prices, program, mesh, microbatches, batch, () if holes is None else tuple(holes.orders))


def program_of(
    prices: Prices, space: Allowed | None, mesh: tuple[int, ...], microbatches: int, recompute: bool = False,
    batch: str = BATCH,
) -> Program:  # fmt: skip
    """The integer program of what is open; None stands for all that there is."""
    count = math.prod(mesh)
    if count != prices.cluster.num_devices:
        raise PlanError(f"a mesh of {mesh} has {count} devices, and '{prices.cluster}' has {prices.cluster.num_devices}")
    tables = prices.tables
    one = tables.program()
    policy = plans.accumulate(microbatches, batch=batch) if microbatches > 1 else plans.single()
    candidate = Candidate.of(transform(prices.captured, policy, count), tables.folded)
    in_time = tables.in_time(candidate, one)
    begins = sum_begins(one, candidate.cuts, in_time)
    may = _Legal(prices, space)
    nodes = Nodes(one.graph, tables.folded, mesh, in_time, may)
    again = may.run_again if recompute else None
    found = Program(nodes, one, in_time, prices.cluster, microbatches, may.zeros, begins, again)
    if space is not None:
        found.constrain(space)
    return found


class _Legal:
    """What a space allows of what stands for several ops, or parameters: what it allows of each."""

    def __init__(self, prices: Prices, space: Allowed | None):
        self.space, self.folded = space, prices.tables.folded
        names = (*(op.path for op in prices.graph.forward()), *(t.name for t in prices.graph.inputs))
        self.of_kind = grouped((self.folded.kind(name), name) for name in names)
        self._options: dict[str, tuple[Options, ...] | None] = {}

    def split(self, op: Op, axis: int, factor: str | None) -> bool:
        """Whether a mesh axis may split a factor, or copy."""
        if self.space is None or op.kind != "forward":
            return True
        kind = self.folded.kind(op.path)
        if kind not in self._options:
            self._options[kind] = self.space.options(self.of_kind.get(kind, ()))
        options = self._options[kind]
        return options is None or factor in options[axis]

    def whole(self, op: Op, by_axis: ByAxis) -> bool:
        """Whether all axes together may split an op so."""
        if self.space is None or not self.space.parts or op.kind != "forward":
            return True
        return self.space.splits_so(self.of_kind.get(self.folded.kind(op.path), ()), by_axis)

    def zeros(self, leaf: str) -> Collection[int]:
        """The ZeRO modes of a parameter."""
        return ZEROS if self.space is None else self.space.modes(self.of_kind[self.folded.kind(leaf)])

    def run_again(self, op: Op) -> bool:
        """Whether an op may run again."""
        return self.space is None or self.space.may_run_again(self.of_kind.get(self.folded.kind(op.path), (op.path,)))
