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
from jscaler.capture.trace import trace_step
from jscaler.cost import FEW_STEPS, CostModel
from jscaler.errors import DeviceError
from jscaler.ir import Graph, PTensor, VTensor
from jscaler.ir.passes import Passes, PassRun, run_passes
from jscaler.lower.emit import emit, physical_mesh, sharding
from jscaler.lower.flat_program import FlatProgram, all_items
from jscaler.lower.numbering import flatten
from jscaler.lower.passes import flat_passes
from jscaler.lower.program import Program, make_programs
from jscaler.lower.segment import Segment
from jscaler.materialize import Completed, Layout, complete
from jscaler.primitives import Order, Plan, Store, make_plan
from jscaler.primitives.fits import check_fits
from jscaler.primitives.shards import stored_leaves
from jscaler.report.explain import SECTIONS, Section, explain
from jscaler.report.step_report import StepReport, step_report
from jscaler.rules.book import RuleBook
from jscaler.rules.made_of import made_of
from jscaler.schedule import ordered_ops
from jscaler.schedule.passes import TO_LAYOUTS, TO_SOURCE, Planned


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
        segments: what runs, one for each device group.
        passes: what was done in between, and to the flat programs.
    """

    source: Graph
    graph: Graph
    plan: Plan
    completed: Completed
    segments: tuple[Segment, ...]
    passes: Passes = field(repr=False, compare=False)
    cost: CostModel = FEW_STEPS

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def digest(self) -> str:
        return self.plan.digest

    @property
    def program(self) -> Program:
        """The program of a step that runs on one group."""
        (segment,) = self.segments
        return segment.program

    @property
    def flat(self) -> FlatProgram:
        """The flat program of a step that runs on one group."""
        (segment,) = self.segments
        return segment.flat

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
        return step_report(self.graph, self.plan, self.completed, self.segments, self.cost)

    def explain(self, sections: Iterable[Section] = SECTIONS) -> str:
        """Tables: how every group of ops is split, who decided, and which collectives with how many bytes follow; how the
        leaves of the arguments lie; bytes by kind of tensor.

        Args:
            sections: which of ``"ops"``, ``"leaves"``, ``"memory"``; all by default.
        """
        return explain(self.report, sections)

    def vtensors(self, path: str, device: int) -> tuple[tuple[VTensor, ...], tuple[VTensor, ...]]:
        """The parts of tensors that the cell of op ``path`` on logical ``device`` reads, and those that it writes."""
        return self.completed.ops[path].vtensors(self.graph[path], device)

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


def lower(captured: Captured, plan: Plan, cost: CostModel = FEW_STEPS, without: Sequence[str] = ()) -> StepPlan:
    """Schedule, materialize and lower: from decisions to one program.

    Args:
        cost: what its adapters keep low.
        without: names of passes to leave out, of those for XLA alone (`lower.passes.FOR_XLA`).

    Raises:
        PlanError: the plan cannot be carried out; or one of ``without`` is no such pass.
    """
    passes = flat_passes(without)
    at = Planned(captured.graph, plan, captured.rules, captured.bodies)
    source, first = run_passes(at, TO_SOURCE, _num_ops)
    at, rest = run_passes(source, TO_LAYOUTS, _num_ops)
    graph = at.graph
    orders = [d for d in at.plan.decisions if isinstance(d, Order)]
    ops = ordered_ops(graph, orders)
    after: dict[str, list[str]] = {}
    for order in orders:
        after.setdefault(order.after, []).append(order.before)
    completed = complete(graph, at.plan, captured.rules, cost, at.pieces)
    runs: list[PassRun[Any]] = [*first, *rest]
    segments: list[Segment] = []
    for program in make_programs(graph, ops, completed, captured.rules, after, cost, plan.reduce_dtype):
        flat, flattened = run_passes(flatten(program, captured.source), passes, _num_items)
        segments.append(Segment(program, flat))
        runs += flattened
    return StepPlan(source.graph, graph, plan, completed, tuple(segments), Passes(tuple(runs)), cost)


def _num_ops(at: Planned) -> int:
    return len(at.graph.ops)


def _num_items(flat: FlatProgram) -> int:
    return sum(1 for _ in all_items(flat.items))


@dataclass(frozen=True)
class Executable:
    """A step as jitted functions of flat leaves, with the shardings of its arguments and results.

    Attributes:
        segments: in the order in which they run; each returns those results that it computes.
        out_shardings: of all results.
        donated: positions of the arguments whose buffers the step may reuse.
        returned: result -> the argument that it is, untouched: of a frozen layer nothing is copied.
    """

    segments: tuple["SegmentFunction", ...]
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    donated: tuple[int, ...]
    returned: Mapping[int, int] = field(default_factory=dict)

    def run(self, compiled: Sequence[Callable[..., Sequence[Any]]], leaves: Sequence[Any]) -> Sequence[Any]:
        """All results, of ``leaves``, by the segments' executables; of what is returned untouched the leaf itself."""
        if len(compiled) == 1 and not self.returned:
            return compiled[0](*leaves)
        results: list[Any] = [None] * len(self.out_shardings)
        for segment, function in zip(self.segments, compiled, strict=True):
            for index, value in zip(segment.gives, function(*(leaves[i] for i in segment.takes)), strict=True):
                results[index] = value
        for index, leaf in self.returned.items():
            results[index] = leaves[leaf]
        return results


