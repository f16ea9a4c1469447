"""What waits in slots while the blocks of a step on several device groups run: values for later blocks, and what has come.

A device holds its arguments throughout, what waits there, and what the block that runs needs beside both. Devices that
are of the same groups hold alike, so that the walk over the instructions has a row for each such set, a stage say.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.extend import core

from jscaler.capture.jaxprs import dtype, nbytes, shape
from jscaler.estimate.live import HeldKind, LiveTensor, LiveTensors
from jscaler.ir import PTensor
from jscaler.lower.donation import donated_inputs
from jscaler.lower.instructions import Instruction, Run, Send, Slot
from jscaler.lower.spanning_loop import Transfer
from jscaler.lower.step_plan import StepPlan

Devices = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """What lies in a slot, on each device of a group.

    Attributes:
        tensor: of the graph, of which it is a part; None where there is none.
        local: the part's shape and type.
    """

    devices: Devices
    what: LiveTensor
    tensor: PTensor | None
    local: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class BlockRun:
    """A run of a block, as a set of devices that hold alike sees it.

    Attributes:
        place: of the instruction.
        waiting: bytes in slots of these devices by kind, those that the block reads included, those that it writes not.
    """

    devices: Devices
    place: int
    block: int
    microbatches: tuple[int, ...]
    waiting: Mapping[HeldKind, int]


def devices_alike(step: StepPlan) -> tuple[Devices, ...]:
    """The sets of devices that are of the same groups: all, or those of a stage."""
    groups = {frozenset(block.group.devices) for block in step.blocks}
    groups |= {frozenset(t.crossing.target.mesh.devices) for t in step.sent}
    found: dict[frozenset[frozenset[int]], list[int]] = {}
    for device in sorted(frozenset[int]().union(*groups)):
        found.setdefault(frozenset(group for group in groups if device in group), []).append(device)
    return tuple(map(tuple, found.values()))


class Waiting:
    """Follows the slots of a step.

    Args:
        donate: the step's inputs whose buffers it may reuse.

    Attributes:
        alike: the sets of devices that hold alike.
    """

    def __init__(self, step: StepPlan, names: LiveTensors, donate: frozenset[int] = frozenset()):
        self.step, self.names = step, names
        self._left = [self._leaves(number, donate) for number in range(len(step.blocks))]
        self._sent = [self._arrives(transfer) for transfer in step.transfers]  # alike for every micro-batch
        self.alike = devices_alike(step)
        groups = {frozenset(block.group.devices) for block in step.blocks}
        groups |= {frozenset(t.crossing.target.mesh.devices) for t in step.sent}
        self._rows = {group: [i for i, own in enumerate(self.alike) if own[0] in group] for group in groups}

    def runs(self) -> Iterator[BlockRun]:
        """All runs of blocks in order, each once for every set of devices of its group."""
        for place, one, _, totals in self.states():
            if isinstance(one, Run):
                for row in self._rows[frozenset(self.step.blocks[one.block].group.devices)]:
                    yield BlockRun(self.alike[row], place, one.block, one.microbatches, dict(totals[row]))

    def worst(self, needs: Sequence[int]) -> dict[Devices, BlockRun]:
        """For each set of devices the run at which most is held, where each block needs so many bytes beside."""
        found: dict[Devices, tuple[int, BlockRun]] = {}
        for run in self.runs():
            nbytes = sum(run.waiting.values()) + needs[run.block]
            if run.devices not in found or nbytes > found[run.devices][0]:
                found[run.devices] = nbytes, run
        return {devices: run for devices, (_, run) in found.items()}

    def at(self, runs: Collection[BlockRun]) -> list[list[Held]]:
        """For each of ``runs`` what waits on its devices when it begins."""
        places = {run.place for run in runs}
        waits = {place: list(slots.values()) for place, _, slots, _ in self.states() if place in places}
        return [[held for held in waits[run.place] if run.devices[0] in held.devices and held.what.nbytes] for run in runs]

    def states(self) -> Iterator[tuple[int, Instruction, dict[Slot, Held], list[dict[HeldKind, int]]]]:
        """In front of each instruction what lies in the slots, and how many bytes that is on each set of devices."""
        slots: dict[Slot, Held] = {}
        totals: list[dict[HeldKind, int]] = [{} for _ in self.alike]
        for place, one in enumerate(self.step.instructions.steps):
            yield place, one, slots, totals
            made = self._made(one, slots)
            slots.update(made)
            gone = [slots.pop(slot) for slot in one.freed if slot in slots]
            for sign, every in ((1, made.values()), (-1, gone)):
                for held in every:
                    for row in self._rows[frozenset(held.devices)] if held.what.nbytes else ():
                        totals[row][held.what.kind] = totals[row].get(held.what.kind, 0) + sign * held.what.nbytes

    def _made(self, one: Instruction, slots: Mapping[Slot, Held]) -> dict[Slot, Held]:
        """What an instruction writes."""
        if isinstance(one, Run):
            return dict(zip(one.writes, self._left[one.block], strict=True))
        if isinstance(one, Send):
            return {one.target: self._sent[one.transfer]}
        pieces = [slots[slot] for slot in one.pieces]
        whole = replace(pieces[0].what, nbytes=sum(held.what.nbytes for held in pieces))
        local = jax.ShapeDtypeStruct((len(pieces), *pieces[0].local.shape), pieces[0].local.dtype)
        return {one.target: replace(pieces[0], what=whole, local=local)}

    def _arrives(self, sent: Transfer) -> Held:
        """What a transfer writes."""
        there, tensor = sent.crossing.target, sent.tensor
        what = self.names.of_tensor(tensor, math.prod(there.local_shape) * tensor.itemsize)
        return Held(there.mesh.devices, what, tensor, jax.ShapeDtypeStruct(there.local_shape, tensor.dtype))

    def _leaves(self, number: int, donate: frozenset[int]) -> list[Held]:
        """What a block writes; of what takes an argument's place, or is one, nothing."""
        step, block = self.step, self.step.blocks[number]
        given, versions = donated_inputs(step, number, donate), step.graph.next_version
        arguments = set(block.flat.inputs[: len(block.takes)])
        in_place = {place for place, i in enumerate(block.results) if versions.get(i) in given}
        found = []
        for place, value in enumerate(block.flat.outputs):
            var = value if isinstance(value, core.Var) else None
            untouched = place < len(block.results) and var in arguments
            size = nbytes(value) if var is not None and not untouched and place not in in_place else 0
            tensor = block.flat.origins.tensor.get(var) if var is not None else None
            local = jax.ShapeDtypeStruct(shape(value), dtype(value))
            what = self.names.of_variable(block.flat, var, size, value.aval.str_short(short_dtypes=True))
            found.append(Held(block.group.devices, what, tensor, local))
        return found
