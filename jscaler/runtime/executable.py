"""``Executable``: a planned step as jitted functions of flat leaves, one for each device group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jscaler.lower.emit import emit, physical_mesh, sharding
from jscaler.lower.segment import Segment
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import Layout


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
