"""``Executable``: a planned step as jitted functions of flat leaves, one for each device group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jscaler.ir import PTensor
from jscaler.lower.blocks import Transfer
from jscaler.lower.emit import boundary_shardings, emit, physical_mesh, sharding, value_shape
from jscaler.lower.segment import Segment
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import Layout
from jscaler.runtime.crossings import Hop, find_hop

MOST_STARTED = 8  # segments that run at once: XLA's CPU backend aborts at some number of programs of several devices


@dataclass(frozen=True)
class Send:
    """Bring a value to another device group: ``source`` and ``target`` are its numbers before and after."""

    source: int
    target: int
    hop: Hop


@dataclass(frozen=True)
class Executable:
    """A step as jitted functions of flat leaves, with the shardings of its arguments and results.

    Attributes:
        segments: in the order in which they run; each returns results of the step, and values for others.
        sends: for each segment what is sent when it has been started, behind the others of its level.
        out_shardings: of all results.
        donated: positions of the arguments whose buffers the step may reuse.
        returned: result -> the argument that it is, untouched: of a frozen layer nothing is copied.
        last: for each segment the values that nobody reads behind it.
    """

    segments: tuple["SegmentFunction", ...]
    sends: tuple[tuple[Send, ...], ...]
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    donated: tuple[int, ...]
    returned: Mapping[int, int] = field(default_factory=dict)
    last: tuple[tuple[int, ...], ...] = ()

    def run(self, compiled: Sequence[Callable[..., Sequence[Any]]], leaves: Sequence[Any]) -> Sequence[Any]:
        """All results, of ``leaves``, by the segments' executables; of what is returned untouched the leaf itself."""
        if len(compiled) == 1 and not self.returned:
            return compiled[0](*leaves)
        values: dict[int, Any] = {}  # results, and what goes from block to block
        started: list[Any] = []
        for segment, function, sends, last in zip(self.segments, compiled, self.sends, self.last, strict=True):
            made = function(*(leaves[i] for i in segment.takes), *(values[i] for i in segment.imports))
            values.update(zip(segment.gives, made, strict=True))
            for send in sends:
                values[send.target] = send.hop(values[send.source])
            for value in last:
                del values[value]
            started.append(made)
            if len(started) > MOST_STARTED:
                jax.block_until_ready(started.pop(0))
        values.update({index: leaves[leaf] for index, leaf in self.returned.items()})
        return [values[index] for index in range(len(self.out_shardings))]


@dataclass(frozen=True)
class SegmentFunction:
    """What one device group computes between crossings.

    Attributes:
        takes, imports: the numbers of the step's leaves, and of the values of other segments.
        gives: those of the step's results and of the values that it leaves.
        values: what ``imports`` are.
    """

    jitted: Any
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    imports: tuple[int, ...] = ()
    values: tuple[jax.ShapeDtypeStruct, ...] = ()


def executable(step: StepPlan, devices: Sequence[Any], donate: Sequence[int]) -> Executable:
    """The step on ``devices``; ``donate`` lists flat argument indices whose buffers may be reused.

    On no devices, where as many as the plan has are not at hand, it can be lowered and not compiled.
    """
    ins, outs = shardings(step, devices)
    returned = {i: at for segment in step.segments for i, at in _returned(step, segment, ins, outs, donate).items()}
    functions = tuple(_function(step, n, devices, donate, returned, ins, outs) for n in range(len(step.segments)))
    arriving = {v: s.sharding for one in functions for v, s in zip(one.imports, one.values, strict=True)}
    sends = tuple(
        tuple(Send(t.source, t.target, find_hop(t.crossing, t.tensor.dtype, devices, arriving[t.target])) for t in here)
        for here in (_sent_behind(step, n) if devices else () for n in range(len(step.segments)))
    )
    return Executable(functions, sends, ins, outs, tuple(donate), returned, _last_reads(step, sends))


def _sent_behind(step: StepPlan, number: int) -> list[Transfer]:
    """What is sent behind the segment ``number``: behind the last of a level all that this level makes."""
    programs = [segment.program for segment in step.segments]
    level = programs[number].level
    if number + 1 < len(programs) and programs[number + 1].level == level:
        return []
    made = {value for program in programs if program.level == level for value in program.exports}
    return [transfer for transfer in step.transfers if transfer.source in made]


