"""``Executable``: a planned step as jitted functions of flat leaves, one for each device group."""

import functools
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jscaler.capture.jaxprs import dtype, shape
from jscaler.capture.wishes import no_mesh
from jscaler.ir import PTensor
from jscaler.ir.overview import Overview, Shown
from jscaler.lower.alike import program_keys
from jscaler.lower.donation import donated_imports, donated_inputs
from jscaler.lower.emit import emit, physical_mesh, value_shape, value_shardings
from jscaler.lower.instructions import Gather, Instruction, Instructions, Run, Send
from jscaler.lower.leaf_shardings import only_device, shardings
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import Layout
from jscaler.runtime.absent import absent, is_absent
from jscaler.runtime.crossings import Hop, find_hop
from jscaler.runtime.devices import by_gloo, is_here
from jscaler.runtime.failures import failure, unchecked
from jscaler.runtime.leaf_ends import Joined, LeafEnds
from jscaler.runtime.process_messages import wait_on_cpus
from jscaler.text.units import counted

FEW_BITS = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
MOST_LISTED = 16
MOST_STARTED = 8  # programs of several devices that run at once: XLA's CPU backend aborts at some number of these


@dataclass(frozen=True)
class BlockFunction:
    """What one device group computes between crossings.

    Attributes:
        takes: the numbers of the step's leaves that it takes; behind them come its imports.
        computed: the places of its results and exports that are not leaves as they came.
        values: what its imports are.
        watched: the place of a result that nobody donates, where it runs on several devices of the CPU backend.
        named: the number of the first block of the same program, whose names XLA's text has.
        few_bits: whether it takes numbers of less than a byte, whose layout JAX's compiled functions refuse, and its jitted
            ones do not.
        here: whether this process has devices of its group, and so runs it.
        shared: those of them that are this process's, where it has not all.
    """

    jitted: Any
    takes: tuple[int, ...]
    computed: tuple[int, ...]
    named: int
    values: tuple[jax.ShapeDtypeStruct, ...] = ()
    watched: int | None = None
    few_bits: bool = False
    here: bool = True
    shared: tuple[Any, ...] = ()

    @property
    def described(self) -> str:
        """What it takes and computes, in numbers."""
        taken, values = counted(len(self.takes), "leaf", "leaves"), counted(len(self.values), "value")
        return f"takes {taken} and {values} of other blocks, computes {counted(len(self.computed), 'value')}"


@dataclass(frozen=True)
class Between:
    """What runs between blocks.

    Attributes:
        hops: of every transfer; None where this process has no part in it.
        gathers: by the number of a stack of what iterations leave: what makes it.
        counts: slots that hold the numbers of micro-batches.
        others: values that lie on other processes' devices.
    """

    hops: tuple[Hop | None, ...] = ()
    gathers: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    counts: Mapping[int, Any] = field(default_factory=dict)
    others: frozenset[int] = frozenset()


