"""A plan taken apart: what it says of space, of time, of stages, and of what is computed again.

Plans that a search tries differ in few of these, and what is worked out for a part serves all that share it.
A plan's decisions on ranges of a stack, and on equal layers, become decisions on the one thing that stands for them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jscaler.errors import PlanError
from jscaler.estimate.prices.folded import Folded
from jscaler.ir import Place
from jscaler.ir.loop import chain_of
from jscaler.ir.name import layers_of
from jscaler.ir.walk import grouped
from jscaler.primitives import Assign, Decision, Plan, Trans
from jscaler.primitives.plan import (
    Accumulation,
    Fuse,
    LeafParts,
    LoopRanges,
    OnDevices,
    Order,
    PerMicrobatch,
    Recompute,
    SaveResiduals,
    Schedule,
    Shard,
    Store,
    numbered_stages,
)
from jscaler.tables import Published, Table

Devices = tuple[int, ...]
OF_TIME = (LoopRanges, LeafParts, OnDevices, Schedule, Order, Accumulation, PerMicrobatch)


class NoPriceError(PlanError):
    """Tables have no price for a plan; `jscaler.cost` has one."""


class LayersDifferError(NoPriceError):
    """A plan treats equal layers, or ranges of them, in several ways."""


@dataclass(frozen=True)
class TimeCut:
    """One op's factor that a time axis cuts."""

    axis: str
    factor: str
    parts: int


