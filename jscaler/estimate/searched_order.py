"""The order of a step's blocks, searched for these very blocks: what ``find_schedule`` and ``schedule="search"`` do."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.clusters import Cluster, CostModel, find_cluster
from jscaler.errors import PlanError
from jscaler.estimate.block_costs import block_seconds, hop_seconds
from jscaler.estimate.schedule_problem import Limit, schedule_problem
from jscaler.estimate.timed_step import timed_step
from jscaler.lower.step_plan import StepPlan
from jscaler.plans.stage_groups import BALANCED_FOR
from jscaler.primitives import Plan
from jscaler.primitives.plan import Schedule
from jscaler.stages import Captured, lower, reordered
from jscaler.tables import Table, TableCell
from jscaler.tables.recomputing import MARKS
from jscaler.tables.search.result import FoundSchedule
from jscaler.tables.search.schedule_search import search_schedule
from jscaler.tables.searched import SEARCHED, in_two
from jscaler.tables.table import cells_of
from jscaler.text.units import readable_seconds

LIMIT = 20.0  # seconds of the solver, for each kind of blocks
NAMES = SEARCHED.name, *(SEARCHED.name + mark for mark in MARKS.values())
MARGIN = 0.9  # of a device's memory: estimates of peaks may be low


@dataclass(frozen=True)
class Searched:
    """An order of the blocks of a step that was searched.

    Attributes:
        table: the order, a `jscaler.Table` like any other: ``print`` it, save it, give it to ``pipeline(schedule=)``.
        seconds: of a step that follows it, as `jscaler.simulate` has it.
        before: of the step in the order that it had.
        loop: seconds, lower bound and peaks of the loop over micro-batches alone.
    """

    table: Table
    seconds: float
    before: float
    loop: FoundSchedule

    @property
    def bound(self) -> float:
        """Seconds that the loop over micro-batches takes in any order of these blocks."""
        return self.loop.bound

    @property
    def gap(self) -> float:
        """How much longer the loop is than the bound, as a share of the bound."""
        return self.loop.gap

    @property
    def proved(self) -> bool:
        """Whether no order of these blocks is shorter."""
        return self.loop.proved

    def __str__(self) -> str:
        proof = "no order of these blocks is shorter" if self.proved else f"at most {self.gap:.1%} above the least"
        return (
            f"{readable_seconds(self.seconds)} a step, {readable_seconds(self.before)} before; its loop over "
            f"micro-batches is {proof} ({self.loop.source})\n{self.table}"
        )


def searched_order(
    step: StepPlan,
    blocks: Sequence[float],
    hops: Sequence[float],
    memory: Limit,
    limit: float,
    seed: int,
    on: Cluster | None = None,
) -> Searched:
    """The best order of ``step``; raises as `jscaler.find_schedule`.

    Args:
        blocks, hops: seconds of a run of each block, and of each transfer.
        memory: bytes of each device, or of those of a group; None for no limit.
        limit: seconds of the solver.
        on: by whose interference sends slow down blocks: in what is said of the step, not in the search.
    """
    problem, table = schedule_problem(step, blocks, hops, memory)
    found = search_schedule(problem, limit, seed, [table])
    best = _parts_together(step, found.table)
    before, after = (_makespan(one, blocks, hops, on) for one in (step, reordered(step, best)))
    return Searched(best, after, before, found)


def _parts_together(step: StepPlan, table: Table) -> Table:
    """``table`` with cells that are one block of ``step`` right behind each other, as they run.

    Else a step that is planned by the table would have blocks of their own for them, which the search has not seen.
    """
    parts = {first: rest for first, *rest in step.instructions.names.values()}
    moved = {name for rest in parts.values() for name in rest}
    named = set(table.cells())
    rows: list[list[TableCell]] = [[] for _ in table.rows]
    for row, own in zip(rows, table.rows, strict=True):
        for cell in (cell for cell in cells_of(own) if (cell.stage, cell.kind) not in moved):
            behind = (TableCell(*name, cell.microbatch) for name in parts.get((cell.stage, cell.kind), ()))
            row += [cell, *(one for one in behind if one in named)]
    return Table(tuple(map(tuple, rows)))


def most_of(cluster: Cluster) -> Limit:
    """What the devices of a group may hold; no limit where the cluster does not say how much they have."""
    return (lambda devices: MARGIN * cluster.of(devices).memory) if cluster.memory else None


def _makespan(step: StepPlan, blocks: Sequence[float], hops: Sequence[float], on: Cluster | None) -> float:
    runs, _ = timed_step(step, blocks, hops, on=on)
    return max((run.end for run in runs), default=0.0)


def with_searched_schedule(captured: Captured, plan: Plan, cost: CostModel) -> Plan:
    """``plan`` with the best table for its blocks in the place of ``schedule="search"``.

    Raises:
        PlanError: no order keeps within the devices' memory.
        JscalerError: OR-Tools is not installed.
    """
    if not any(isinstance(d, Schedule) and d.table in NAMES for d in plan.decisions):
        return plan
    known = isinstance(cost, Cluster) and cost.device is not None
    cluster = cost if known else find_cluster(f"{plan.num_devices}x{BALANCED_FOR}")
    assert isinstance(cluster, Cluster)
    whole = lower(captured, plan, cost)
    table, loop = whole.instructions.table, whole.spanning
    if table is None or loop is None:
        return plan  # of one group: nothing to order
    steps = [whole]
    if any(cell.kind == "B" for cell in table.cells()):
        steps.append(lower(captured, _with_table(plan, in_two(table)), cost))
    found: list[Searched] = []
    failed: list[PlanError] = []
    for step in steps:
        prices = block_seconds(step, cluster), hop_seconds(step, cluster)
        try:
            found.append(searched_order(step, *prices, most_of(cluster), LIMIT, 0, cluster))
        except PlanError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    return _with_table(plan, min(found, key=lambda one: one.seconds).table)


def _with_table(plan: Plan, table: Table) -> Plan:
    """``plan`` with this table for its loop over groups."""
    rest = tuple(d for d in plan.decisions if not isinstance(d, Schedule))
    return dataclasses.replace(plan, decisions=(*rest, Schedule(str(table))))
