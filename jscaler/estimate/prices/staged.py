"""A candidate on several device groups: what each stage has of the program of one device, and when its blocks run."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jscaler.clusters import Cluster
from jscaler.estimate.live import LiveTensors
from jscaler.estimate.prices.candidate import Candidate
from jscaler.estimate.prices.in_time import InTime, iterations, source_of
from jscaler.estimate.prices.one_device import OneDevice
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.walk import closure
from jscaler.tables import BlockKind
from jscaler.tables.simulator import Turn, turn_tasks
from jscaler.tables.tasks import times_of

Part = dict[int, float]  # stage -> the part that it has of something
HALF = 0.5  # of a backward op that makes a gradient of a weight and one of an activation, for each


class Taken(NamedTuple):
    """Seconds of a step that an op computes, or that something takes to come to it.

    Attributes:
        often: whether each micro-batch takes a part of them.
        leaf: of a gradient its parameter, where that lies; else nothing.
    """

    path: str
    seconds: float
    often: bool
    leaf: str = ""


class Held(NamedTuple):
    """Bytes of a stage on a device of its group, beside arguments.

    Attributes:
        saved: what a forward leaves for its backward.
        halfway: what the first half of a backward (I) leaves for gradients of weights (W): cotangents.
        sums: gradients that add up over micro-batches.
        forward, backward: the most that a block of the kind has beside these.
        late: the most behind the last backward.
    """

    saved: float
    halfway: float
    sums: float
    forward: float
    backward: float
    late: float


def seconds_of_turns(
    turns: Sequence[Turn],
    blocks: Mapping[str, Part],
    once: Sequence[float],
    hop: Callable[[int, int], float],
    interference: float,
) -> float:
    """Of blocks in the order of a table, and of what each group does once.

    Args:
        blocks: seconds by kind and stage.
        hop: seconds from a group to another.
    """
    rows = range(len(once))
    places = [(row,) for row in rows]
    tasks, own = turn_tasks(turns, lambda cell: blocks[cell.kind].get(cell.stage, 0.0), hop, places)
    times, free = times_of(tasks, interference), dict.fromkeys(rows, 0.0)
    free.update((turn.row, times[number][1]) for turn, number in zip(turns, own, strict=True))
    return max(free[row] + once[row] for row in rows)


class Staged:
    """The sums of one candidate, stage by stage; ``local`` has the part of each tensor that a device holds at a time."""

    def __init__(
        self,
        candidate: Candidate,
        program: OneDevice,
        time: InTime,
        turns: tuple[Turn, ...],
        places: "Places",
        local: Mapping[str, float],
        cluster: Cluster,
    ):
        self.candidate, self.program, self.time, self.turns = candidate, program, time, turns
        self.local, self.cluster = local, cluster
        self.graph: Graph = program.graph
        self.count = len(candidate.stages)
        self.of_op, self.of_leaf, self.weights = places.of_op, places.of_leaf, places.weights
        self.kept_by_all = {number for number, *_ in program.equal_layers}
        self._hops: dict[tuple[int, int], float] = {}
        self.kinds = {cell.kind for turn in turns for cell in turn.entry.cells}
        self.kind = {op.path: _kind(op, "R" in self.kinds) for op in self.graph.ops}

    def seconds(self, blocks: Mapping[str, Part], once: Sequence[float]) -> float:
        """Of a step: its blocks in the order of the table, and what each group does once."""
        return seconds_of_turns(self.turns, blocks, once, self._hop, self.cluster.interference)

    def busy(self, blocks: Mapping[str, Part], once: Sequence[float]) -> list[float]:
        """Seconds that each group has to do."""
        found = [*once]
        for turn in self.turns:
            found[turn.row] += sum(blocks[cell.kind].get(cell.stage, 0.0) for cell in turn.entry.cells)
        return found

    def least_blocks(self, blocks: Mapping[str, Part]) -> tuple[float, float, float]:
        """Seconds of all F, all B and all I of a step, as if all stages took as long as the fastest."""
        often = self.count * self.candidate.microbatches
        forward, backward, cotangent = (often * min(blocks[kind].values(), default=0.0) for kind in "FBI")
        return forward, backward, cotangent

    def blocks(self, taken: Iterable[Taken], computing: bool) -> tuple[dict[str, Part], list[float]]:
        """Seconds of a block by kind and stage; and of each group what it does once.

        Args:
            computing: whether ``taken`` is all that ops compute, or more.
        """
        blocks: dict[str, Part] = {kind: {} for kind in ("F", "B", "I", "W", "R")}
        if computing and "W" in self.kinds:  # what lies between the halves of a backward is written and read
            moved = (self.program.device.kernel_seconds((), nbytes) for nbytes in self._halfway)
            blocks["I"] = dict(enumerate(moved))
            blocks["W"] = dict(blocks["I"])
        once = [0.0] * len(self.candidate.groups)
        for one in taken:
            kind, weights = self.kind.get(one.path, "B"), self.weights.get(one.path, 0.0)
            own = self.of_leaf.get(one.leaf) or self.of_op.get(one.path) or {self.count - 1: 1.0}
            for stage, part in own.items():
                seconds = one.seconds * part
                if not one.often:
                    once[self.candidate.stages[stage]] += seconds
                    continue
                each = seconds / self.candidate.microbatches
                of_kind = {kind: each} if kind != "B" else {"B": each, "I": (1 - weights) * each, "W": weights * each}
                for name, taken_each in of_kind.items():
                    blocks[name][stage] = blocks[name].get(stage, 0.0) + taken_each
        return blocks, once

    def _hop(self, first: int, second: int) -> float:
        """Seconds of what goes from a group to another, for one micro-batch.

        Of what several devices of a group have each sends a part, and those of the other gather these, where that pays.
        """
        if (first, second) not in self._hops:
            groups, number = self.candidate.groups, self.candidate.plan.num_devices
            pairs = np.array(list(zip(*(groups[n] for n in (first, second)), strict=True)))
            whole, local = self._crossing
            part = whole / len(groups[second])
            found = self.cluster.messages(pairs, local, number)
            if part < local:
                count = round(local / part)
                gather = self.cluster.collective("all_gather", np.array(groups[second]).reshape(-1, count))
                found = min(found, self.cluster.messages(pairs, part, number) + gather.at(local - part))
            self._hops[first, second] = found
        return self._hops[first, second]

    @cached_property
    def _crossing(self) -> tuple[float, float]:
        """Bytes of the largest of what goes from a stage to the next, for one micro-batch: whole, and those of a device."""
        sent: dict[tuple[int, int], np.ndarray] = {}

        def nbytes(tensor: PTensor) -> np.ndarray:
            size = math.prod(tensor.shape) * tensor.itemsize
            return np.array([size / self.time.shares[tensor.name], size * self.local.get(tensor.name, 1.0)])

        for op in self.graph.of_kind("forward"):
            here = self.of_op.get(op.path, {})
            for tensor in op.inputs:
                maker = self.graph.producer.get(tensor)
                there = self.of_op.get(maker.path, {}) if maker is not None else {}
                if there and self.time.shares.get(tensor.name, 1) > 1 and there != here:
                    ends = min(there), min(here, default=0)
                    sent[ends] = sent.get(ends, 0.0) + nbytes(tensor)
        for loop in self.graph.loops.values():
            carries = [c.inside for c in loop.carries if self.time.shares.get(c.inside.name, 1) > 1 and not c.is_sum]
            if loop.forward is None:
                sent[loop.length, 0] = sum(map(nbytes, carries), np.zeros(2))
        whole, local = max(sent.values(), key=lambda own: own[1], default=np.zeros(2))
        return float(whole), float(local)

    def peak(self, sizes: np.ndarray, sums: np.ndarray, arguments: Mapping[str, int]) -> tuple[float, float]:
        """Bytes on a device of the group that holds most; and of arguments and sums of gradients, the most of a group.

        Args:
            sizes: of each buffer, for one micro-batch.
            sums: whether it is a gradient that adds up over micro-batches.
        """
        held = [self.held(stage, sizes, sums) for stage in range(self.count)]
        group_of = self.candidate.stages
        fixed, live = self._fixed(arguments), np.zeros(len(self.candidate.groups))
        worst = fixed.copy()
        for stage, own in enumerate(held):
            worst[group_of[stage]] = max(worst[group_of[stage]], fixed[group_of[stage]] + own.late)
        for stage, own in enumerate(held):
            fixed[group_of[stage]] += own.sums
        for turn in self.turns:
            for cell in turn.entry.cells:
                own = held[cell.stage]
                live[turn.row] += {"F": own.saved, "I": own.halfway}.get(cell.kind, 0.0)
                beside = own.forward if cell.kind == "F" else own.backward
                worst[turn.row] = max(worst[turn.row], fixed[turn.row] + live[turn.row] + beside)
                live[turn.row] -= {"B": own.saved, "W": own.saved + own.halfway}.get(cell.kind, 0.0)
        return float(worst.max()), float(fixed.max())

    def _fixed(self, arguments: Mapping[str, int]) -> np.ndarray:
        """Bytes of arguments on a device of each group."""
        fixed = np.zeros(len(self.candidate.groups))
        for name, nbytes in arguments.items():
            for stage, part in self.of_leaf.get(name, {0: 1.0}).items():
                fixed[self.candidate.stages[stage]] += nbytes * part
        return fixed

    def held(self, stage: int, sizes: np.ndarray, sums: np.ndarray) -> "Held":
        """What a stage holds."""
        program = self.program
        own = sizes * np.array([self._part_of(n, stage) for n in range(len(sizes))])
        saved = self._crosses & ~sums
        rest, moments = ~saved & (own > 0), np.arange(len(program.ops))

        def timeline(last: np.ndarray) -> np.ndarray:
            change = np.zeros(len(program.ops) + 1)
            np.add.at(change, program.first[rest], own[rest])
            np.add.at(change, last[rest] + 1, -own[rest])
            return program.scratch + np.cumsum(change)[:-1]

        forward = np.array([path in self._forward for path in program.ops], bool)
        update = moments >= program.update
        # Slices of a stack are added to its sum one by one.
        added = np.where(sums & program.is_stack, program.first - 1, program.last)
        held = timeline(added)
        front, back = (held[at].max(initial=0.0) for at in (forward & ~update, ~forward & ~update))
        late = timeline(program.last)[update].max(initial=0.0)
        return Held(own[saved].sum(), self._halfway[stage], own[sums].sum(), front, back, late)

    @cached_property
    def _halfway(self) -> list[float]:
        """Of each stage bytes that products read which make gradients of weights: cotangents, which other ops read, too;
        and what is computed again."""
        return [self._halfway_of(stage) for stage in range(self.count)]

    def _halfway_of(self, stage: int) -> float:
        found: dict[str, float] = {}
        for op in self.graph.of_kind("backward"):
            part = self.of_op.get(op.path, {}).get(stage, 0.0)
            own = self.program.kernels.get(op.path)
            is_product = own is not None and any(one.sizes for kernel in own.kernels for one in kernel.flops)
            if part and is_product and self.weights.get(op.path):
                often = part * self.program.count(op.path) * iterations(op, self.graph)
                makers = ((t, self.graph.producer.get(t)) for t in op.inputs)
                read = [t for t, maker in makers if maker is not None and maker.again is not None]
                read += [t for _, t in op.cotangents]
                found.update({t.name: often * math.prod(t.shape) * t.itemsize * self.local.get(t.name, 1.0) for t in read})
        return sum(found.values())

    @cached_property
    def _forward(self) -> frozenset[str]:
        """The ops of the forward pass."""
        return frozenset(op.path for op in self.graph.ops if op.kind == "forward" and op.again is None)

    @cached_property
    def _crosses(self) -> np.ndarray:
        """Of each buffer whether a forward leaves it for its backward."""
        crosses = (self.program.first < self.program.front) & (self.program.last >= self.program.front)
        return crosses & np.array([one.op in self._forward for one in self.program.buffers], bool)

    def _part_of(self, number: int, stage: int) -> float:
        """How often a stage has a buffer: of what an iteration has, or a layer alone, once."""
        one = self.program.buffers[number]
        part = (self._of_carries.get(one.tensor) or self.of_op.get(one.op, {})).get(stage, 0.0)
        if not part or number not in self.kept_by_all:
            return 1.0 if part and (one.in_loop or self.program.count(one.op) > 1) else part
        return part * self.program.count(one.op)

    @cached_property
    def _of_carries(self) -> dict[str, Part]:
        """Which stages have a stack of what a loop over layers hands on: those that have the layers."""
        inside = {op.loop: self.of_op[op.path] for op in self.graph.ops if op.loop is not None and op.path in self.of_op}
        loops = self.graph.loops.values()
        carries = {carry.inside for loop in loops for carry in loop.carries}
        return {
            y.stack.name: inside[loop.name] for loop in loops for y in loop.ys if y.slice in carries and loop.name in inside
        }


def _kind(op: Op, recompute: bool) -> BlockKind:
    if op.again is not None:
        return "R" if recompute else "B"
    return "F" if op.kind == "forward" else "B"


@dataclass(frozen=True)
class Places:
    """Which stages have what.

    Attributes:
        of_op: path of an op -> the part of it that each stage has.
        of_leaf: the same by name of an input.
        weights: path of a backward op -> the part of it that is for gradients of weights.
    """

    of_op: Mapping[str, Part]
    of_leaf: Mapping[str, Part]
    weights: Mapping[str, float]

    @staticmethod
    def of(graph: Graph, shares: Mapping[str, Mapping[int, float]]) -> "Places":
        """What a plan does not place is where its operands are made, or where parameters are read."""
        of_op: dict[str, Part] = {}
        for op in graph.ops:
            own = shares.get(source_of(op).path)
            if own is not None:
                of_op[op.path] = dict(own)
        of_leaf: dict[str, Part] = {}
        for leaf in graph.inputs:
            found = _merged(of_op.get(reader.path, {}) for reader in _readers(graph, leaf))
            if found:
                of_leaf[leaf.name] = found
        inputs = frozenset(graph.inputs)
        for _ in range(2):  # what reads state, and state that only that reads
            for op in (op for op in graph.ops if op.path not in of_op):
                arrays = [t for t in op.inputs if t.shape]
                makers = [(t, graph.producer.get(t) or graph.flow.maker(t)) for t in arrays]
                found = _merged(
                    of_leaf.get(t.name, {}) if maker is None else of_op.get(maker.path, {}) for t, maker in makers
                )
                if found:
                    if op.kind == "update" and set(found.values()) == {1.0}:
                        found = {min(found): 1.0}  # of what several stages read the first has the update
                    of_op[op.path] = found
                    for leaf in inputs.intersection(op.inputs):
                        of_leaf.setdefault(leaf.name, found)
        return Places(of_op, of_leaf, _weights(graph))


def _weights(graph: Graph) -> dict[str, float]:
    gradients = {t for t, kind in LiveTensors(graph).kinds.items() if kind == "gradient"}
    found = {}
    for op in graph.of_kind("backward"):
        of_weights = {t in gradients for t in op.outputs}
        found[op.path] = HALF if len(of_weights) == 2 else float(of_weights == {True})
    return found


def _merged(parts: Iterable[Mapping[int, float]]) -> Part:
    """Of each stage the largest part."""
    found: Part = {}
    for part in parts:
        found.update({stage: max(found.get(stage, 0.0), share) for stage, share in part.items()})
    return found


def _readers(graph: Graph, leaf: PTensor) -> Iterator[Op]:
    """The forward ops that read an input, also in loops; behind a loop that begins with it is what the loop makes of it."""
    reached = closure([leaf], lambda tensor: graph.flow.targets(tensor, "slice", "entry"))
    readers = (op for t in reached for op in graph.consumers.get(t, ()))
    yield from (op for op in readers if op.kind == "forward")
