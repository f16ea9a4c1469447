"""The passes from the captured graph to the graph that is laid out on devices, in order.

captured ─► fused_ops ─► recompute_regions ─► per_microbatch_ops ─► backward_bodies      the source: what the policy decided
         ─► recomputed ─► time_loops ─► cut_ops ─► threaded_stacks ─► refetched_parameters        ready for layouts
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from jscaler.capture.bodies import BodyTable
from jscaler.capture.fetched_once import fetched_once
from jscaler.capture.recompute import recompute
from jscaler.capture.refetch import refetched
from jscaler.capture.residuals import with_backward_bodies
from jscaler.capture.saved import thread_saved
from jscaler.ir import Graph
from jscaler.ir.passes import Pass
from jscaler.primitives import Plan, restructured
from jscaler.primitives.recompute_regions import with_regions
from jscaler.primitives.reopen import reopen
from jscaler.primitives.shard_checks import stored_leaves
from jscaler.rules.made_of import made_of
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.per_microbatch_state import with_alone
from jscaler.schedule.regions_by_stage import regions_by_stage
from jscaler.schedule.timed import timed
from jscaler.tables.cuts import cuts_of


@dataclass(frozen=True)
class Planned:
    """A graph on its way to layouts.

    Attributes:
        plan: what is left to be done with it: first all decisions, in the end those in space.
        pieces: path of an op that was cut -> paths of the ops that stand for it.
        has_time_axes: whether parts of ops run one after another.
    """

    graph: Graph
    plan: Plan
    rules: RuleBook = field(repr=False)
    bodies: BodyTable = field(repr=False)
    pieces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_time_axes: bool = False

    def __str__(self) -> str:
        return str(self.graph)


def fused_ops(at: Planned) -> Planned:
    """Ops that the plan fuses are one before autodiff sees them: they have one backward, and may run in chunks. Loops over
    layers are cut into the ranges that stages take."""
    return dataclasses.replace(at, graph=restructured(at.graph, at.plan.decisions, at.bodies))


def recompute_regions(at: Planned) -> Planned:
    """The plan's regions of recompute are marked on forward ops, as a model's own are. Some take the place of these.

    On several device groups each has its own part of a region. What crosses within would be made and sent twice.
    """
    return dataclasses.replace(at, graph=regions_by_stage(with_regions(at.graph, at.plan.decisions), at.plan))


def per_microbatch_ops(at: Planned) -> Planned:
    """Ops that run on each micro-batch alone divide by its count. It must be done in front of autodiff."""
    return dataclasses.replace(at, graph=with_alone(at.graph, at.plan, at.rules, at.bodies))


def backward_bodies(at: Planned) -> Planned:
    """Backward ops get their bodies, the vjp of the final forward ops. Until here they were handles for the policy."""
    plan = at.plan
    return dataclasses.replace(at, graph=with_backward_bodies(at.graph, at.bodies, plan.residuals, plan.split_factors))


def recomputed(at: Planned) -> Planned:
    """Backward ops of a region read clones of its forward ops, behind a fence. So what enters it is all that is kept.

    If the plan's table has blocks for what is computed again, the clones wait for no cotangent.
    """
    return dataclasses.replace(at, graph=recompute(at.graph, at.bodies, cuts_of(at.plan.table).recompute))


def time_loops(at: Planned) -> Planned:
    """Time axes become loops, or groups of ops. All that follows knows loops, and the plan that is left is in space."""
    graph, plan = timed(at.graph, at.plan, at.rules, at.bodies)
    return dataclasses.replace(at, graph=graph, plan=plan, has_time_axes=graph is not at.graph)


def cut_ops(at: Planned) -> Planned:
    """Ops whose split factor an inner reduction blocks are cut there. Each piece then splits by ordinary rules."""
    made = reopen(at.graph, at.plan, at.rules, at.bodies)
    return dataclasses.replace(at, graph=made.graph, plan=made.plan, pieces=made.pieces)


def threaded_stacks(at: Planned) -> Planned:
    """What backward loops read of their forward loops goes through stacks. Bodies are final now, so no more is saved."""
    return dataclasses.replace(at, graph=thread_saved(at.graph))


def refetched_parameters(at: Planned) -> Planned:
    """Backward ops read stored parameters through a fence. Else the whole parameter would be kept from the forward.

    If the plan asks for it, loops over micro-batches read what is put together in front of them.
    """
    graph, leaves = at.graph, stored_leaves(at.graph, at.plan)
    if at.plan.accumulation.gather_once:  # what is made of these then is no more made of stored parameters
        graph = fetched_once(graph, made_of(graph, leaves).dims.keys(), at.bodies)
    return dataclasses.replace(at, graph=refetched(graph, made_of(graph, leaves).dims.keys(), at.bodies))


TO_SOURCE: tuple[Pass[Planned], ...] = (fused_ops, recompute_regions, per_microbatch_ops, backward_bodies)
TO_LAYOUTS: tuple[Pass[Planned], ...] = (recomputed, time_loops, cut_ops, threaded_stacks, refetched_parameters)
GRAPH_PASSES = TO_SOURCE + TO_LAYOUTS