@dataclass(frozen=True)
class SegmentFunction:
    """What one device group computes.

    Attributes:
        takes, gives: the numbers of the step's leaves, and of its results.
    """

    jitted: Any
    takes: tuple[int, ...]
    gives: tuple[int, ...]


def executable(step: StepPlan, devices: Sequence[Any], donate: Sequence[int]) -> Executable:
    """The step on ``devices``; ``donate`` lists flat argument indices whose buffers may be reused.

    On no devices, where as many as the plan has are not at hand, it can be lowered and not compiled.
    """
    ins, outs = shardings(step, devices)
    returned = {i: at for segment in step.segments for i, at in _returned(step, segment, ins, outs, donate).items()}
    functions = tuple(_function(step, segment, devices, donate, returned, ins, outs) for segment in step.segments)
    return Executable(functions, ins, outs, tuple(donate), returned)


def _function(
    step: StepPlan,
    segment: Segment,
    devices: Sequence[Any],
    donate: Sequence[int],
    returned: Mapping[int, int],
    ins: Sequence[Any],
    outs: Sequence[Any],
) -> SegmentFunction:
    fun = emit(segment, physical_mesh(segment.program.group, devices))
    takes, program = _takes(step, segment), segment.program
    constants = dict(step.graph.constants)
    values = [constants[t] for t in program.tensors[len(takes) :]]
    computed = [place for place, i in enumerate(program.results) if i not in returned]

    def run(*leaves: Any) -> list[Any]:
        results = fun(*leaves, *values)
        return [results[place] for place in computed]

    gives = tuple(program.results[place] for place in computed)
    donated = tuple(place for place, i in enumerate(takes) if i in donate)
    own, made = tuple(ins[i] for i in takes), [outs[i] for i in gives]
    return SegmentFunction(jax.jit(run, in_shardings=own, out_shardings=made, donate_argnums=donated), takes, gives)


def _takes(step: StepPlan, segment: Segment) -> tuple[int, ...]:
    """The numbers of the step's inputs that a segment takes."""
    number = {t: i for i, t in enumerate(step.graph.inputs)}
    return tuple(number[t] for t in segment.program.tensors if t in number)


def _returned(
    step: StepPlan, segment: Segment, ins: Sequence[Any], outs: Sequence[Any], donate: Sequence[int]
) -> dict[int, int]:
    """Which results are arguments as they came, in the same layout; XLA would copy each.

    Not the donated ones: their results take their buffers. An argument that is returned twice is copied once, since two
    leaves of one state that are the same array could not both be donated to the next step.
    """
    takes = _takes(step, segment)
    at = {var: i for var, i in zip(segment.flat.inputs, takes, strict=False) if i not in donate}
    found: dict[int, int] = {}
    for i, value in zip(segment.program.results, segment.flat.outputs, strict=True):
        if isinstance(value, core.Var) and value in at and ins[at[value]] == outs[i]:
            found[i] = at.pop(value)
    return found


def lowered(step: StepPlan, made: Executable) -> tuple[Any, ...]:
    """``made`` as StableHLO, a ``jax.stages.Lowered`` for each segment; of absent devices for the default backend."""
    structs = input_structs(step, made.in_shardings)
    absent = any(isinstance(getattr(s, "mesh", None), AbstractMesh) for s in (*made.in_shardings, *made.out_shardings))
    platforms = {"lowering_platforms": (jax.default_backend(),)} if absent else {}
    return tuple(one.jitted.trace(*(structs[i] for i in one.takes)).lower(**platforms) for one in made.segments)


def input_structs(step: StepPlan, in_shardings: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What ``jax.jit(...).lower`` takes for the step's inputs."""
    return [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=s, weak_type=getattr(t.aval, "weak_type", False))
        for t, s in zip(step.graph.inputs, in_shardings, strict=True)
    ]


def shardings(step: StepPlan, devices: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shardings of the step's inputs and outputs on ``devices``, each on the mesh of its group."""
    meshes = {group: physical_mesh(group, devices) for group in step.completed.groups}

    def one(layout: Layout) -> NamedSharding | SingleDeviceSharding:
        mesh = meshes[layout.mesh]
        if layout.mesh.axes:
            return sharding(layout, mesh)
        assert isinstance(mesh, Mesh), "one device is always at hand"
        return SingleDeviceSharding(mesh.devices.flat[0])

    return tuple(one(step.completed.inputs[t]) for t in step.graph.inputs), tuple(map(one, step.completed.outputs))