@dataclass(frozen=True, repr=False)
class Executable(Shown):
    """A step as jitted functions of flat leaves, with the shardings of its arguments and results.

    Attributes:
        blocks: each returns results of the step, and values for others.
        instructions: how they run.
        make_between: what runs between them, made when it is wanted: devices that are only described run nothing.
        ins, outs: the leaves that the step's inputs and outputs are.
        donated: positions of the leaves whose buffers the step may reuse.
        returned: output -> the input that it is, untouched: of a frozen layer nothing is copied.
        gives_away: whether a block reuses the memory of something that it reads.
        failed: what an error is raised as, given the number of the block, its leaves and imports, and its micro-batch.
        types: of its outputs.
    """

    blocks: tuple[BlockFunction, ...]
    instructions: Instructions
    make_between: Callable[[], Between] = field(repr=False, compare=False)
    ins: LeafEnds
    outs: LeafEnds
    donated: tuple[int, ...]
    returned: Mapping[int, int] = field(default_factory=dict)
    gives_away: bool = False
    failed: Callable[..., Exception] = field(default=lambda error, *_: error, repr=False)
    types: tuple[Any, ...] = field(default=(), repr=False)
    known: Joined = field(default_factory=Joined, repr=False, compare=False)

    def overview(self) -> Overview:
        """How many blocks and leaves, and what the first blocks take and compute."""
        taken = counted(len(self.ins.shardings), "leaf", "leaves")
        made = counted(len(self.outs.shardings), "leaf", "leaves")
        rest = len(self.blocks) - MOST_LISTED
        return Overview(
            [
                f"Executable of {counted(len(self.blocks), 'block')}: {taken} in, {len(self.donated)} donated; {made} out, "
                f"{len(self.returned)} as they came",
                *(f"block {number}: {one.described}" for number, one in enumerate(self.blocks[:MOST_LISTED])),
                *([f"and {rest} more"] if rest > 0 else []),
                "print(lowered) lists the instructions of each device group, lowered.as_text() is StableHLO",
            ]
        )

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Of the leaves of its arguments."""
        return self.ins.shardings

    def calls(self, compiled: Sequence[Any]) -> tuple[Callable[..., Sequence[Any]], ...]:
        """What runs each block: what XLA compiled of it, where JAX lets it be called with such numbers; None of others'."""
        return tuple(block.jitted if block.few_bits else one for block, one in zip(self.blocks, compiled, strict=True))

    @functools.cached_property
    def between(self) -> Between:
        """What runs between blocks, compiled."""
        return self.make_between()

    @functools.cached_property
    def absent(self) -> dict[int, jax.Array]:
        """The outputs that other processes have."""
        numbers = [i for i, s in enumerate(self.outs.of_parts) if i not in self.returned and is_absent(s)]
        made = absent([self.types[i] for i in numbers], [self.outs.of_parts[i] for i in numbers])
        return dict(zip(numbers, made, strict=True))

    @functools.cached_property
    def untouched(self) -> frozenset[int]:
        """The leaves that are returned as they came."""
        return frozenset(map(self.ins.leaf_of, self.returned.values()))

    def run(
        self,
        compiled: Sequence[Callable[..., Sequence[Any]]],
        leaves: Sequence[Any],
        observe: Callable[[int, Sequence[Any]], None] | None = None,
    ) -> Sequence[Any]:
        """All results, of ``leaves``, by the blocks' executables; of what is returned untouched the leaf itself.

        Args:
            observe: is told of each instruction, when it was started, its place and what it leaves.

        Raises:
            BlockError, NotFiniteError: a block has failed.
        """
        if self._is_one_program:
            try:
                made = compiled[0](*leaves)
                if shared := self.blocks[0].shared:
                    wait_on_cpus(made, shared)
                if observe is not None:
                    observe(0, made)
                return made
            except Exception as error:
                raise self.failed(error, 0, leaves, ()) from error
        given, leaves = leaves, unchecked(self.ins.taken_apart)(leaves, self.known)
        slots: list[Any] = [None] * self.instructions.slots
        for slot, number in self.between.counts.items():
            slots[slot] = number
        started: list[Any] = []
        for place, (block, hop, takes, reads, writes, watched, freed, microbatches) in enumerate(self.steps):
            if hop is None:
                try:
                    made = compiled[block](*[leaves[i] for i in takes], *[slots[i] for i in reads])
                except Exception as error:
                    given = [leaves[i] for i in takes] + [slots[i] for i in reads]
                    raise self.failed(error, block, given, microbatches) from error
                for slot, value in zip(writes, made):  # noqa: B905  # (runs hundreds of times a step)
                    slots[slot] = value
                if shared := self.blocks[block].shared:
                    wait_on_cpus(made, shared)
                elif watched is not None:
                    started.append(made[watched])
                    if len(started) > MOST_STARTED:
                        jax.block_until_ready(started.pop(0))
            else:
                made = [hop(*[slots[i] for i in reads])]
                slots[writes[0]] = made[0]
            if observe is not None:
                observe(place, made)
            for slot in freed:
                slots[slot] = None
        for result, leaf in self.returned.items():
            slots[result] = leaves[leaf]
        for result, array in self.absent.items():
            slots[result] = array
        for end in self.ins.stacked:
            if end.number in self.donated:
                given[end.number].delete()  # its parts have been given away
        joined = unchecked(self.outs.joined)(slots[: self.outs.total], self.known)
        if not self.kept:
            return joined
        made = [*joined]
        for result, leaf in self.kept.items():
            made[result] = given[leaf]
        return made

    @functools.cached_property
    def kept(self) -> dict[int, int]:
        """The leaves of several outputs each of which is one of a leaf's inputs as it came: the leaf itself is returned."""
        leaves = {tuple(end.places): end.number for end in self.ins.stacked}
        found = {end.number: leaves.get(tuple(self.returned.get(i, -1) for i in end.places)) for end in self.outs.stacked}
        return {result: leaf for result, leaf in found.items() if leaf is not None}

    @functools.cached_property
    def _is_one_program(self) -> bool:
        """Whether one block takes the leaves as they are: where another group has leaves alone, it takes a few of them."""
        alone = len(self.blocks) == 1 and not self.returned and self.blocks[0].here
        return alone and self.blocks[0].takes == tuple(range(self.ins.total))

    @functools.cached_property
    def steps(self) -> tuple[tuple[Any, ...], ...]:
        """This process's instructions as tuples: block, way, leaves, slots read and written, what to wait on, slots freed,
        and the micro-batches."""
        return tuple(map(self._prepared, filter(self._is_here, self.instructions.steps)))

    def _is_here(self, step: Instruction) -> bool:
        if isinstance(step, Run):
            return self.blocks[step.block].here
        if isinstance(step, Send):
            return self.between.hops[step.transfer] is not None
        return step.value not in self.between.others

    def _prepared(self, step: Instruction) -> tuple[Any, ...]:
        if isinstance(step, Run):
            block = self.blocks[step.block]
            writes = tuple(step.writes[place] for place in block.computed)
            return step.block, None, block.takes, step.reads, writes, block.watched, step.freed, step.microbatches
        if isinstance(step, Send):
            hop = self.between.hops[step.transfer]
            assert hop is not None
            return -1, unchecked(hop), (), (step.source,), (step.target,), None, step.freed, ()
        stack = self.between.gathers.get(step.value, lambda *_: None)  # nobody reads it
        return -1, unchecked(stack), (), step.pieces, (step.target,), None, step.freed, ()


