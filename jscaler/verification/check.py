"""``verify``: prove, from the emitted program alone, that every consumer gets each element and each summand once.

The proof has six parts:

1. each exchange, traced as it is emitted and interpreted symbolically, turns its producer's masks into its consumers';
2. each op's VTensors are what lies in its slots, from the step's inputs to its outputs (``flow``);
3. the whole emitted function computes the very values of those ops and exchanges one after another (``values``);
4. loops over parts in time visit each part of each tensor once, and join each summand once (``time_loops``);
5. the shardings of the compiled step mean the parts that the program takes and leaves;
6. the instructions give each block what it takes, of its micro-batch, neither freed nor donated, and each once (``slots``).

It looks at jaxprs, the mesh and masks, never at transitions or how they were found.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jscaler.capture.jaxprs import dtype as dtype_of
from jscaler.capture.jaxprs import fingerprint, shape_struct
from jscaler.capture.jaxprs import shape as shape_of
from jscaler.capture.wishes import no_mesh
from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask
from jscaler.lower.emit import emit_in_turn, value_shape
from jscaler.lower.emit_crossing import in_one_program
from jscaler.lower.flat_program import numbered_exchanges
from jscaler.lower.program import Program
from jscaler.lower.segment import Segment
from jscaler.lower.step_plan import StepPlan, step_of
from jscaler.materialize import DeviceMesh
from jscaler.materialize.edges import Edge
from jscaler.runtime.compiled import Compiled, Lowered
from jscaler.verification.arrival import Arrival
from jscaler.verification.extended import check_extended, extended
from jscaler.verification.flow import SlotFlow, emitted_exchange, max_carries, plain_program, spec_masks
from jscaler.verification.frames import Frame
from jscaler.verification.interpret import Interpreter
from jscaler.verification.local_programs import Local, abstract_mesh, open_shard_map, trace_local
from jscaler.verification.segments import check_values, hop_masks, number_like
from jscaler.verification.slots import check_instructions
from jscaler.verification.symbols import Patterns, Symbolic
from jscaler.verification.time_loops import check_time_loops
from jscaler.verification.values import content_key, numbered


@dataclass(frozen=True)
class Report:
    """What has been proven.

    Attributes:
        devices: how many there are.
        exchanges: how many were checked; equal ones were worked out once, ``distinct`` of them.
        collectives: how many of each kind they run.
        elements: elements proven in place by exchanges, over all devices.
        reads: VTensors of ops and results of the step that were found in their slots, each on all devices.
        time_loops: how many loops over parts were proven to take each part once.
    """

    devices: int
    exchanges: int
    distinct: int
    collectives: Mapping[str, int]
    elements: int
    reads: int = 0
    time_loops: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.collectives.items())) or "none"
        lines = [
            f"verified on {self.devices} device{'s' if self.devices > 1 else ''}",
            f"  exchanges    {self.exchanges} ({self.distinct} distinct)",
            f"  collectives  {kinds}",
            f"  elements     {self.elements:,} in place, each summand once",
        ]
        if self.reads:
            lines.append(f"  reads        {self.reads} of ops and results, each from a slot that holds its part")
        if self.time_loops:
            lines.append(f"  time loops   {self.time_loops}, each part once, each summand once")
        return "\n".join(lines)


def verify_exchange(
    fun: Callable[[Any], Any],
    mesh: DeviceMesh | Mesh | AbstractMesh,
    shape: tuple[int, ...],
    dtype: Any,
    held: Sequence[Mask | None],
    wanted: Sequence[Mask | None],
    *,
    packed: bool = False,
    where: str = "exchange",
) -> Report:
    """Prove that ``fun`` turns the parts that devices hold into those that they want.

    Args:
        fun: from local array to local array, as inside ``jax.shard_map``; it may use collectives over the mesh's axes.
        mesh: its axes matter, and its devices' numbers for messages.
        shape: of the whole tensor.
        dtype: of the tensor.
        held: by position in the mesh, the mask that a device holds before; None where it holds nothing.
        wanted: the mask that it wants after, if any. Any dealing of value shares among the devices of a group will do.
        packed: smaller parts are padded at the end of each dim; else at the end of each sub-dim, as a `Layout` does.
        where: the exchange's name in messages.

    Returns:
        How much was proven.

    Raises:
        VerificationError: something arrives wrong, or devices would wait for each other; says which and where.

    Example:
        >>> mesh = DeviceMesh((0, 1), (("x", 2),))
        >>> a, b = Layout(mesh, ((4,),), (("x",),)), Layout.replicated(mesh, (4,))
        >>> masks = [[layout.mask(p) for p in range(2)] for layout in (a, b)]
        >>> verify_exchange(lambda x: jax.lax.all_gather(x, "x", tiled=True), mesh, (4,), "float32", *masks)
    """
    sizes, names = _axes_of(mesh)
    before, after = Frame(held, packed), Frame(wanted, packed)
    local = trace_local(fun, sizes, [jax.ShapeDtypeStruct(before.shape, dtype)])
    passed, elements = _prove(local, sizes, shape, before, after, names, lambda: where)
    return Report(len(names), 1, 1, Counter(passed), elements)


@no_mesh()
def verify(step: Lowered | Compiled | StepPlan) -> Report:
    """Prove a whole step: ``jscaler.verify(train_step.lower(state, batch))``.

    Args:
        step: a lowered or compiled step, or its plan (then the shardings of arguments and results are not looked at).

    Raises:
        VerificationError: the emitted program is wrong; says in which step, on which device, and how.
        PlanError: ``step`` is none.

    Example:
        >>> jscaler.verify(lowered).exchanges  # six all-reduces
        6
    """
    if isinstance(step, Compiled):
        step = step.lowered
    plan = step_of("verify", step)
    return _StepCheck(plan, step if isinstance(step, Lowered) else None).run()


@dataclass
class _StepCheck:
    step: StepPlan
    lowered: Lowered | None
    proven: dict[Any, tuple[list[str], int]] = field(default_factory=dict)
    kept: list[Local] = field(default_factory=list)  # what keys know by identity must stay alive

    def run(self) -> Report:
        collectives: Counter[str] = Counter()
        devices, elements, count, reads = set[Any](), 0, 0, 0
        values = check_values(self.step)
        for transfer in self.step.transfers:
            crossing, tensor = transfer.crossing, transfer.tensor
            mesh, masks = hop_masks(crossing)
            crossed = verify_exchange(
                functools.partial(in_one_program, crossing, mesh=mesh), mesh, tensor.shape, number_like(tensor.dtype),
                *masks, where=f"crossing of '{tensor.name}'",
            )  # fmt: skip
            devices.update(transfer.crossing.devices)
            collectives.update(crossed.collectives)
            elements, count = elements + crossed.elements, count + 1
        for segment in self.step.segments:
            program = segment.program
            sizes, names = _axes_of(program.group)
            own = len(program.tensors) - len(program.imports)
            structs = [shape_struct(t.aval) for t in program.tensors[:own]]
            brought = zip(program.tensors[own:], program.inputs[own:], strict=True)
            structs += [
                jax.ShapeDtypeStruct(value_shape(layout, program.group, layout.local_shape), t.dtype)
                for t, (_, layout) in brought
            ]
            emitted = open_shard_map(emit_in_turn(segment, abstract_mesh(sizes)), structs)  # type: ignore[arg-type]
            flow = SlotFlow(self.step, program, names, values)
            flow.walk(emitted)
            moved, proven, number = self._exchanges(segment, flow, sizes, names)
            self._same_values(segment.program, emitted, flow, sizes)
            self._shardings(segment.program, emitted, sizes)
            collectives.update(moved)
            devices.update(names)
            elements, count, reads = elements + proven, count + number, reads + flow.num_reads
        self._leaf_ends()
        time_loops = check_time_loops(self.step)
        reads += check_instructions(self.step)
        return Report(len(devices), count, len(self.proven), collectives, elements, reads, time_loops)

    def _leaf_ends(self) -> None:
        """A leaf that is several inputs, or outputs, has on each device what the part of it has there."""
        if self.lowered is None or not self.lowered.devices:
            return
        made = self.lowered.executable
        for role, end in (*(("input", e) for e in made.ins.stacked), *(("output", e) for e in made.outs.stacked)):
            whole, start = end.sharding.devices_indices_map(end.shape), 0
            for shape, part in zip(end.shapes, end.parts, strict=True):
                for device, index in part.devices_indices_map(shape).items():
                    own = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
                    own[0] = (own[0][0] + start, own[0][1] + start)
                    found = [s.indices(n)[:2] for s, n in zip(whole[device], end.shape, strict=True)]
                    if found != own:
                        raise VerificationError(
                            f"{role} {end.number}, in parts: device {device.id} has {found} of the leaf, {own} of its part"
                        )
                start += shape[0]

    def _exchanges(
        self, segment: Segment, flow: SlotFlow, sizes: Mapping[str, int], names: Sequence[Any]
    ) -> tuple[Counter[str], int, int]:
        """Every exchange of the flat program: equal code between equal masks is interpreted once."""
        collectives: Counter[str] = Counter()
        elements = count = 0
        for number, item in numbered_exchanges([item for block in segment.blocks for item in block.flat.items]):
            held, wanted = flow.exchanges[item.adapt.output]
            struct = jax.ShapeDtypeStruct(shape_of(item.input), dtype_of(item.input))
            where = f"step {number}, exchange of '{held.tensor.name}'"
            before, after = Frame(held.masks), Frame(wanted.masks)
            if struct.shape != before.shape:
                raise VerificationError(f"{where}: takes {list(struct.shape)} for parts of {list(before.shape)}")
            local = trace_local(emitted_exchange(segment.program, item.adapt), sizes, [struct])
            inputs = tuple(map(content_key, local.inputs[:-1]))
            key = (tuple(names), fingerprint(local.jaxpr), inputs, held.masks, wanted.masks, wanted.edges)
            if key not in self.proven:
                self.kept.append(local)
                shape = held.tensor.shape
                self.proven[key] = _prove(
                    local, sizes, shape, before, after, names, lambda where=where: where, wanted.edges
                )
            passed, proven = self.proven[key]
            collectives.update(passed)
            elements += proven
            count += 1
        return collectives, elements, count

    def _same_values(self, program: Program, emitted: Local, flow: SlotFlow, sizes: Mapping[str, int]) -> None:
        structs = []
        for slot, _ in program.inputs:
            held = flow.slots[slot]
            structs.append(shape_struct(held.tensor.aval.update(shape=Frame(held.masks).shape)))
        plain = trace_local(plain_program(program), sizes, structs)
        numbers = numbered((emitted, plain), len(structs), 2 * max_carries(program.tasks) + 1)
        for index, ours, theirs in zip((*program.results, *program.exports), *numbers, strict=True):
            if ours != theirs:
                name = flow.values[index].name if index in flow.values else self.step.graph.outputs[index].name
                raise VerificationError(
                    f"output {index} '{name}': the emitted program computes another value than the step's ops and "
                    "exchanges one after another"
                )

    def _shardings(self, program: Program, emitted: Local, sizes: Mapping[str, int]) -> None:
        """The compiled step's shardings put the parts where the program takes and leaves them."""
        if self.lowered is None or not self.lowered.devices:  # (lowered for devices that are not at hand)
            return
        graph, made = self.step.graph, self.lowered.executable
        devices = [self.lowered.devices[d] for d in program.group.devices]
        number = {t: i for i, t in enumerate(graph.inputs)}
        taken = zip(program.tensors[: len(program.tensors) - len(program.imports)], emitted.in_specs, strict=False)
        inputs = [(t, made.ins.of_parts[number[t]], spec) for t, spec in taken if t in number]
        left = zip(program.results, emitted.out_specs, strict=False)
        outputs = [(graph.outputs[i], made.outs.of_parts[i], spec) for i, spec in left]
        for role, tensors in (("input", inputs), ("output", outputs)):
            for tensor, sharding, spec in tensors:
                table = sharding.devices_indices_map(tensor.shape)
                for device, mask in zip(devices, spec_masks(spec, sizes, tensor.shape), strict=True):
                    at = [i.indices(size)[:2] for i, size in zip(table[device], tensor.shape, strict=True)]
                    box = [interval for (interval,) in mask.box]
                    if at != box:
                        raise VerificationError(
                            f"{role} '{tensor.name}': {device} has {at} by its sharding, {box} by the program"
                        )


