"""``verify``: prove, from the emitted program alone, that every consumer gets each element and each summand once.

The proof has six parts:

1. each exchange, traced as it is emitted and interpreted symbolically, turns its producer's masks into its consumers';
2. each op's VTensors are what lies in its slots, from the step's inputs to its outputs (``flow``);
3. the emitted blocks compute the very values of those ops and exchanges one after another (``values``);
4. loops over parts in time visit each part of each tensor once, and join each summand once (``time_loops``);
5. the shardings of the compiled step mean the parts that the program takes and leaves;
6. the instructions give each block what it takes, of its micro-batch, neither freed nor donated, and each once (``slots``).

It looks at jaxprs, the mesh and masks, never at how transitions were found. Equal exchanges, and equal segments, are looked
at once, and large tensors are made smaller (``smaller``): a proof costs what the distinct parts of a step cost.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jscaler.capture.wishes import no_mesh
from jscaler.collector import no_full_collections
from jscaler.errors import VerificationError, listing
from jscaler.ir import PTensor
from jscaler.ir.mask import Mask
from jscaler.lower.flat_program import numbered_exchanges
from jscaler.lower.members import Members
from jscaler.lower.program import Compute, Program, Repeat, Task
from jscaler.lower.segment import Segment
from jscaler.lower.step_plan import StepPlan, step_of
from jscaler.materialize import DeviceMesh
from jscaler.runtime.chunked_array import ChunkedSharding
from jscaler.runtime.compiled import Compiled, Lowered
from jscaler.verification.emitted import EmittedBlock, emitted_blocks
from jscaler.verification.exchanges import Exchanges, prove
from jscaler.verification.flow import SlotFlow, max_carries, spec_masks
from jscaler.verification.frames import Frame
from jscaler.verification.local_programs import Local, trace_local
from jscaler.verification.plain_values import PlainValues
from jscaler.verification.segments import check_values
from jscaler.verification.slots import check_instructions
from jscaler.verification.time_loops import check_time_loops
from jscaler.verification.values import Values, numbered


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
        on_smaller: of the distinct exchanges those that were proven on a smaller tensor, cut in the same way: large ones.
        left_out: the tensors of which an exchange, or a cut into parts in time, was not proven, for their size.
    """

    devices: int
    exchanges: int
    distinct: int
    collectives: Mapping[str, int]
    elements: int
    reads: int = 0
    time_loops: int = 0
    on_smaller: int = 0
    left_out: tuple[str, ...] = ()

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
        if self.on_smaller:
            lines.append(f"  large        {self.on_smaller} exchanges, on smaller tensors that are cut in the same way")
        if self.left_out:
            lines.append(f"  left out     {listing(self.left_out)}, for their size")
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
    passed, elements = prove(local, sizes, shape, before, after, names, lambda: where)
    return Report(len(names), 1, 1, Counter(passed), elements)