def executable(step: StepPlan, devices: Sequence[Any], donate: Sequence[int], reuse: bool = True) -> Executable:
    """The step on ``devices``; ``donate`` lists flat argument indices whose buffers may be reused.

    Where ``reuse`` is off, no buffer is, that of a sum neither: so that all that a block leaves can be waited for.
    On no devices, where as many as the plan has are not at hand, it can be lowered and not compiled.
    """
    ins, outs = shardings(step, devices)
    meshes = [step.completed.inputs[t].mesh for t in step.graph.inputs], [layout.mesh for layout in step.completed.outputs]
    leaves = LeafEnds.of(step.graph.inputs, ins, meshes[0], step.graph.leaf_parts, step.graph.copy_of)
    results = LeafEnds.of(step.graph.outputs, outs, meshes[1], step.graph.result_parts, step.graph.copy_of)
    donated, donate = tuple(donate), leaves.numbers(donate)
    pairs = zip(step.blocks, step.taken, strict=True)
    returned = {i: at for block, takes in pairs for i, at in _returned(block, takes, ins, outs, donate).items()}
    programs = enumerate(_programs(step, returned, by_gloo(devices)))
    jits: dict[tuple[Any, ...], Any] = {}
    functions = tuple(_function(step, n, program, devices, donate, ins, outs, reuse, jits) for n, program in programs)
    between = functools.partial(_between, step, functions, devices)
    failed = functools.partial(failure, step, devices)
    types = tuple(t.aval for t in step.graph.outputs)
    gives_away = any(given for *_, given in jits)
    return Executable(functions, step.instructions, between, leaves, results, donated, returned, gives_away, failed, types)


def _between(step: StepPlan, functions: Sequence[BlockFunction], devices: Sequence[Any]) -> Between:
    """What sends, stacks and counts between the blocks of a step."""
    pairs = zip(step.blocks, functions, strict=True)
    arriving = {t.source: _value_sharding(physical_mesh(t.crossing.source.mesh, devices)) for t in step.transfers}
    arriving.update((v, s.sharding) for block, one in pairs for v, s in zip(block.imports, one.values, strict=True))
    known: dict[Any, Any] = {}
    hops = tuple(
        find_hop(t.crossing, t.tensor.dtype, devices, arriving[t.target], known) if t.target in arriving else None
        for t in step.transfers
    )
    numbers = step.instructions.counts.items()
    others = frozenset(value for value, place in arriving.items() if is_absent(place))
    counts = {s: jax.device_put(np.int32(number), arriving[v]) for s, (v, number) in numbers if v not in others}
    return Between(hops, _gathers(step, arriving), counts, others)


