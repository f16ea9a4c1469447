"""The chain: capture, transform, schedule, materialize, lower. Each stage is a call; nothing else happens here."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.capture.build import build_graph
from jscaler.capture.jaxprs import trace_flat
from jscaler.capture.trace import trace_step
from jscaler.capture.wishes import no_mesh
from jscaler.clusters import FEW_STEPS, Cluster, CostModel
from jscaler.errors import DeviceError
from jscaler.flat_passes.all_passes import BEFORE_CUT, flat_passes
from jscaler.ir import Graph
from jscaler.ir.overview import Overview, Shown
from jscaler.ir.passes import Passes, PassRun, run_passes
from jscaler.ir.walk import grouped
from jscaler.lower.block_cuts import cut
from jscaler.lower.blocks import make_programs
from jscaler.lower.flat_program import FlatProgram, all_items
from jscaler.lower.instructions import instructions
from jscaler.lower.numbering import Keys, flatten
from jscaler.lower.overlapped import Overlapping
from jscaler.lower.segment import CutProgram, PlacedBlock, Segment, in_each_block
from jscaler.lower.step_plan import StepPlan
from jscaler.lower.twins import twin_key, twin_of
from jscaler.materialize import complete
from jscaler.materialize.completed import Completed
from jscaler.materialize.group_passes import GROUP_PASSES
from jscaler.materialize.groups import OnGroups, on_groups
from jscaler.primitives import Decision, Order, Plan, Store, make_plan
from jscaler.primitives.plan import Schedule
from jscaler.primitives.plan_matches import check_fits
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule import ordered_ops
from jscaler.schedule.graph_passes import TO_LAYOUTS, TO_SOURCE, Planned
from jscaler.schedule.time_axes import orders_on_groups
from jscaler.tables import Table
from jscaler.tables.cuts import cuts_of


@dataclass(frozen=True, repr=False)
class Captured(Shown):
    """A graph, and what later stages need of its capture."""

    graph: Graph
    bodies: BodyTable
    rules: RuleBook
    source: core.Jaxpr

    def overview(self) -> Overview:
        return self.graph.overview()

    @staticmethod
    def of(graph: Graph) -> "Captured":
        """The capture that ``graph`` comes from, as far as its rules remember it."""
        rules = graph.rules
        assert isinstance(rules, RuleBook)
        source = next((op.body.jaxpr for op in graph.ops if op.body is not None), None)
        return Captured(graph, rules.bodies, rules, source if source is not None else trace_flat(list, []))


def capture(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    input_names: Sequence[str],
    output_names: Callable[[], Sequence[str]],
    next_version: Callable[[frozenset[int]], Mapping[int, int]],
) -> Captured:
    """Trace ``fun(*leaves) -> leaves`` once.

    The last two are asked after the trace, when the result's tree is known; ``next_version`` is told which outputs are
    gradients, which look like a next version of the parameters and are not.
    """
    step = trace_step(fun, avals)
    rules = RuleBook()
    bodies = rules.bodies
    gradients = {v for call in step.calls for v in call.gradients}
    are_gradients = frozenset(i for i, v in enumerate(step.outvars) if isinstance(v, core.Var) and v in gradients)
    with no_mesh():
        graph = build_graph(step, input_names, output_names(), next_version(are_gradients), bodies, rules)
    return Captured(graph, bodies, rules, step.source)


def transform(
    captured: Captured,
    policy: Callable[..., Any] | Plan,
    num_devices: int,
    stores: Sequence[Decision] = (),
    cost: CostModel = FEW_STEPS,
    price: Callable[..., tuple[float, float]] | None = None,
) -> Plan:
    """Run the policy, unless a finished plan is given; ``stores`` say where inputs lie, whatever that plan says.

    Args:
        cost: a cluster may say what its devices are, for policies that balance work.
        price: what another policy for the same would take, for policies that try several; see `Planner`.

    Raises:
        DeviceError: the finished plan is for another number of devices.
        PlanFitError: it was made for a graph of other ops or rules.
    """
    if not isinstance(policy, Plan):
        cluster = cost if isinstance(cost, Cluster) else None
        return make_plan(policy, captured.graph, num_devices, captured.bodies, stores, cluster, price)
    if policy.num_devices != num_devices:
        raise DeviceError(
            f"the plan '{policy.name}' is for {policy.num_devices} devices, and {num_devices} are given; give it as many "
            f"(devices={policy.num_devices}), or plan again"
        )
    check_fits(policy, captured.graph, captured.bodies)
    given = {store.leaf for store in stores if isinstance(store, Store)}
    rest = [d for d in policy.decisions if not (isinstance(d, Store) and d.leaf in given)]
    return dataclasses.replace(policy, decisions=(*stores, *rest)) if stores else policy


@dataclass(frozen=True)
class LaidOut:
    """A graph whose ops are placed, and whose tensors have layouts.

    Attributes:
        source: the graph and the plan before what is computed again, and time axes.
        planned: these behind the passes over the graph.
        placed: the graph on its device groups.
        runs: of the passes.
    """

    source: Planned
    planned: Planned
    placed: OnGroups
    completed: Completed
    runs: tuple[PassRun[Any], ...] = ()


def lay_out(captured: Captured, plan: Plan, cost: CostModel = FEW_STEPS) -> LaidOut:
    """Schedule and materialize: from decisions to layouts; raises as `lower`."""
    at = Planned(captured.graph, plan, captured.rules, captured.bodies)
    source, first = run_passes(at, TO_SOURCE, _num_ops)
    at, rest = run_passes(source, TO_LAYOUTS, _num_ops)
    placed, last = run_passes(on_groups(at.graph, at.plan, at.bodies, at.pieces), GROUP_PASSES, _num_ops)
    for run in (*first, *rest, *last):
        if run.result.graph is not source.graph and run.result.graph is not placed.graph:
            run.result.graph.forget()  # who looks at it makes its tables again
    return LaidOut(source, at, placed, complete(placed, at.plan, captured.rules, cost), (*first, *rest, *last))


def lower(captured: Captured, plan: Plan, cost: CostModel = FEW_STEPS, without: Sequence[str] = ()) -> StepPlan:
    """Schedule, materialize and lower: from decisions to one program.

    Args:
        cost: what its adapters keep low.
        without: names of passes to leave out, of those that save memory or time alone (`flat_passes.all_passes.FOR_XLA`).

    Raises:
        PlanError: the plan cannot be carried out; or one of ``without`` is no such pass.
    """
    passes = flat_passes(without)
    laid = lay_out(captured, plan, cost)
    source, at, placed, completed = laid.source, laid.planned, laid.placed, laid.completed
    graph = placed.graph
    orders = [d for d in at.plan.decisions if isinstance(d, Order)]
    ops = ordered_ops(graph, orders)
    after = grouped((order.after, order.before) for order in orders)
    runs: list[PassRun[Any]] = [*laid.runs]
    segments: list[Segment] = []
    cuts = cuts_of(plan.table)
    made = make_programs(graph, ops, completed, captured.rules, after, cost, plan.reduce_dtype, cuts)
    values, keys = made.values, Keys()
    several = len(completed.groups) > 1
    known: dict[Hashable, Segment] = {}
    for program in made.programs:
        key = twin_key(program) if several else None
        if key in known:
            segment, values = twin_of(known[key], program, values)
            segments.append(segment)
            continue
        flat = flatten(program, captured.source, keys)
        flat, flattened = run_passes(flat, BEFORE_CUT if several else passes, _num_items)
        blocks, values = cut(program, flat, values)
        runs += flattened
        if several:  # what a pass fences or merges runs at once: it must not wait for another block's
            placed, each = run_passes(CutProgram(blocks), [in_each_block(one) for one in passes], CutProgram.num_items)
            blocks, runs = placed.blocks, [*runs, *each]
        segments.append(Segment(program, flat, blocks))
        if key is not None:
            known[key] = segments[-1]
    every = _as_groups_run_them(segments, completed)
    between = orders_on_groups(source.graph, plan) if made.spanning is not None else []
    outputs = len(graph.outputs)
    is_one = Overlapping(every, made.transfers, cost).is_one
    runs_as, steps = instructions(graph, every, made.transfers, made.spanning, outputs, plan.table, between, is_one)
    return StepPlan(
        source.graph,
        graph,
        plan,
        completed,
        tuple(segments),
        Passes(tuple(runs)),
        cost,
        made.transfers,
        made.spanning,
        steps,
        tuple(runs_as),
        at.has_time_axes,
        captured.graph,
        at.pieces,
    )


def _as_groups_run_them(segments: Sequence[Segment], completed: Completed) -> list[PlacedBlock]:
    number = {group: n for n, group in enumerate(completed.groups)}
    every = [block for segment in segments for block in segment.blocks]
    return sorted(every, key=lambda block: (block.phase, number[block.group], block.level, block.of_layers))


def reordered(step: StepPlan, table: Table) -> StepPlan:
    """``step`` with its blocks in the order of ``table``, which has the same kinds of blocks.

    Raises:
        PlanError: the table has other blocks.
        OrderError: blocks wait for each other.
    """
    rest = tuple(d for d in step.plan.decisions if not isinstance(d, Schedule))
    plan = dataclasses.replace(step.plan, decisions=(*rest, Schedule(str(table))))
    between = orders_on_groups(step.source, plan)
    outputs, every = len(step.graph.outputs), _as_groups_run_them(step.segments, step.completed)
    is_one = Overlapping(every, step.transfers, step.cost).is_one
    runs_as, steps = instructions(step.graph, every, step.transfers, step.spanning, outputs, table, between, is_one)
    assert len(runs_as) == len(step.blocks), "the table has other kinds of blocks"
    return dataclasses.replace(step, plan=plan, instructions=steps, blocks=tuple(runs_as))


def _num_ops(at: Planned | OnGroups) -> int:
    return len(at.graph.ops)


def _num_items(flat: FlatProgram) -> int:
    return sum(1 for _ in all_items(flat.items))