@no_mesh()
@no_full_collections()
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
    exchanges: Exchanges = field(default_factory=Exchanges)
    proven_segments: set[Hashable] = field(default_factory=set)  # by a key that segments share if they compute the same
    device_numbers: dict[tuple[object, Members], Local] = field(default_factory=dict)

    def run(self) -> Report:
        collectives: Counter[str] = Counter()
        devices, elements, count, reads = set[Any](), 0, 0, 0
        values = check_values(self.step)
        for transfer in self.step.transfers:
            crossing, tensor = transfer.crossing, transfer.tensor
            passed, proven = self.exchanges.prove_crossing(
                crossing, tensor.shape, tensor.dtype, f"crossing of '{tensor.name}'"
            )
            devices.update(crossing.devices)
            collectives.update(passed)
            elements, count = elements + proven, count + 1
        emitted = emitted_blocks(self.step, self.lowered)
        for segment in self.step.segments:
            blocks = [emitted[id(block)] for block in segment.blocks]
            taken = {tensor: spec for block in blocks for tensor, spec in block.inputs}
            left = {number: spec for block in blocks for number, spec in block.outputs.items()}
            group = segment.program.group
            flow = SlotFlow(self.step, segment.program, group.devices, values)
            flow.walk(taken, left)
            items = [item for block in segment.blocks for item in block.flat.items]
            steps = {item.adapt.output: f"step {number}, " for number, item in numbered_exchanges(items)}
            for task, held, wanted in flow.exchanges:
                where = f"{steps.get(task.output, '')}exchange of '{held.tensor.name}'"
                passed, proven = self.exchanges.prove(group, task, held, wanted, where)
                collectives.update(passed)
                elements, count = elements + proven, count + 1
            self._same_values(segment, blocks, flow)
            self._shardings(segment.program, taken, left)
            devices.update(group.devices)
            reads += flow.num_reads
        self._leaf_ends()
        time_loops = check_time_loops(self.step, self.exchanges.left_out)
        reads += check_instructions(self.step)
        done = self.exchanges
        return Report(
            len(devices), count, done.distinct, collectives, elements, reads, time_loops, done.on_smaller,
            tuple(dict.fromkeys(done.left_out)),
        )  # fmt: skip

    def _leaf_ends(self) -> None:
        """A leaf that is several inputs, or outputs, has on each device what the part of it has there."""
        if self.lowered is None or not self.lowered.devices:
            return
        made = self.lowered.executable
        for role, end in (*(("input", e) for e in made.ins.stacked), *(("output", e) for e in made.outs.stacked)):
            if isinstance(end.sharding, ChunkedSharding):
                continue  # the leaf is its parts
            whole = end.sharding.devices_indices_map(end.shape)
            for shape, part, first in zip(end.shapes, end.parts, end.first_rows, strict=True):
                for device, index in part.devices_indices_map(shape).items():
                    own = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
                    own[:1] = [(start + first, stop + first) for start, stop in own[:1]]
                    found = [s.indices(n)[:2] for s, n in zip(whole[device], end.shape, strict=True)]
                    if found != own:
                        raise VerificationError(
                            f"{role} {end.number}, in parts: device {device.id} has {found} of the leaf, {own} of its part"
                        )

    def _same_values(self, segment: Segment, blocks: Sequence[EmittedBlock], flow: SlotFlow) -> None:
        """The emitted blocks compute the values of the program's tasks one after another; equal segments are one."""
        program = segment.program
        key = self._segment_key(segment, blocks)
        if key in self.proven_segments:
            return
        constants = dict(self.step.graph.constants)

        def both(values: Values) -> list[tuple[int, int, int]]:
            own = program.tensors[: len(program.tensors) - len(program.imports)]
            leaves = {t: values.constant(constants[t]) if t in constants else values.argument(t) for t in own}
            between = {value: values.argument(value) for value in program.imports}
            plain = PlainValues(program, self.exchanges, values, self.device_numbers)
            wanted = plain.numbers([*leaves.values(), *between.values()])
            for block in blocks:
                between |= block.numbers(values, leaves, between)
            ends = (*program.results, *program.exports)
            return [(index, between[index], number) for index, number in zip(ends, wanted, strict=True)]

        for index, ours, theirs in numbered(both, 2 * max_carries(program.tasks) + 1):
            if ours != theirs:
                name = flow.values[index].name if index in flow.values else self.step.graph.outputs[index].name
                raise VerificationError(
                    f"output {index} '{name}': the emitted program computes another value than the step's ops and "
                    "exchanges one after another"
                )
        self.proven_segments.add(key)

    def _segment_key(self, segment: Segment, blocks: Sequence[EmittedBlock]) -> Hashable:
        """A key of tasks and blocks: segments that share it compute the same of their inputs."""
        program = segment.program

        def key(task: Task) -> Hashable:
            if isinstance(task, Compute):
                return id(task.jaxpr), task.inputs, task.outputs, task.parts
            if isinstance(task, Repeat):
                times = task.loop.length, task.loop.reverse
                return times, task.carries, task.xs, task.ys, tuple(map(key, task.tasks))
            return self.exchanges.traced(program.group, task)[0], task.input, task.output

        ends = (*program.inputs, *program.outputs)
        constants = tuple(t for t, _ in self.step.graph.constants if t in program.tensors)
        number = {value: i for i, value in enumerate((*program.imports, *program.results, *program.exports))}
        alike = tuple(block.key_in(segment, number) for block in blocks)
        return tuple(map(key, program.tasks)), tuple(slot for slot, _ in ends), len(program.imports), constants, alike

    def _shardings(
        self, program: Program, taken: Mapping[PTensor, PartitionSpec], left: Mapping[int, PartitionSpec]
    ) -> None:
        """The compiled step's shardings put the parts where the program takes and leaves them."""
        if self.lowered is None or not self.lowered.devices:  # (lowered for devices that are not at hand)
            return
        graph, made = self.step.graph, self.lowered.executable
        devices = [self.lowered.devices[d] for d in program.group.devices]
        number = {t: i for i, t in enumerate(graph.inputs)}
        inputs = [(t, made.ins.of_parts[number[t]], spec) for t, spec in taken.items() if t in number]
        outputs = [(graph.outputs[i], made.outs.of_parts[i], left[i]) for i in program.results]
        for role, tensors in (("input", inputs), ("output", outputs)):
            for tensor, sharding, spec in tensors:
                table = sharding.devices_indices_map(tensor.shape)
                for device, mask in zip(devices, spec_masks(spec, dict(program.group.axes), tensor.shape), strict=True):
                    at = [i.indices(size)[:2] for i, size in zip(table[device], tensor.shape, strict=True)]
                    box = [interval for (interval,) in mask.box]
                    if at != box:
                        raise VerificationError(
                            f"{role} '{tensor.name}': {device} has {at} by its sharding, {box} by the program"
                        )


def _axes_of(mesh: DeviceMesh | Mesh | AbstractMesh) -> tuple[dict[str, int], list[Any]]:
    """A mesh's axes in order, and its devices' numbers by position."""
    if isinstance(mesh, DeviceMesh):
        return dict(mesh.axes), list(mesh.devices)
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    if isinstance(mesh, Mesh):
        return sizes, [d.id for d in mesh.devices.flat]
    return sizes, list(range(mesh.size))
