"""What the blocks of a step run: the very jaxprs that JAX has traced to lower them, and what each takes and leaves.

A block that runs together with another as one executable (`PlacedBlock.parts`) is traced by itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from jscaler.capture.jaxprs import dtype, shape, shape_struct
from jscaler.ir import PTensor
from jscaler.lower.emit import emit, physical_mesh, value_shape
from jscaler.lower.segment import PlacedBlock, Segment
from jscaler.lower.step_plan import StepPlan
from jscaler.runtime.compiled import Lowered
from jscaler.runtime.devices import by_gloo
from jscaler.runtime.executable import executable, traced
from jscaler.verification.local_programs import Local, local_program, open_shard_map
from jscaler.verification.values import Values


@dataclass(frozen=True)
class EmittedBlock:
    """A block, and what one of its devices runs.

    Attributes:
        local: of the first ``num_takes`` of what the block takes, and its imports; further ones are constants in it.
        num_takes: how many inputs of the step it takes; what it takes behind them are constants.
        computed: the places of its results and exports that ``local`` returns; the others are inputs as they came.
    """

    block: PlacedBlock
    local: Local
    num_takes: int
    computed: tuple[int, ...]

    @property
    def inputs(self) -> Iterable[tuple[PTensor, PartitionSpec]]:
        """The inputs of the step, and constants, that it takes, and how each is cut."""
        count = len(self.block.takes)
        constants = [layout.partition_spec() for layout in self.block.inputs[self.num_takes : count] if layout is not None]
        specs = (*self.local.in_specs[: self.num_takes], *constants)
        return [(t, spec) for t, spec in zip(self.block.takes, specs, strict=True) if spec is not None]

    @property
    def outputs(self) -> dict[int, PartitionSpec]:
        """The step's results that it leaves, by number, and how each is cut."""
        specs = dict(zip(self.computed, self.local.out_specs, strict=True))
        returned = {place: self.local.in_specs[at] for place, at in self._returned.items()}
        return {number: (specs | returned)[place] for place, number in enumerate(self.block.results)}

    @cached_property
    def _returned(self) -> dict[int, int]:
        """The places of results that are inputs as they came, and those of the inputs."""
        at = {var: i for i, var in enumerate(self.block.flat.inputs[: self.num_takes])}
        pairs = enumerate(self.block.flat.outputs)
        return {i: at[v] for i, v in pairs if i not in self.computed and isinstance(v, core.Var)}

    def numbers(self, values: Values, leaves: Mapping[PTensor, int], between: Mapping[int, int]) -> dict[int, int]:
        """The numbers of its results and exports.

        Args:
            leaves: those of the step's inputs.
            between: those of what programs and blocks hand on.
        """
        block = self.block
        args = [*(leaves[t] for t in block.takes[: self.num_takes]), *(between[v] for v in block.imports)]
        found = dict(zip(self.computed, values.results(self.local, args), strict=True))
        found |= {place: args[at] for place, at in self._returned.items()}
        return {number: found[place] for place, number in enumerate((*block.results, *block.exports))}

    def key_in(self, segment: Segment, number: dict[int, int]) -> tuple[object, ...]:
        """A key that it shares with another segment's block that computes the same of that segment's values.

        Args:
            number: of the values of the segment so far; those that its blocks hand to each other are numbered here.
        """
        block = self.block
        place = {t: i for i, t in enumerate(segment.program.tensors)}
        ends = (block.imports, block.results, block.exports)
        numbers = tuple(tuple(number.setdefault(value, len(number)) for value in values) for values in ends)
        takes = tuple(place[t] for t in block.takes)
        return id(self.local.jaxpr), self.num_takes, self.computed, tuple(self._returned.items()), takes, numbers


def emitted_blocks(step: StepPlan, lowered: Lowered | None) -> dict[int, EmittedBlock]:
    """The blocks of all segments of ``step``, by identity.

    Args:
        lowered: where there is one, what was traced for it is looked at, unless it is written for gloo's sums.
    """
    use = lowered is not None and not by_gloo(lowered.devices)
    made = lowered.executable if lowered is not None and use else executable(step, (), ())
    known: dict[int, Local] = {}
    found = {}
    for block, one, jaxpr in zip(step.blocks, made.blocks, traced(step, made), strict=True):
        if id(jaxpr) not in known:
            known[id(jaxpr)] = local_program(jaxpr.jaxpr)
        found[id(block)] = EmittedBlock(block, known[id(jaxpr)], len(one.takes), one.computed)
    for segment in step.segments:
        for block in segment.blocks:
            if id(block) not in found:
                found[id(block)] = _by_itself(block)
    return found


def _by_itself(block: PlacedBlock) -> EmittedBlock:
    count = len(block.takes)
    structs = [shape_struct(t.aval) for t in block.takes]
    for variable, layout in zip(block.flat.inputs[count:], block.inputs[count:], strict=True):
        whole = value_shape(layout, block.group, shape(variable))
        structs.append(jax.ShapeDtypeStruct(whole, dtype(variable)))
    local = open_shard_map(emit(block, physical_mesh(block.group, ())), structs)
    return EmittedBlock(block, local, count, tuple(range(len(block.outputs))))
