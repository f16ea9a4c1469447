"""``StepPlan``: a plan completed for one graph, and the programs that it lowers to, as data."""

import functools
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from jscaler.clusters import FEW_STEPS, CostModel
from jscaler.errors import PlanError, shown
from jscaler.ir import Graph, PTensor, VTensor
from jscaler.ir.passes import Passes
from jscaler.ir.walk import grouped
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.instructions import Instructions, Run, Send
from jscaler.lower.program import Program
from jscaler.lower.segment import PlacedBlock, Segment, only
from jscaler.lower.spanning_loop import SpanningLoop, Transfer
from jscaler.materialize import Completed, DeviceMesh, Layout
from jscaler.primitives import Plan
from jscaler.primitives.shard_checks import stored_leaves
from jscaler.rules.made_of import made_of
from jscaler.tables.table import most_live
from jscaler.text.units import counted


@dataclass(frozen=True)
class StepPlan:
    """A plan completed for one graph, and the program it lowers to.

    Attributes:
        source: the graph as the policy saw it, with backward bodies.
        graph: the same with the ops cut that the plan re-opens.
        segments: what runs: one for each device group and phase.
        passes: what was done in between, and to the flat programs.
        transfers: what crosses from group to group.
        spanning: the loop whose ops lie on several groups, if there is one.
        instructions: in which order blocks run, and what is sent.
        blocks: what runs, each an executable: those of the segments, or several of these as one; of one group one.
        has_time_axes: whether parts of ops run one after another.
        captured: the graph before the plan.
        pieces: path of an op that the plan re-opens -> paths of the ops that stand for it.
    """

    source: Graph
    graph: Graph
    plan: Plan
    completed: Completed
    segments: tuple[Segment, ...]
    passes: Passes = field(compare=False)
    cost: CostModel = FEW_STEPS
    transfers: tuple[Transfer, ...] = ()
    spanning: SpanningLoop | None = None
    instructions: Instructions = field(default_factory=lambda: Instructions((), 0, {}))
    blocks: tuple[PlacedBlock, ...] = ()
    has_time_axes: bool = False
    captured: Graph | None = field(default=None, compare=False)
    pieces: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @functools.cached_property
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """For each block the numbers of the step's inputs that it takes; constants stand behind them."""
        number = {t: i for i, t in enumerate(self.graph.inputs)}
        return tuple(tuple(number[t] for t in block.takes if t in number) for block in self.blocks)

    @functools.cached_property
    def last_taken(self) -> dict[int, int]:
        """Of each of the step's inputs the last block that takes it."""
        return {i: number for number, taken in enumerate(self.taken) for i in taken}

    @functools.cached_property
    def renewed(self) -> Set[int]:
        """The step's inputs of which a result is the next version."""
        return set(self.graph.next_version.values())

    @functools.cached_property
    def importing(self) -> dict[int, list[PlacedBlock]]:
        """The blocks that each value goes to."""
        return grouped((value, block) for block in self.blocks for value in dict.fromkeys(block.imports))

    def runs_of(self, number: int) -> int:
        """How often a block runs in a step."""
        steps = self.instructions.steps
        return sum(isinstance(one, Run) and one.block == number for one in steps)

    @property
    def sent(self) -> tuple[Transfer, ...]:
        """What crosses between groups; the others' targets nobody reads in the end."""
        numbers = {step.transfer for step in self.instructions.steps if isinstance(step, Send)}
        return tuple(transfer for number, transfer in enumerate(self.transfers) if number in numbers)

    @property
    def under_way(self) -> dict[DeviceMesh, int]:
        """How many micro-batches are under way at most on each group of a loop over groups."""
        table = self.instructions.table
        if self.spanning is None or table is None:
            return {}
        groups = [block.group for block in self.blocks if block.phase in self.spanning.phases]
        rows = zip(self.instructions.groups, table.rows, strict=True)
        return {group: most_live(row) if groups.count(group) > 1 else 1 for group, row in rows}

    def block_name(self, number: int) -> str:
        """How a block is called: its cells of the table (``0F``, ``1F 1B``), and the turn; outside the loop ``block 7``.

        What a stage does besides its layers of a stack is its ``end``: ``0F end``.
        """
        cells = self.instructions.names.get(number, ())
        name = " ".join(f"{stage}{kind}" for stage, kind in cells) or f"block {number}"
        name += " end" if number in self.instructions.ends else ""
        turn = self.blocks[number].phase - self.spanning.phases.start if self.spanning is not None and cells else 0
        return f"{name}, turn {turn}" if turn else name

    def __repr__(self) -> str:
        blocks, devices = counted(len(self.blocks), "block"), counted(self.plan.num_devices, "device")
        return f"{type(self).__name__}({self.name}, {blocks} on {devices})"

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def digest(self) -> str:
        return self.plan.digest

    @property
    def program(self) -> Program:
        """The program of a step that runs on one group."""
        return only(self.segments, "its program").program

    @property
    def flat(self) -> FlatProgram:
        """The flat program of a step that runs on one group."""
        return only(self.segments, "its flat program").flat

    @property
    def layouts(self) -> dict[PTensor, Layout]:
        """How inputs lie, how every op leaves its results, and every loop; in its body what it hands to an iteration."""
        laid, found = self.completed, dict(self.completed.inputs)
        for op in self.graph.ops:
            found.update(zip(op.outputs, laid.ops[op.path].outputs, strict=True))
        for name, loop in self.graph.loops.items():
            carries, xs, ys = laid.loops[name].carries, laid.loops[name].xs, laid.loops[name].ys
            found.update((t, at) for c, at in zip(loop.carries, carries, strict=True) for t in (c.inside, c.final))
            found.update((x.slice, at) for x, at in zip(loop.xs, xs, strict=True))
            found.update((y.stack, at.stacked(loop.length)) for y, at in zip(loop.ys, ys, strict=True))
        return found

    @property
    def refetched(self) -> Set[PTensor]:
        """What is made whole for the forward pass, and again for the backward pass: parameters that lie in parts."""
        if any(op.joins_shards for op in self.graph.ops):  # they are put together once for both
            return frozenset()
        return made_of(self.source, stored_leaves(self.source, self.plan)).dims.keys()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan's decisions to a file, which `Plan.load` reads; raises PlanFileError."""
        self.plan.save(path)

    def vtensors(self, path: str, device: int) -> tuple[tuple[VTensor, ...], tuple[VTensor, ...]]:
        """The parts of tensors that the cell of op ``path`` on logical ``device`` reads, and those that it writes."""
        return self.completed.ops[path].vtensors(self.graph[path], device)


def step_of(function: str, given: Any) -> StepPlan:
    """``given``, or the plan of the lowered or compiled step that it is; raises PlanError for anything else."""
    step = given if isinstance(given, StepPlan) else getattr(given, "plan", None)
    if not isinstance(step, StepPlan):
        raise PlanError(f"{function} takes a lowered step, train_step.lower(state, batch), or its plan, not {shown(given)}")
    return step


def graph_of(function: str, given: Any) -> Graph:
    """``given``; of a lowered or compiled step, or its plan, the graph before the plan. Raises PlanError for all else."""
    step = given if isinstance(given, StepPlan) else getattr(given, "plan", None)
    graph = step.captured if isinstance(step, StepPlan) else given
    if not isinstance(graph, Graph):
        raise PlanError(
            f"{function} takes a train step's graph, train_step.graph(state, batch), or a lowered step, "
            f"train_step.lower(state, batch), not {shown(given)}"
        )
    return graph


def decisions_of(given: Any) -> Any:
    """The `Plan` behind what it has become: a lowered step, or its plan; all else as it is."""
    step = getattr(given, "plan", None)
    if isinstance(step, StepPlan):
        return step.plan
    return step if isinstance(step, Plan) and not callable(given) else given