@dataclass(frozen=True)
class Candidate:
    """A plan taken apart. Ops are those of a folded graph, also where stages have ranges of their layers.

    Attributes:
        num_devices: of each device group.
        space: how ops and tensors lie on a group, and what is computed again.
        structure: what changes the program of one device: what is computed again.
        cuts: path of a forward op -> what cuts it in time, outermost first.
        groups: the device groups.
        stages: by stage its group; none where there are no stages.
        shares: path of a forward op -> the part of it that each stage runs.
        each_time: the sharded parameters whose gradients are reduced for each micro-batch.
        again: the part of the layers that is computed again, of those of which some are.
        without: the plan that computes none of these again; None where that is all of them.
    """

    plan: Plan
    num_devices: int
    space: tuple[Decision, ...]
    structure: tuple[Decision, ...]
    cuts: Mapping[str, tuple[TimeCut, ...]]
    groups: tuple[Devices, ...]
    stages: tuple[int, ...]
    shares: Mapping[str, Mapping[int, float]]
    each_time: frozenset[str] = frozenset()
    again: float = 1.0
    without: Plan | None = None

    @cached_property
    def microbatches(self) -> int:
        """How many, along the outermost time axis that most ops have."""
        counts: dict[int, int] = {}
        for cuts in self.cuts.values():
            counts[cuts[0].parts] = counts.get(cuts[0].parts, 0) + 1
        return max(counts, key=lambda n: counts[n], default=1)

    @cached_property
    def table(self) -> Table | None:
        """In which order the groups run their stages."""
        table = self.plan.table
        if isinstance(table, Published):
            return table.table(len(self.groups), self.microbatches, len(self.stages) // len(self.groups))
        return table

    @staticmethod
    def of(plan: Plan, folded: Folded) -> "Candidate":
        """``plan`` for a graph that was folded.

        Raises:
            LayersDifferError: it treats in several ways what was folded.
            NoPriceError: its groups are of unequal sizes, or what lies on one is not what lies on another.
        """
        on = [d for d in numbered_stages(plan.decisions) if isinstance(d, OnDevices)]
        groups = tuple(dict.fromkeys(d.devices for d in on)) or (tuple(range(plan.num_devices)),)
        if len({len(group) for group in groups}) > 1 or sum(map(len, groups)) != plan.num_devices:
            sizes = ", ".join(str(len(group)) for group in groups)
            raise NoPriceError(
                f"the groups of '{plan.name}' are not equal parts of its {plan.num_devices} devices (they have {sizes}); "
                "ask jscaler.cost"
            )
        if any(d.turned for d in on):
            raise NoPriceError(f"parts in time of '{plan.name}' take turns on devices; ask jscaler.cost")
        stages = {d.stage: groups.index(d.devices) for d in on if d.stage is not None}
        if sorted(stages) != list(range(len(stages))) or len(stages) % len(groups):
            raise NoPriceError(
                f"'{plan.name}' has stages {sorted(stages)} on {len(groups)} groups, not as many on each; ask jscaler.cost"
            )
        _check_alike(plan, on, folded)
        number = {device: place for group in groups for place, device in enumerate(sorted(group))}
        reader = _Reader(plan, folded, number)
        usual = plan.accumulation.each_time
        shards = [d for d in plan.decisions if isinstance(d, Shard)]
        often = frozenset(folded.kind(d.leaf) for d in shards if (usual if d.each_time is None else d.each_time))
        cuts = {path: own for path, own in reader.cuts.items() if own}
        space = tuple(reader.space())
        structure = tuple(d for d in space if isinstance(d, Recompute | SaveResiduals | Fuse))
        ordered = tuple(stages[stage] for stage in sorted(stages))
        shares = _shares(on, folded)
        again, without = reader.some_again(on, shares)
        found = Candidate(plan, len(groups[0]), space, structure, cuts, groups, ordered, shares, often, again, without)
        if ordered and found.microbatches < 2:
            raise NoPriceError(f"'{plan.name}' has {len(ordered)} stages and one micro-batch; ask jscaler.cost")
        return found


def _check_alike(plan: Plan, on: list[OnDevices], folded: Folded) -> None:
    """Raises LayersDifferError where some of equal layers, or of the ranges of a stack, have decisions and others none: of
    stages with plans of their own."""
    layers = {leaf: len(d.sizes) for d in plan.decisions if isinstance(d, LeafParts) for leaf in d.leaves}
    every = grouped((folded.of(path), path) for d in on for path in d.ops)
    named: dict[tuple[str, str], set[str]] = {}
    for d in plan.decisions:
        if isinstance(d, Trans) and any(not axis.time for axis in d.axes) and folded.of(d.op) in every:
            named.setdefault(("split", folded.of(d.op)), set()).add(d.op)
        elif isinstance(d, Shard):
            named.setdefault(("shard", folded.of(d.leaf)), set()).add(d.leaf)
    for (kind, name), own in named.items() if on else ():
        count = len(every[name]) if name in every else layers.get(name, folded.counts.get(name, 1))
        if len(own) != count:
            raise LayersDifferError(f"'{plan.name}' treats layers in several ways: the {kind} of '{name}', in some of them")


def _shares(on: list[OnDevices], folded: Folded) -> dict[str, dict[int, float]]:
    """By path of an op the part of it that each stage runs: of a loop's op, of its iterations; of a layer's, of layers."""
    found: dict[str, dict[int, float]] = {}
    for decision in on:
        assert decision.stage is not None
        for path in decision.ops:
            bounds = layers_of(path)
            own = found.setdefault(folded.of(path), {})
            own[decision.stage] = own.get(decision.stage, 0.0) + (1.0 if bounds is None else bounds[1] - bounds[0])
    return {path: {stage: n / sum(own.values()) for stage, n in own.items()} for path, own in found.items()}


class _Reader:
    """Reads the decisions of a plan, whose devices have a ``number`` in their group."""

    def __init__(self, plan: Plan, folded: Folded, number: Mapping[int, int]):
        self.plan, self.folded, self.number = plan, folded, number
        self.grids = {d.op: d for d in plan.decisions if isinstance(d, Trans)}
        self.cuts: dict[str, tuple[TimeCut, ...]] = {}
        self.assigned = {d.op for d in plan.decisions if isinstance(d, Assign)}
        self.fused = {d.path for d in plan.decisions if isinstance(d, Fuse)}
        self.known: dict[tuple[str, ...], object] = {}
        self.places: dict[int, tuple[Place, ...]] = {}
        for grid in self.grids.values():
            path = folded.of(grid.op)
            if self._first(("grid", path), (grid.axes, grid.chunks)):
                cuts = [TimeCut(a.time, a.factor, a.parts) for a in grid.axes if a.time and a.factor is not None]
                cuts += [TimeCut(f"chunks of {path}", a.factor, a.parts) for a in grid.chunks if a.factor is not None]
                self.cuts[path] = tuple(cuts)

    def _first(self, key: tuple[str, ...], value: object) -> bool:
        """Whether nothing is known of ``key``; raises LayersDifferError where that is something else."""
        if key not in self.known:
            self.known[key] = value
            return True
        if self.known[key] != value:
            what, name = key[:2]
            raise LayersDifferError(f"'{self.plan.name}' treats layers in several ways: the {what} of '{name}'")
        return False

    def space(self) -> Iterator[Decision]:
        """The decisions in space, on one group, and those on what is computed again."""
        again: set[str] = set()
        for decision in self.plan.decisions:
            if isinstance(decision, Trans):
                yield from self._grid(decision)
            elif isinstance(decision, Assign):
                yield from self._assigned(decision)
            elif isinstance(decision, Recompute):
                ops, keep = (tuple(dict.fromkeys(map(self.folded.of, names))) for names in (decision.ops, decision.keep))
                if len(ops) < len(decision.ops) or len({op in self.folded.counts for op in ops}) > 1:
                    raise LayersDifferError(f"'{self.plan.name}' has regions of several layers")
                if self._first(("recompute", ops[0]), (ops, keep)) and again.isdisjoint(ops):
                    yield replace(decision, ops=ops, keep=keep)
                elif not again.issuperset(ops):
                    raise LayersDifferError(f"'{self.plan.name}' has regions that overlap where layers are one")
                again.update(ops)
            elif isinstance(decision, Shard):
                leaf, devices = self.folded.of(decision.leaf), tuple(self.number[d] for d in decision.devices)
                said = decision.dim, decision.parts, devices, decision.stored, decision.each_time
                if self._first(("shard", leaf), said):
                    yield replace(decision, leaf=leaf, devices=devices, each_time=None, elsewhere=())
            elif isinstance(decision, SaveResiduals):
                op = self.folded.of(decision.op)
                if self._first(("residuals", op), decision.mode):
                    yield replace(decision, op=op)
            elif isinstance(decision, Store):
                leaf, devices = self.folded.of(decision.leaf), tuple(self.number[d] for d in decision.devices)
                if len({*devices}) < len(devices):
                    raise NoPriceError(
                        f"'{decision.leaf}' is stored on {len(devices)} devices of several groups; ask jscaler.cost"
                    )
                if self._first(("store", leaf), (decision.grid, devices, decision.cuts)):
                    yield replace(decision, leaf=leaf, devices=devices, elsewhere=())
            elif isinstance(decision, Fuse):
                if any(op in self.folded.stands_for or op in self.folded.counts for op in decision.ops):
                    raise LayersDifferError(f"'{self.plan.name}' fuses ops of layers that are one: '{decision.path}'")
                yield decision
            elif not isinstance(decision, OF_TIME):
                yield decision

    def some_again(self, on: Sequence[OnDevices], shares: Mapping[str, Mapping[int, float]]) -> tuple[float, Plan | None]:
        """Of layers of which some are computed again the part that is, and the plan without these; 1 and None elsewhere.

        Raises:
            LayersDifferError: of layers that are written out some are; or of several stacks, or stages, other parts.
        """
        stages_of: Mapping[str, Sequence[int | None]] = grouped((path, d.stage) for d in on for path in d.ops)
        parts: dict[tuple[str, int | None], float] = {}
        for path in (op for d in self.plan.decisions if isinstance(d, Recompute) for op in d.ops):
            bounds, own = layers_of(path), self.folded.of(path)
            around = chain_of(self.folded.graph.by_path[own].loop, self.folded.graph.loops) if bounds is not None else ()
            length = self.folded.graph.loops[around[0]].length if around else 1
            part = (1 if bounds is None else bounds[1] - bounds[0]) / length / self.folded.counts.get(own, 1)
            for stage in stages_of.get(path, [None]):
                of_stage = 1.0 if stage is None else shares[own][stage]
                parts[own, stage] = parts.get((own, stage), 0.0) + part / of_stage
        for own in {own for own, _ in parts}:
            parts = {(own, stage): 0.0 for stage in shares.get(own, ())} | parts
        some = {own for (own, _), part in parts.items() if part < 1 - 1e-9}
        if not some:
            return 1.0, None
        known = {round(part, 9) for (own, _), part in parts.items() if own in some}
        if len(known) > 1 or not some.isdisjoint(self.folded.counts):
            raise LayersDifferError(f"'{self.plan.name}' computes other parts of equal layers again")
        rest = (d for d in self.plan.decisions if not (isinstance(d, Recompute) and self.folded.of(d.ops[0]) in some))
        return known.pop(), replace(self.plan, decisions=tuple(rest))

    def _in_graph(self, path: str) -> bool:
        """Whether an op is of the graph: no taking apart of a stack, which stages have."""
        return path in self.folded.graph.by_path or path in self.fused

    def _grid(self, decision: Trans) -> Iterator[Trans]:
        path = self.folded.of(decision.op)
        if self.grids[decision.op] is decision and self._in_graph(path) and self._first(("split", path), True):
            axes = tuple(axis for axis in decision.axes if not axis.time)
            if axes or decision.op in self.assigned:
                yield replace(decision, op=path, axes=axes, chunks=())

    def _assigned(self, decision: Assign) -> Iterator[Assign]:
        path, axes = self.folded.of(decision.op), self.grids[decision.op].axes
        places = self._on_group(decision)
        index = tuple(box for box, axis in zip(decision.index, axes, strict=True) if not axis.time)
        if self._in_graph(path) and self._first(("places", path, str(index)), places):
            if len(places) != math.prod(stop - start for start, stop in index) or len({*places}) < len(places):
                raise NoPriceError(
                    f"cells of '{decision.op}' share devices, or parts in time have their own ({len(places)} places); "
                    "ask jscaler.cost"
                )
            yield replace(decision, op=path, index=index, places=places)

    def _on_group(self, decision: Assign) -> tuple[Place, ...]:
        """Its places on one group; many ops have one array of them."""
        key = id(decision.places)
        if key not in self.places:
            self.places[key] = tuple(replace(place, device=self.number[place.device]) for place in decision.places)
        return self.places[key]