def _gathers(step: StepPlan, arriving: Mapping[int, Any]) -> dict[int, Callable[..., Any]]:
    """What puts the parts that iterations have left behind each other, on every device its own."""
    found: dict[int, Callable[..., Any]] = {}
    shapes = {t.source: t.crossing.source.local_shape for t in step.transfers}
    for block in step.blocks:
        shapes.update((v, shape(x)) for v, x in zip(block.imports, block.flat.inputs[len(block.takes) :], strict=True))
    for made in (one for one in step.instructions.steps if isinstance(one, Gather)):
        if made.value not in arriving:
            continue  # nobody reads it
        kept = shapes[made.value]

        def stack(*parts: Any, kept: tuple[int, ...] = kept) -> Any:
            return jnp.stack([part.reshape(kept[1:]) for part in parts])

        place = arriving[made.value]
        if isinstance(place, NamedSharding):
            one = P(place.mesh.axis_names) if kept[1:] else P()
            specs = tuple(one for _ in made.pieces)
            run = jax.shard_map(stack, mesh=place.mesh, in_specs=specs, out_specs=place.spec, check_vma=False)
        else:
            run = stack
        found[made.value] = no_mesh()(jax.jit(run))
    return found


@dataclass(frozen=True)
class _Program:
    """What a block computes of leaves and imports, on a mesh of any devices; the rest as a `BlockFunction` has it."""

    run: Callable[..., list[Any]]
    named: int
    takes: tuple[int, ...]
    computed: tuple[int, ...]
    few_bits: bool


def _programs(step: StepPlan, returned: Mapping[int, int], gloo: bool) -> list[_Program]:
    """The program of each block. Blocks of one program have one function, which JAX traces and lowers once."""
    constants = dict(step.graph.constants)
    known: dict[Hashable, _Program] = {}
    found = []
    for number, (block, takes, key) in enumerate(zip(step.blocks, step.taken, program_keys(step.blocks), strict=True)):
        values = [constants[t] for t in block.takes[len(takes) :]]
        computed = [place for place, i in enumerate(block.results) if i not in returned]
        computed += range(len(block.results), len(block.outputs))
        whole = key, tuple(computed), tuple(map(id, values))
        if whole not in known:
            few_bits = any(dtype(v).name in FEW_BITS for v in block.flat.inputs)
            known[whole] = _Program(_run(block, len(takes), values, computed, gloo), number, takes, whole[1], few_bits)
        found.append(replace(known[whole], takes=takes))
    return found


def _run(
    block: PlacedBlock, num_takes: int, values: Sequence[Any], computed: Sequence[int], gloo: bool
) -> Callable[..., list[Any]]:
    fun = emit(block, physical_mesh(block.group, ()), gloo)

    def run(*leaves: Any) -> list[Any]:  # in XLA's text arguments go by this name
        results = fun(*leaves[:num_takes], *values, *leaves[num_takes:])
        return [results[place] for place in computed]

    return run


def _function(
    step: StepPlan,
    number: int,
    program: _Program,
    devices: Sequence[Any],
    donate: Sequence[int],
    ins: Sequence[Any],
    outs: Sequence[Any],
    reuse: bool,
    jits: dict[tuple[Any, ...], Any],
) -> BlockFunction:
    block, takes = step.blocks[number], program.takes
    mesh = physical_mesh(block.group, devices)
    given = donated_inputs(step, number, frozenset(donate))
    donated = [place for place, i in enumerate(takes) if i in given]
    donated += [len(takes) + place for place in donated_imports(step, block)]
    imports = _values(block, mesh)
    exports = _shardings(block.outputs[len(block.results) :], mesh)
    own = (*(ins[i] for i in takes), *(struct.sharding for struct in imports))
    made = [*(outs[block.results[place]] for place in program.computed if place < len(block.results)), *exports]
    key = program.run, own, tuple(made), tuple(donated) if reuse else ()
    if key not in jits:
        jits[key] = jax.jit(key[0], in_shardings=own, out_shardings=made, donate_argnums=key[3])
    jitted = jits[key]
    watched = _watched(step, block, devices, program.computed)
    group = [devices[d] for d in block.group.devices] if devices else []
    mine = tuple(filter(is_here, group))
    shared = mine if len(mine) < len(group) else ()
    here = bool(mine) or not devices
    return BlockFunction(
        jitted, takes, program.computed, program.named, tuple(imports), watched, program.few_bits, here, shared
    )


