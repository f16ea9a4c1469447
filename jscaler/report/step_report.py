"""``StepReport``: a planned step as data, for people (`explain`) and for programs (``as_json``)."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jscaler.clusters import Bytes
from jscaler.estimate.loops_apart import loops_apart
from jscaler.estimate.lost_parallelism import LostParallelism, lost_parallelism
from jscaler.estimate.memory import Memory, estimated_memory
from jscaler.estimate.traffic import Moved, summed
from jscaler.ir import Graph, Op
from jscaler.ir.kinds import TensorKind, tensor_kinds
from jscaler.ir.loop import chain_of, in_time
from jscaler.ir.op import OpKind
from jscaler.ir.walk import grouped
from jscaler.lower.spanning_loop import Transfer
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import Completed
from jscaler.materialize.placement import Placement, RunnerUp
from jscaler.report.block_rows import BlockRow, block_rows
from jscaler.report.leaves import LeafRow, leaf_rows, local_bytes
from jscaler.report.moved_tensors import MovedTensor, moves_by_reader
from jscaler.report.recomputed import recomputed_lines
from jscaler.report.replicated import replicated_lines
from jscaler.report.schedule_rows import ScheduleRow, schedule_rows
from jscaler.report.step_text import layout_text
from jscaler.text.folding import folded
from jscaler.text.units import readable_bytes

# ops that a loop over parts is made of, beside those of the program (`schedule.part_loop`)
OWN_MARKS = ("@cut", "@merge", "@start", "@more", "@cast", ":count")


@dataclass(frozen=True)
class OpRow:
    """Ops that are alike but for layer numbers.

    Attributes:
        kind: forward, backward or update.
        path: their path, layer numbers as ``*``.
        count: how often they run in a step, over all iterations of loops.
        split: what the mesh axes mean for them: ``a:2 share:4``.
        factors: what the factors are that are split, or that the runners-up split: ``a=tokens[0]``.
        origin: who decided: ``policy``, ``mirrored`` or ``filled``.
        decided: the same with the reason.
        layout: how they leave their (first) result, in R V D text.
        runners_up: the best that was not taken, per axis that was filled in by price.
        moves: what stands in front of them, one per tensor and way.
        idle: copied because all that they read is copied: nothing was to be decided, and nothing is sent.
        again: forward ops that run once more, for the backward pass.
        in_time: the time axes whose parts they run for, outermost first: ``microbatch:8 co_shard:4``.
        devices: of the group that they run on.
        home: why they run there, where the policy does not say so.
    """

    kind: OpKind
    path: str
    count: int
    split: str
    origin: str
    decided: str
    layout: str
    runners_up: tuple[RunnerUp, ...] = ()
    moves: tuple[MovedTensor, ...] = ()
    idle: bool = False
    again: bool = False
    in_time: str = ""
    devices: tuple[int, ...] = ()
    home: str = ""
    factors: str = ""

    @property
    def moved(self) -> Moved:
        """All collectives in front of them."""
        return summed([move.moved for move in self.moves])


@dataclass(frozen=True)
class KindBytes:
    """The tensors of one kind: how many, their bytes, and how many of these a device holds: that which holds most of all
    kinds together."""

    kind: TensorKind
    count: int
    nbytes: int
    nbytes_per_device: int


@dataclass(frozen=True)
class CrossedTensor:
    """A tensor that goes from one device group to another.

    Attributes:
        source, target: the devices of both groups.
        before, after: the layouts in which it leaves and arrives.
        nbytes: what all devices send between the groups, over all micro-batches.
        times: how often, in a step.
    """

    tensor: str
    source: list[int]
    target: list[int]
    before: str
    after: str
    nbytes: int
    times: int = 1


@dataclass(frozen=True)
class StepReport:
    """What a plan makes of a step.

    Attributes:
        groups: of each device group, mesh axis -> size.
        num_decisions: of the policy; everything else was filled in.
        ops: groups of like ops, in the order of the program; what cuts and joins the parts of time axes is left out where
            nothing is sent for it.
        leaves: groups of like leaves of the step's arguments.
        memory: bytes by kind of tensor.
        estimate: what lives at the worst moment, with donated state in place.
        results: what is moved for the step's results.
        not_sharded: what lies whole along the axes of the plan's shards, a line each, and why.
        unit: of the runners-up: ``bytes`` (a launch counts as some, too) or ``seconds``.
        recomputed: what is computed again for the backward pass, a line per group of like regions, and what is kept.
        crossings: what goes from device group to device group, in the order of the program.
        idle: devices of the plan that no op and no leaf lies on.
        schedule: for each group of a loop over groups what it runs, and when.
        blocks: what groups run between crossings, in the order of the program; none where one program is all.
        lost: ops that are copied, and tensors that are gathered, though the plan splits what they carry.
        apart: why micro-batches run in several loops, and what that holds; empty where they do not.
    """

    plan: str
    digest: str
    num_devices: int
    groups: tuple[Mapping[str, int], ...]
    num_decisions: int
    ops: tuple[OpRow, ...]
    leaves: tuple[LeafRow, ...]
    memory: tuple[KindBytes, ...]
    estimate: Memory
    results: tuple[MovedTensor, ...]
    not_sharded: tuple[str, ...] = ()
    unit: str = "bytes"
    recomputed: tuple[str, ...] = ()
    crossings: tuple[CrossedTensor, ...] = ()
    idle: tuple[int, ...] = ()
    schedule: tuple[ScheduleRow, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    lost: LostParallelism = field(default_factory=LostParallelism)
    apart: str = ""

    @property
    def total(self) -> Moved:
        """All collectives of a step."""
        return summed([move.moved for moves in (*(row.moves for row in self.ops), self.results) for move in moves])

    @property
    def replicated(self) -> tuple[LeafRow, ...]:
        """State that is whole on every device, though other state of its kind is split."""
        split = {row.kind for row in self.leaves if not row.replicated and row.kind != "input"}
        return tuple(row for row in self.leaves if row.replicated and row.kind in split)

    def as_json(self) -> dict[str, Any]:
        """Dictionaries, lists, numbers and text only."""
        found = dataclasses.asdict(self) | {"total": self.total}
        return _plain(found)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def step_report(step: StepPlan) -> StepReport:
    """Gather the report of a planned step."""
    graph, plan, completed, cost = step.graph, step.plan, step.completed, step.cost
    moves, lost = moves_by_reader(step.segments), lost_parallelism(step)
    spanning = step.spanning
    return StepReport(
        plan.name,
        plan.digest,
        plan.num_devices,
        tuple(dict(group.axes) for group in completed.groups),
        len(plan.decisions),
        _op_rows(graph, completed, moves, {op.path for op in lost.ops}),
        leaf_rows(graph, plan, completed, cost),
        memory_rows(graph, completed),
        estimated_memory(step).memory,
        grouped_moves(moves.get("", [])),
        tuple(replicated_lines(graph, plan, completed)),
        "bytes" if isinstance(cost, Bytes) else "seconds",
        tuple(recomputed_lines(graph)),
        tuple(
            _crossed(transfer, spanning.loop.length if spanning and transfer.phase in spanning.phases else 1)
            for transfer in step.sent
        ),
        tuple(sorted({*range(plan.num_devices)} - {d for group in completed.groups for d in group.devices})),
        schedule_rows(step),
        block_rows(step) if len(step.blocks) > 1 else (),
        lost,
        loops_apart(step),
    )


def _crossed(transfer: Transfer, times: int) -> CrossedTensor:
    before, after = transfer.crossing.source, transfer.crossing.target
    devices = list(before.mesh.devices), list(after.mesh.devices)
    sent = times * transfer.crossing.sent * transfer.tensor.itemsize
    return CrossedTensor(transfer.tensor.name, *devices, layout_text(before), layout_text(after), sent, times)


def _op_rows(
    graph: Graph, completed: Completed, moves: Mapping[str, Sequence[MovedTensor]], lost: Set[str]
) -> tuple[OpRow, ...]:
    groups: dict[tuple[Any, ...], list[Op]] = {}
    for op in graph.ops:
        laid = completed.ops[op.path]
        place, left = laid.placement, laid.outputs[0].counts if laid.outputs else ""
        split = place.describe()
        home = place.group.devices, completed.homes[op.path].why
        key = (
            op.kind,
            folded(op.path),
            split,
            place.origin,
            f"{why(place)}; lost, see below" if op.path in lost else why(place),
            left,
            place.runners_up,
            in_time(op, graph.loops),
            *home,
        )
        groups.setdefault(key, []).append(op)
    rows = []
    for (kind, path, split, origin, decided, left, runners_up, timed, *home), ops in groups.items():
        mine = grouped_moves([move for op in ops for move in moves.get(op.path, [])])
        moved = any(m.moved for m in mine)
        if timed and not moved and any(mark in path for mark in OWN_MARKS):
            continue
        idle = not moved and origin != "policy" and split == "copy" and not runners_up and not timed
        idle = idle and all(op.path not in lost for op in ops)
        count = sum(_times(graph, op) for op in ops)
        again = any(op.again is not None for op in ops)
        row = OpRow(kind, path, count, split, origin, decided, left, runners_up, mine, idle, again, timed, *home)
        rows.append(dataclasses.replace(row, factors=_factors(graph, ops[0], completed)))
    return tuple(rows)


def _factors(graph: Graph, op: Op, completed: Completed) -> str:
    """What the factors are that an op is split along, or would be by its runners-up."""
    place = completed.ops[op.path].placement
    others = [word.partition(":")[0] for other in place.runners_up for word in other.what.split()]
    return graph.factors_text(op, dict.fromkeys((*place.parts, *others)))


def _times(graph: Graph, op: Op) -> int:
    """How often loops run it."""
    return math.prod(graph.loops[name].length for name in chain_of(op.loop, graph.loops))


def grouped_moves(moves: Sequence[MovedTensor]) -> tuple[MovedTensor, ...]:
    """One per tensor and way, layer numbers folded."""
    groups = grouped(((folded(move.tensor), move.way), move.moved) for move in moves if move.moved)
    return tuple(MovedTensor(tensor, way, summed(moved)) for (tensor, way), moved in groups.items())


def why(placement: Placement) -> str:
    """Who decided a placement, and for what reason."""
    if placement.origin == "policy":
        return "policy"
    if placement.origin == "mirrored":
        return "mirrored, shares passed on" if placement.shares else "mirrored"
    if placement.shares:
        return "filled: passes value shares on"
    if placement.factors:
        return "filled: the split of its inputs" if placement.runners_up else "filled: the split that its reader wants"
    return "filled: whole values cost least" if placement.runners_up else "filled: nothing to split along"


def memory_rows(graph: Graph, completed: Completed) -> tuple[KindBytes, ...]:
    """Bytes by kind. A gradient counts in the layout in which its (first) reader takes it, value shares joined."""
    kinds = tensor_kinds(graph)
    laid = {t: layout for t, layout in completed.inputs.items() if t in kinds}
    for op in graph.ops:
        placed = completed.ops[op.path]
        for tensor, layout in zip(op.inputs, placed.inputs, strict=True):
            if kinds.get(tensor) == "gradient" and tensor not in laid:
                laid[tensor] = layout
    for tensor, layout in zip(graph.outputs, completed.outputs, strict=True):
        laid.setdefault(tensor, layout)  # a gradient that the step only returns
    held: dict[int, Counter[TensorKind]] = {d: Counter() for group in completed.groups for d in group.devices}
    whole, count = Counter[TensorKind](), Counter(kinds.values())
    for tensor, kind in kinds.items():
        layout = laid.get(tensor)
        whole[kind] += tensor.nbytes
        for device in held if layout is None else layout.mesh.devices:
            held[device][kind] += tensor.nbytes if layout is None else local_bytes(tensor, layout)
    fullest = max(held.values(), key=Counter.total)
    order: Sequence[TensorKind] = ("parameter", "gradient", "optimizer", "input")
    return tuple(KindBytes(kind, count[kind], whole[kind], fullest[kind]) for kind in order)


def memory_text(rows: Sequence[KindBytes]) -> str:
    """``parameter 1.2 GiB of 4.9 GiB, input 16.0 KiB of 128.0 KiB``: of a device, and whole."""
    shown = (row for row in rows if row.count)
    return ", ".join(f"{row.kind} {readable_bytes(row.nbytes_per_device)} of {readable_bytes(row.nbytes)}" for row in shown)
