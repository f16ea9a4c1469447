"""``Prices``: seconds and peaks of many plans for one graph, from tables that plans share.

plan ──► Candidate ──► skeleton: layouts and adapters in space ─┐
                  └──► the program of one device, scaled ───────┴──► seconds, bytes at each moment ──► Price

``jscaler.cost`` builds the program of a plan. Here nothing is built: an op takes as long as on one device, with its kernels
as small as its parts. What is fused across a cut, what merges behind a pass, and what a collective copies is left out.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from jscaler import plans
from jscaler.clusters import Cluster
from jscaler.collector import no_full_collections
from jscaler.errors import DeviceError
from jscaler.estimate.prices.candidate import Candidate, LayersDifferError, NoPriceError, TimeCut
from jscaler.estimate.prices.folded import Folded, folded
from jscaler.estimate.prices.in_time import InTime, iterations, source_of
from jscaler.estimate.prices.one_device import OneDevice
from jscaler.estimate.prices.skeleton import Moved, Skeleton
from jscaler.estimate.prices.staged import Places, Staged, Taken
from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import origins
from jscaler.ir.walk import closure
from jscaler.lower.step_plan import StepPlan
from jscaler.primitives import Decision, Plan, Shard
from jscaler.primitives.plan import Schedule
from jscaler.stages import Captured, lower, transform
from jscaler.tables.simulator import Turn, turns_of
from jscaler.tables.table import one_by_one


@dataclass(frozen=True)
class Price:
    """What a plan costs, by tables.

    Attributes:
        seconds: of a step.
        peak: bytes on the device that holds most.
        computing, sending: seconds of the devices that have most to do; hops from group to group are no part of them.
        busiest: seconds of both, of the devices that have most of both: no order of blocks takes less.
        fixed: bytes of parameters, optimizer state, batch and sums of gradients on the device that holds most of them.
        least_busy: seconds of both, of the devices that have least of both.
        forward, backward, cotangent: of stages seconds of all forwards, of all backwards, and of the part of these that
            comes before gradients of weights, as if all stages took as long as the fastest.
    """

    seconds: float
    peak: float
    computing: float
    sending: float
    busiest: float
    fixed: float
    least_busy: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    cotangent: float = 0.0

    def mixed(self, part: float, other: "Price") -> "Price":
        """``part`` of this price, and of another the rest."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Price(*(part * own + (1 - part) * rest for own, rest in pairs))


@dataclass
class Prices:
    """Prices of plans for ``graph`` on ``cluster``.

    Attributes:
        tables: what plans share that treat equal layers alike.

    Raises:
        DeviceError: the cluster does not say what its devices are.
    """

    graph: Graph
    cluster: Cluster

    def __post_init__(self) -> None:
        if self.cluster.device is None:
            raise DeviceError(f"cluster '{self.cluster.name}' does not say what its devices are: seconds have no price")
        self.captured = Captured.of(self.graph)
        self.tables = Tables(self.captured, folded(self.captured), self.cluster)

    @cached_property
    def _unfolded(self) -> "Tables":
        """For plans that treat equal layers in several ways."""
        return Tables(self.captured, Folded(self.graph), self.cluster) if self.tables.folded.counts else self.tables

    @cached_property
    def products(self) -> float:
        """Seconds that one device takes for the step's products alone, whatever is read and written beside them."""
        program = self.tables.program()
        return math.fsum(own.count * program.products(own) for own in program.kernels.values())

    @cached_property
    def flops(self) -> float:
        """Operations of the step's products on one device."""
        return math.fsum(own.count * own.flops for own in self.tables.program().kernels.values())

    @no_full_collections()
    def of(self, plan: Plan | str) -> Price:
        """The price of a plan, or of a built-in one by its name.

        Raises:
            NoPriceError: tables have none; `jscaler.cost` has.
            PlanError: the plan is not legal for the graph.
        """
        if isinstance(plan, str):
            plan = transform(self.captured, plans.by_name(plan), self.cluster.num_devices, cost=self.cluster)
        try:
            candidate, tables = Candidate.of(plan, self.tables.folded), self.tables
        except LayersDifferError:
            candidate, tables = Candidate.of(plan, self._unfolded.folded), self._unfolded
        found = Sums(tables, candidate).price()
        return found if candidate.without is None else found.mixed(candidate.again, self.of(candidate.without))