def _prove(
    local: Local,
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    held: Frame,
    wanted: Frame,
    names: Sequence[Any],
    where: Callable[[], str],
    edges: tuple[Edge, ...] = (),
) -> tuple[list[str], int]:
    """Interpret one exchange and check what arrives; the collectives it ran and the elements it put in place."""
    patterns = Patterns(shape)
    interpreter = Interpreter(sizes, patterns)
    start, expected = patterns.held(held), list(wanted.shape)
    for edge in edges:
        expected[edge.dim] += edge.before + edge.after

    def here() -> str:
        return where() + (f" by {', '.join(interpreter.passed)}" if interpreter.passed else "")

    try:
        (end,) = interpreter.run(local.jaxpr, local.bind([start], interpreter.constant))
    except VerificationError as error:
        raise VerificationError(f"{here()}: {error}") from None
    if (left := list(end.shape[1:])) != expected:
        raise VerificationError(f"{here()} leaves local arrays of {left}; {expected} are wanted")
    if (kind := dtype_of(local.jaxpr.outvars[0])) != (started := dtype_of(local.jaxpr.invars[-1])):
        raise VerificationError(f"{here()} makes {kind} of {started}")
    cells = end if isinstance(end, Symbolic) else patterns.constants(end)
    if edges:
        right = extended(patterns, held, edges, start.pattern.reshape(len(names), -1)[:, 0])
        return interpreter.passed, check_extended(patterns, cells, right, edges, names, here)
    return interpreter.passed, Arrival(patterns, held, wanted, names, here).check(cells)


def _axes_of(mesh: DeviceMesh | Mesh | AbstractMesh) -> tuple[dict[str, int], list[Any]]:
    """A mesh's axes in order, and its devices' numbers by position."""
    if isinstance(mesh, DeviceMesh):
        return dict(mesh.axes), list(mesh.devices)
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    if isinstance(mesh, Mesh):
        return sizes, [d.id for d in mesh.devices.flat]
    return sizes, list(range(mesh.size))