def _last_reads(step: StepPlan, sends: Sequence[Sequence[Send]]) -> tuple[tuple[int, ...], ...]:
    """For each segment the values between segments that it, or a send behind it, reads as the last."""
    last: dict[int, int] = {}
    for number, (segment, here) in enumerate(zip(step.segments, sends, strict=True)):
        last.update(dict.fromkeys((*segment.program.imports, *(send.source for send in here)), number))
    return tuple(tuple(v for v, n in last.items() if n == number) for number in range(len(step.segments)))


def _function(
    step: StepPlan,
    number: int,
    devices: Sequence[Any],
    donate: Sequence[int],
    returned: Mapping[int, int],
    ins: Sequence[Any],
    outs: Sequence[Any],
) -> SegmentFunction:
    segment = step.segments[number]
    mesh, program = physical_mesh(segment.program.group, devices), segment.program
    fun, takes = emit(segment, mesh), _takes(step, segment)
    constants = dict(step.graph.constants)
    values = [constants[t] for t in program.tensors[len(takes) : len(program.tensors) - len(program.imports)]]
    computed = [place for place, i in enumerate(program.results) if i not in returned]
    computed += range(len(program.results), len(program.outputs))

    def run(*leaves: Any) -> list[Any]:  # in XLA's text arguments go by this name
        results = fun(*leaves[: len(takes)], *values, *leaves[len(takes) :])
        return [results[place] for place in computed]

    numbers = (*program.results, *program.exports)
    gives = tuple(numbers[place] for place in computed)
    later = {i for other in step.segments[number + 1 :] for i in _takes(step, other)}
    donated = tuple(place for place, i in enumerate(takes) if i in donate and i not in later)
    imports = _values(program.inputs, program.tensors, len(program.imports), mesh)
    exports = _shardings(program.outputs, len(program.exports), mesh)
    own = (*(ins[i] for i in takes), *(struct.sharding for struct in imports))
    made = [*(outs[i] for i in gives[: len(gives) - len(exports)]), *exports]
    jitted = jax.jit(run, in_shardings=own, out_shardings=made, donate_argnums=donated)
    return SegmentFunction(jitted, takes, gives, program.imports, tuple(imports))


def _values(
    ends: Sequence[tuple[int, Layout]], tensors: Sequence[PTensor], count: int, mesh: Mesh | AbstractMesh
) -> list[jax.ShapeDtypeStruct]:
    """The last ``count`` inputs of a program, values of others."""
    first = len(ends) - count
    rows = zip(ends[first:], tensors[first:], _shardings(ends, count, mesh), strict=True)
    return [jax.ShapeDtypeStruct(value_shape(layout), tensor.dtype, sharding=place) for (_, layout), tensor, place in rows]


def _shardings(ends: Sequence[tuple[int, Layout]], count: int, mesh: Mesh | AbstractMesh) -> list[Any]:
    """Those of the last ``count`` inputs or outputs of a program, which are values between segments."""
    if not mesh.axis_names:
        assert isinstance(mesh, Mesh), "one device is always at hand"
        return [SingleDeviceSharding(mesh.devices.flat[0])] * count
    return list(boundary_shardings(ends, count, mesh)[len(ends) - count :])


def _takes(step: StepPlan, segment: Segment) -> tuple[int, ...]:
    """The numbers of the step's inputs that a segment takes."""
    number = {t: i for i, t in enumerate(step.graph.inputs)}
    tensors = segment.program.tensors
    return tuple(number[t] for t in tensors[: len(tensors) - len(segment.program.imports)] if t in number)


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
    for i, value in zip(segment.program.results, segment.flat.outputs, strict=False):
        if isinstance(value, core.Var) and value in at and ins[at[value]] == outs[i]:
            found[i] = at.pop(value)
    return found


def lowered(step: StepPlan, made: Executable) -> tuple[Any, ...]:
    """``made`` as StableHLO, a ``jax.stages.Lowered`` for each segment; of absent devices for the default backend."""
    structs = input_structs(step, made.in_shardings)
    absent = any(isinstance(getattr(s, "mesh", None), AbstractMesh) for s in (*made.in_shardings, *made.out_shardings))
    platforms = {"lowering_platforms": (jax.default_backend(),)} if absent else {}
    given = ((*(structs[i] for i in one.takes), *one.values) for one in made.segments)
    return tuple(one.jitted.trace(*s).lower(**platforms) for one, s in zip(made.segments, given, strict=True))


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