@dataclass
class Tables:
    """What the candidates of one graph share."""

    captured: Captured
    folded: Folded
    cluster: Cluster
    _steps: dict[tuple[Decision, ...], StepPlan] = field(default_factory=dict)
    _programs: dict[tuple[tuple[Decision, ...], bool], OneDevice] = field(default_factory=dict)
    _skeletons: dict[tuple[int, tuple[Decision, ...]], Skeleton] = field(default_factory=dict)
    _turns: dict[tuple[str, int, int, int], tuple[Turn, ...]] = field(default_factory=dict)
    _in_time: dict[Any, InTime] = field(default_factory=dict)
    _places: dict[Any, Places] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.captured = replace(self.captured, graph=self.folded.graph)

    def program(self, structure: tuple[Decision, ...] = (), cut: bool = False) -> OneDevice:
        """What one device does, where these decisions say what is computed again; cut into a forward and a backward?"""
        found = self._programs.get((structure, cut))
        if found is None:
            step = self._steps.get(structure)
            if step is None:
                alone = self.cluster.alone()
                step = self._steps[structure] = lower(self.captured, Plan("one device", 1, structure), alone)
            assert self.cluster.device is not None
            found = self._programs[structure, cut] = OneDevice.of(step, self.cluster.device, self.folded, cut)
        return found

    @cached_property
    def leaves(self) -> dict[str, str]:
        """Name of a gradient, of what is stacked up or added up to it -> name of its parameter."""
        graph = self.captured.graph
        inputs, found = frozenset(graph.inputs), dict[str, str]()
        for call in graph.calls:
            for wrt, gradient in zip(call.wrt, call.gradients, strict=True):
                for leaf in origins(graph, wrt) & inputs:
                    found.update(dict.fromkeys((t.name for t in closure([gradient], self._summands)), leaf.name))
        return found

    def _summands(self, tensor: PTensor) -> list[PTensor]:
        graph = self.captured.graph
        maker = graph.producer.get(tensor)
        is_sum = maker is not None and maker.kind == "backward" and maker.forward is None
        return [*(maker.inputs if maker is not None and is_sum else ()), *graph.flow.sources(tensor, "stack", "exit")]

    def skeleton(self, candidate: Candidate) -> Skeleton:
        """Where its ops and tensors lie."""
        key = candidate.num_devices, candidate.space
        found = self._skeletons.get(key)
        if found is None:
            found = self._skeletons[key] = Skeleton.of(self.captured, Plan("in space", *key), self.cluster)
        return found

    def in_time(self, candidate: Candidate, program: OneDevice) -> InTime:
        """What its time axes make of the program."""
        key = id(program), tuple(candidate.cuts.items())
        found = self._in_time.get(key)
        if found is None:
            found = self._in_time[key] = InTime.of(candidate, program.graph)
        return found

    def places(self, candidate: Candidate, program: OneDevice) -> Places:
        """Which stages have what of the program."""
        key = id(program), tuple((path, *own.items()) for path, own in candidate.shares.items())
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Places.of(program.graph, candidate.shares)
        return found

    def turns(self, candidate: Candidate) -> tuple[Turn, ...]:
        """The order of its schedule, worked out once for so many groups and micro-batches."""
        if not candidate.stages:
            return ()
        said = next((d.table for d in reversed(candidate.plan.decisions) if isinstance(d, Schedule)), "")
        key = said, len(candidate.groups), len(candidate.stages), candidate.microbatches
        if key not in self._turns:
            table = candidate.table
            if table is None or len(table.rows) != len(candidate.groups):
                rows, groups = 0 if table is None else len(table.rows), len(candidate.groups)
                raise NoPriceError(
                    f"the schedule of '{candidate.plan.name}' has {rows} rows for {groups} groups; ask jscaler.cost"
                )
            self._turns[key] = turns_of(one_by_one(table))  # as cells run between which nothing hides
        return self._turns[key]