def _watched(step: StepPlan, block: PlacedBlock, devices: Sequence[Any], computed: Sequence[int]) -> int | None:
    """The place of what tells that a block has run; only XLA's CPU backend wants few at once."""
    if not block.group.axes or not devices or devices[0].platform != "cpu":
        return None
    carried = {v for c in step.spanning.carries for v in (c.init, c.out)} if step.spanning is not None else set()
    numbers = (*block.results, *block.exports)
    return next((at for at, place in enumerate(computed) if numbers[place] not in carried), None)


def _values(block: PlacedBlock, mesh: Mesh | AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    """The imports of a block, values of others; a weak type stays, or the next call would be of another type."""
    variables = block.flat.inputs[len(block.takes) :]
    layouts = block.inputs[len(block.takes) :]
    shapes = [value_shape(layout, block.group, shape(v)) for v, layout in zip(variables, layouts, strict=True)]
    places = _shardings(layouts, mesh)
    return [
        jax.ShapeDtypeStruct(whole, dtype(v), sharding=place, weak_type=getattr(v.aval, "weak_type", False))
        for v, whole, place in zip(variables, shapes, places, strict=True)
    ]


def _shardings(ends: Sequence[Layout | None], mesh: Mesh | AbstractMesh) -> list[Any]:
    """Those of values between blocks."""
    if not mesh.axis_names:
        return [SingleDeviceSharding(only_device(mesh))] * len(ends)
    return list(value_shardings(ends, mesh))


def _value_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding | SingleDeviceSharding:
    """That of a value which is all devices' parts in a row."""
    return SingleDeviceSharding(only_device(mesh)) if not mesh.axis_names else NamedSharding(mesh, P(mesh.axis_names))


def _returned(
    block: PlacedBlock, takes: Sequence[int], ins: Sequence[Any], outs: Sequence[Any], donate: Sequence[int]
) -> dict[int, int]:
    """Which results are arguments as they came, in the same layout; XLA would copy each.

    Not the donated ones: their results take their buffers. An argument that is returned twice is copied once, since two
    leaves of one state that are the same array could not both be donated to the next step.
    """
    at = {var: i for var, i in zip(block.flat.inputs, takes, strict=False) if i not in donate}
    found: dict[int, int] = {}
    for i, value in zip(block.results, block.flat.outputs, strict=False):
        if isinstance(value, core.Var) and value in at and ins[at[value]] == outs[i]:
            found[i] = at.pop(value)
    return found


def traced(step: StepPlan, made: Executable, only: Container[int] | None = None) -> tuple[Any, ...]:
    """``made`` as a ``jax.stages.Traced`` for each block. JAX remembers them: asked again, it traces nothing.

    With ``only`` those blocks alone, by their numbers; None for others.

    Under ``jax.debug_nans`` JAX would leave out what is donated, also where that is switched off again.
    """
    structs = input_structs(step.graph.inputs, made.ins.of_parts)
    known: dict[Hashable, Any] = {}  # on absent devices groups are alike
    found = []
    for number, one in enumerate(made.blocks):
        if only is not None and number not in only:
            found.append(None)
            continue
        given = (*(structs[i] for i in one.takes), *one.values)
        key = one.jitted, given
        if key not in known:
            with jax.debug_nans(False):
                known[key] = one.jitted.trace(*given)
        found.append(known[key])
    return tuple(found)


def lowered(step: StepPlan, made: Executable, only: Container[int] | None = None) -> tuple[Any, ...]:
    """``made`` as StableHLO, a ``jax.stages.Lowered`` for each block, or as `traced` has them; of absent devices for the
    default backend.
    """
    absent = any(isinstance(getattr(s, "mesh", None), AbstractMesh) for s in (*made.ins.of_parts, *made.outs.of_parts))
    platforms = {"lowering_platforms": (jax.default_backend(),)} if absent else {}
    each = traced(step, made, only)
    programs = {id(one): one and one.lower(**platforms) for one in {id(one): one for one in each}.values()}
    return tuple(programs[id(one)] for one in each)


def input_structs(inputs: Sequence[PTensor], in_shardings: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What ``jax.jit(...).lower`` takes for a graph's inputs."""
    return [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=s, weak_type=getattr(t.aval, "weak_type", False))
        for t, s in zip(inputs, in_shardings, strict=True)
    ]
