"""The chain: capture, transform, schedule, materialize, lower. Each stage is a call; nothing else happens here."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jscaler.capture.bodies import BodyTable
from jscaler.capture.build import build_graph
from jscaler.capture.jaxprs import trace_flat
from jscaler.capture.recompute import recompute
from jscaler.capture.refetch import refetched
from jscaler.capture.residuals import with_backward_bodies
from jscaler.capture.saved import thread_saved
from jscaler.capture.trace import trace_step
from jscaler.cost import FEW_STEPS, CostModel
from jscaler.errors import DeviceError
from jscaler.ir import Graph, PTensor, VTensor
from jscaler.lower.emit import emit, physical_mesh, sharding
from jscaler.lower.numbering import FlatProgram, flatten
from jscaler.lower.program import Program, make_program
from jscaler.materialize import Completed, Layout, complete
from jscaler.materialize.shards import stored_leaves
from jscaler.primitives import Order, Plan, Store, fused, make_plan
from jscaler.primitives.fits import check_fits
from jscaler.primitives.recompute import with_regions
from jscaler.primitives.reopen import reopen
from jscaler.report.explain import SECTIONS, Section, explain
from jscaler.report.step_report import StepReport, step_report
from jscaler.rules.book import RuleBook
from jscaler.rules.made_of import made_of
from jscaler.schedule import ordered_ops, timed, with_alone


@dataclass(frozen=True)
class Captured:
    """A graph, and what later stages need of its capture."""

    graph: Graph
    bodies: BodyTable
    rules: RuleBook
    source: core.Jaxpr

    @staticmethod
    def of(graph: Graph) -> "Captured":
        """The capture that ``graph`` comes from, as far as its rules remember it."""
        rules = graph.rules
        assert isinstance(rules, RuleBook)
        source = next((op.body.jaxpr for op in graph.ops if op.body is not None), None)
        return Captured(graph, rules.bodies, rules, source if source is not None else trace_flat(list, []))


@dataclass(frozen=True)
class StepPlan:
    """A plan completed for one graph, and the program it lowers to.

    Attributes:
        source: the graph as the policy saw it, with backward bodies.
        graph: the same with the ops cut that the plan re-opens.
    """

    source: Graph
    graph: Graph
    plan: Plan
    completed: Completed
    program: Program
    flat: FlatProgram
    cost: CostModel = FEW_STEPS

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def digest(self) -> str:
        return self.plan.digest

    @property
    def layouts(self) -> dict[PTensor, Layout]:
        """How every op leaves its results."""
        made = ((op, self.completed.ops[op.path].outputs) for op in self.graph.ops)
        return {t: layout for op, layouts in made for t, layout in zip(op.outputs, layouts, strict=True)}

    @property
    def refetched(self) -> Set[PTensor]:
        """What is made whole for the forward pass, and again for the backward pass: parameters that lie in parts."""
        return made_of(self.source, stored_leaves(self.source, self.plan)).dims.keys()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan's decisions to a file, which `Plan.load` reads; raises PlanFileError."""
        self.plan.save(path)

    @cached_property
    def report(self) -> StepReport:
        """What the plan makes of every group of ops and of state leaves, as data; ``report.as_json()`` for programs."""
        return step_report(self.graph, self.plan, self.completed, self.program, self.flat, self.cost)

    def explain(self, sections: Iterable[Section] = SECTIONS) -> str:
        """Tables: how every group of ops is split, who decided, and which collectives with how many bytes follow; how the
        leaves of the arguments lie; bytes by kind of tensor.

        Args:
            sections: which of ``"ops"``, ``"leaves"``, ``"memory"``; all by default.
        """
        return explain(self.report, sections)

    def vtensors(self, path: str, device: int) -> tuple[tuple[VTensor, ...], tuple[VTensor, ...]]:
        """The parts of tensors that the cell of op ``path`` on logical ``device`` reads, and those that it writes."""
        position = self.completed.mesh.devices.index(device)
        return self.completed.ops[path].vtensors(self.graph[path], position)

    def __str__(self) -> str:
        return self.explain()


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
    graph = build_graph(step, input_names, output_names(), next_version(are_gradients), bodies, rules)
    return Captured(graph, bodies, rules, step.source)


def transform(
    captured: Captured, policy: Callable[..., Any] | Plan, num_devices: int, stores: Sequence[Store] = ()
) -> Plan:
    """Run the policy, unless a finished plan is given; ``stores`` say where inputs lie, whatever that plan says.

    Raises:
        DeviceError: the finished plan is for another number of devices.
        PlanFitError: it was made for a graph of other ops or rules.
    """
    if not isinstance(policy, Plan):
        return make_plan(policy, captured.graph, num_devices, captured.bodies, stores)
    if policy.num_devices != num_devices:
        raise DeviceError(
            f"the plan '{policy.name}' is for {policy.num_devices} devices, and {num_devices} are given; give it as many "
            f"(devices={policy.num_devices}), or plan again"
        )
    check_fits(policy, captured.graph, captured.bodies)
    given = {store.leaf for store in stores}
    rest = [d for d in policy.decisions if not (isinstance(d, Store) and d.leaf in given)]
    return dataclasses.replace(policy, decisions=(*stores, *rest)) if stores else policy