class Sums:
    """Sums the tables up for one candidate."""

    def __init__(self, tables: Tables, candidate: Candidate):
        self.candidate, self.cluster = candidate, tables.cluster
        self.program = tables.program(candidate.structure, bool(candidate.stages))
        self.skeleton = tables.skeleton(candidate)
        self.tables = tables
        self.graph: Graph = self.program.graph
        counts = tables.folded.counts
        self.arguments = {name: nbytes * counts.get(name, 1) for name, nbytes in self.skeleton.arguments.items()}
        self.time = tables.in_time(candidate, self.program)
        shares = self.time.shares
        local = self.skeleton.local
        self.summed = axes_of_sums(self.program, self.time)
        self.begins = sum_begins(self.program, candidate.cuts, self.time)
        self.held = {name: part / shares.get(name, 1) for name, part in local.items()} if shares else local

    def price(self) -> Price:
        """Of a plan on one device group, or on several."""
        computing, sending = list(self.computing()), list(self.sending())
        turns = self.tables.turns(self.candidate)
        if turns:
            staged = self.staged(turns)
            blocks, once = staged.blocks([*computing, *sending], True)
            peak, fixed = staged.peak(self.bytes_of(), self.begins >= 0, self.arguments)
            compute, send = (max(staged.busy(*staged.blocks(taken, taken is computing))) for taken in (computing, sending))
            busy, least = staged.busy(blocks, once), staged.least_blocks(blocks)
            return Price(staged.seconds(blocks, once), peak, compute, send, max(busy), fixed, min(busy), *least)
        compute, send = (math.fsum(one.seconds for one in taken) for taken in (computing, sending))
        arguments = sum(self.arguments.values())
        sizes = self.bytes_of()
        peak = self._timeline(sizes).max(initial=0.0) + arguments
        fixed = arguments + float(self._added(sizes)[self.begins >= 0].sum())
        return Price(compute + send, float(peak), compute, send, compute + send, fixed)

    def staged(self, turns: tuple[Turn, ...]) -> Staged:
        """The sums stage by stage."""
        places = self.tables.places(self.candidate, self.program)
        return Staged(self.candidate, self.program, self.time, turns, places, self.held, self.cluster)

    def computing(self) -> Iterator[Taken]:
        """What each op computes, all its runs together, and what adding its results up over them takes."""
        program, runs, parts = self.program, self.time.runs, self.skeleton.parts
        for path, own in program.kernels.items():
            split = parts.get(path, {})
            if cut := self.time.cuts.get(path):
                split = {f: split.get(f, 1) * cut.get(f, 1) for f in {**split, **cut}}
            times = runs.get(path, 1)
            yield Taken(path, own.count * times * program.seconds(own, tuple(sorted(split.items())), self.held), times > 1)
        for path, names in self.time.summed.items():
            op = self.graph.by_path[path]
            for tensor in (t for t in op.outputs if t.name in names):
                held, scattered = self.held.get(tensor.name, 1.0), self.skeleton.sharded
                if self._is_each_time(tensor.name):
                    held = scattered.get(tensor.name, held)
                moved = 3 * math.prod(tensor.shape) * tensor.itemsize * held
                times = runs[path] * iterations(op, self.graph) * program.count(path)
                yield Taken(path, times * program.device.kernel_seconds((), moved), True)

    def sending(self) -> Iterator[Taken]:
        """What is moved in front of each op."""
        for one in self.skeleton.moved:
            times = self._times(one)
            maker, reader = (self.graph.by_path.get(path) for path in (one.maker, one.reader))
            count = self.program.count(one.maker) if reader is None else self.program.folded.reads(reader, maker)
            leaf = self.tables.leaves.get(one.tensor, "") if one.kind == "gradient" else ""
            yield Taken(one.reader or one.maker, count * times * one.times * self._once(one), times > 1, leaf)

    def _once(self, one: Moved) -> float:
        return one.seconds(self._share(one), self.cluster)

    def _share(self, one: Moved) -> int:
        """Of how many parts in time one is moved at a time; a gradient is put together first."""
        return 1 if one.kind == "gradient" else self.time.shares.get(one.tensor, 1)

    def _times(self, one: Moved) -> float:
        """How often something is moved.

        A gradient that is reduced whole is scattered for each part in time, and what is made of it gathered once, each of
        which is half of that.
        """
        part, is_gathered = self._share(one), one.kind == "fetched" and self._is_stored
        is_gathered = is_gathered and not self.candidate.plan.accumulation.gather_once
        if part > 1:  # in front of loops over what does not cut it, where it does not lie in parts
            return max(self.time.runs.get(one.reader, 1), part) if is_gathered else part
        if one.kind == "gradient" and self._is_each_time(one.tensor):
            often = max((names[one.tensor].parts for names in self.time.summed.values() if one.tensor in names), default=1)
            return (often + 1) / 2 if one.is_whole and one.tensor in self.skeleton.sharded else often
        if is_gathered:
            op = self.graph.by_path.get(one.reader)
            cuts = self.candidate.cuts.get(source_of(op).path, ()) if op is not None else ()
            return math.prod([cut.parts for cut in cuts if cut.axis == self.time.microbatch])
        return 1

    def _is_each_time(self, gradient: str) -> bool:
        """Whether a gradient is reduced for each micro-batch."""
        folded, leaves = self.tables.folded, self.tables.leaves
        return folded.kind(leaves.get(gradient, "")) in self.candidate.each_time

    @cached_property
    def _is_stored(self) -> bool:
        """Whether parameters lie in parts."""
        return any(isinstance(d, Shard) and d.stored for d in self.candidate.space)

    def bytes_of(self) -> np.ndarray:
        """Of each buffer, on a device."""
        found = np.empty(len(self.program.buffers))
        sent = {one.tensor for one in self.skeleton.moved}
        for n, one in enumerate(self.program.buffers):
            whole = one.kind == "gradient"  # what parts in time make of it is put together
            part = (self.skeleton.local if whole else self.held).get(one.tensor)
            if part is None:
                split, cut = self.skeleton.parts.get(one.op, {}), self.time.cuts.get(one.op, {})
                part = 1 / math.prod([*split.values(), *cut.values()])
            elif self.summed[n] and not self._is_each_time(one.tensor):  # it is scattered behind the last part
                part = self.skeleton.unsharded.get(one.tensor, part)
            found[n] = (one.wide if one.tensor in sent else one.nbytes) * part
        return found

    def _added(self, sizes: np.ndarray) -> np.ndarray:
        """Of each buffer that adds up over parts in time, the bytes of the sum: scattered, if each part's is."""
        if not self.candidate.each_time:
            return sizes
        every, sharded = self.program.buffers, self.skeleton.sharded
        whole = [(one.wide, sharded.get(one.tensor) if self._is_each_time(one.tensor) else None) for one in every]
        return np.array([own if part is None else wide * part for own, (wide, part) in zip(sizes, whole, strict=True)])

    def _timeline(self, sizes: np.ndarray) -> np.ndarray:
        """Bytes at each moment, beside arguments."""
        program, begins = self.program, self.begins
        sums, added = begins >= 0, self._added(sizes)
        change = np.zeros(len(program.ops) + 1)

        def hold(first: np.ndarray, last: np.ndarray, own: np.ndarray) -> None:
            np.add.at(change, first, own)
            np.add.at(change, last + 1, -own)

        hold(program.first, np.where(sums & program.is_stack, program.first - 1, program.last), sizes)
        hold(begins[sums], np.full(sums.sum(), program.update - 1), added[sums])
        for one in self.skeleton.moved:
            begin, end = program.moments.get(one.reader, (0, -1))
            if one.kind == "fetched" and self.candidate.plan.accumulation.gather_once:
                begin, end = min(begin, program.update - 1), program.update - 1
            if begin <= end and one.copied:
                change[begin] += one.copied / self._share(one)
                change[end + 1] -= one.copied / self._share(one)
        for n, first, last, count in program.equal_layers:  # of layers that one stands for
            spans = [(first, last, sizes[n])] + ([(begins[n], program.update - 1, added[n])] if sums[n] else [])
            for begin, end, size in spans:
                if begin <= end:
                    change[begin] += count * size
                    change[end + 1] -= count * size
        return program.scratch + np.cumsum(change)[:-1]


def axes_of_sums(program: OneDevice, time: InTime) -> list[str]:
    """By buffer, of gradients that add up over parts in time, the first axis of these; else nothing."""
    axis_of = {name: cut.axis for names in time.summed.values() for name, cut in names.items()}
    stacks = {y.stack.name: y.slice.name for loop in program.graph.loops.values() for y in loop.ys} if axis_of else {}
    return [
        axis_of.get(stacks.get(one.tensor, one.tensor), "") if one.kind == "gradient" else "" for one in program.buffers
    ]


def sum_begins(program: OneDevice, cuts: Mapping[str, Sequence[TimeCut]], time: InTime) -> np.ndarray:
    """By buffer, of gradients that add up over parts in time, the moment at which their sum begins; else -1."""
    begin: dict[str, int] = {}
    summed, found = axes_of_sums(program, time), np.full(len(program.buffers), -1)
    if not any(summed):
        return found
    axes = {path: [cut.axis for cut in own] for path, own in cuts.items()}
    for moment, path in enumerate(program.ops):
        for axis in axes.get(path, ()):
            begin.setdefault(axis, moment)
    for n, (one, axis) in enumerate(zip(program.buffers, summed, strict=True)):
        if axis and not one.in_loop and begin.get(axis, one.first) < one.first:
            found[n] = begin[axis]
    return found