def lower(captured: Captured, plan: Plan, cost: CostModel = FEW_STEPS) -> StepPlan:
    """Schedule, materialize and lower: from decisions to one program; ``cost`` is what its adapters keep low."""
    graph = with_regions(fused(captured.graph, plan, captured.bodies), plan)
    graph = with_alone(graph, plan, captured.rules, captured.bodies)
    source = with_backward_bodies(graph, captured.bodies, plan.residuals, plan.split_factors)
    graph, in_space = timed(recompute(source, captured.bodies), plan, captured.rules, captured.bodies)
    reopened = reopen(graph, in_space, captured.rules, captured.bodies)
    graph = thread_saved(reopened.graph)
    graph = refetched(graph, made_of(graph, stored_leaves(graph, plan)).dims.keys(), captured.bodies)
    orders = [d for d in reopened.plan.decisions if isinstance(d, Order)]
    ops = ordered_ops(graph, orders)
    after: dict[str, list[str]] = {}
    for order in orders:
        after.setdefault(order.after, []).append(order.before)
    completed = complete(graph, reopened.plan, captured.rules, cost, reopened.pieces)
    program = make_program(graph, ops, completed, captured.rules, after, cost, plan.reduce_dtype)
    avals = [t.aval for t in (*graph.inputs, *(c for c, _ in graph.constants))]
    return StepPlan(source, graph, plan, completed, program, flatten(program, avals, captured.source), cost)


@dataclass(frozen=True)
class Executable:
    """A step as a jitted function of flat leaves, with the shardings of its arguments and results.

    Attributes:
        jitted: returns those results that it computes.
        out_shardings: of all results.
        donated: positions of the arguments whose buffers the step may reuse.
        returned: result -> the argument that it is, untouched: of a frozen layer nothing is copied.
    """

    jitted: Any
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    donated: tuple[int, ...]
    returned: Mapping[int, int] = field(default_factory=dict)

    def results(self, computed: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """All results, of what the jitted function computed from ``leaves``, and the leaves that are returned."""
        if not self.returned:
            return computed
        rest = iter(computed)
        count = len(self.out_shardings)
        return [leaves[self.returned[i]] if i in self.returned else next(rest) for i in range(count)]


def executable(step: StepPlan, devices: Sequence[Any], donate: Sequence[int]) -> Executable:
    """The program on ``devices``; ``donate`` lists flat argument indices whose buffers may be reused.

    On no devices, where as many as the plan has are not at hand, it can be lowered and not compiled.
    """
    mesh = physical_mesh(step.program, devices)
    fun = emit(step.program, step.flat, mesh)
    constants = [value for _, value in step.graph.constants]
    in_shardings, out_shardings = shardings(step, mesh)
    returned = _returned(step.flat, in_shardings, out_shardings, donate)
    computed = [i for i in range(len(out_shardings)) if i not in returned]

    def run(*leaves: Any) -> list[Any]:
        results = fun(*leaves, *constants)
        return [results[i] for i in computed]

    outs = [out_shardings[i] for i in computed]
    jitted = jax.jit(run, in_shardings=in_shardings, out_shardings=outs, donate_argnums=tuple(donate))
    return Executable(jitted, in_shardings, out_shardings, tuple(donate), returned)


def _returned(flat: FlatProgram, ins: Sequence[Any], outs: Sequence[Any], donate: Sequence[int]) -> dict[int, int]:
    """Which results are arguments as they came, in the same layout; XLA would copy each.

    Not the donated ones: their results take their buffers. An argument that is returned twice is copied once, since two
    leaves of one state that are the same array could not both be donated to the next step.
    """
    at = {var: i for i, var in enumerate(flat.inputs[: len(ins)]) if i not in donate}
    found: dict[int, int] = {}
    for i, value in enumerate(flat.outputs):
        if isinstance(value, core.Var) and value in at and ins[at[value]] == outs[i]:
            found[i] = at.pop(value)
    return found


def lowered(step: StepPlan, made: Executable) -> Any:
    """``made`` as StableHLO (a ``jax.stages.Lowered``); where no devices are at hand, for the default backend's kind."""
    traced = made.jitted.trace(*input_structs(step, made.in_shardings))
    absent = any(isinstance(getattr(s, "mesh", None), AbstractMesh) for s in (*made.in_shardings, *made.out_shardings))
    return traced.lower(lowering_platforms=(jax.default_backend(),)) if absent else traced.lower()


def input_structs(step: StepPlan, in_shardings: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What ``jax.jit(...).lower`` takes for the step's inputs."""
    return [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=s, weak_type=getattr(t.aval, "weak_type", False))
        for t, s in zip(step.graph.inputs, in_shardings, strict=True)
    ]


def shardings(step: StepPlan, mesh: Mesh | AbstractMesh) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shardings of the step's inputs and outputs on ``mesh``."""

    def one(layout: Layout) -> NamedSharding | SingleDeviceSharding:
        if step.program.mesh.axes:
            return sharding(layout, mesh)
        assert isinstance(mesh, Mesh), "one device is always at hand"
        return SingleDeviceSharding(mesh.devices.flat[0])

    inputs = tuple(one(step.completed.inputs[t]) for t in step.graph.inputs)
    return inputs, tuple(one(layout) for _, layout in step.program.outputs)
