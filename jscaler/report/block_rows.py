"""The blocks of a step on several device groups: what each runs, keeps and sends; and a step as instructions to follow."""

from collections.abc import Iterator
from dataclasses import dataclass

from jscaler.capture.jaxprs import nbytes
from jscaler.lower.instructions import Gather, Run, Send, microbatch_text
from jscaler.lower.segment import own_ops
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import DeviceMesh
from jscaler.report.step_text import COUNTS, layout_legend
from jscaler.text.device_list import devices_text
from jscaler.text.tables import aligned
from jscaler.text.units import counted, readable_bytes


@dataclass(frozen=True)
class BlockRow:
    """A block: one executable.

    Attributes:
        name: its cells of the table (``0F``, ``1F 1B``), or ``block 7``.
        times: how often it runs in a step.
        num_ops, first, last: the ops that the user wrote, or where there are none those that the plan implies.
        kept: bytes that a device holds of each micro-batch for later blocks of its group.
        sends: the tensors that go to other groups behind it.
    """

    name: str
    devices: list[int]
    times: int
    num_ops: int
    first: str
    last: str
    kept: int
    sends: tuple[str, ...]


def block_rows(step: StepPlan) -> tuple[BlockRow, ...]:
    """All blocks, in the order of the program."""
    rows = []
    for number, block in enumerate(step.blocks):
        paths = own_ops(step.graph, block) or [""]
        sends = tuple(t.tensor.name for t in step.sent if t.source in block.exports)
        first, last = paths[0], paths[-1] if len(paths) > 1 else ""
        row = step.block_name(number), [*block.group.devices], step.runs_of(number), len(paths), first, last
        rows.append(BlockRow(*row, kept_bytes(step, number), sends))
    return tuple(rows)


def kept_bytes(step: StepPlan, number: int) -> int:
    """What a device holds of each micro-batch for blocks of its group that run later, what has come to it included; sums
    of gradients, of all micro-batches, do not count."""
    block, spanning = step.blocks[number], step.spanning
    if spanning is None or block.phase not in spanning.phases:
        return 0
    carried = {value for c in spanning.carries for value in (c.out, c.inside)}
    arrived = {t.target for t in step.transfers if t.phase == block.phase}
    own = {*block.exports, *(arrived & {*block.imports})} - carried
    later = [b for b in step.blocks if b.group == block.group and b.phase == block.phase and b.level > block.level]
    pairs = {pair for b in later for pair in zip(b.imports, b.flat.inputs[len(b.takes) :], strict=True)}
    held = {value: var for value, var in pairs if value in own}
    return sum(map(nbytes, held.values()))


def instructions_text(step: StepPlan) -> str:
    """What each device group does, one instruction after another."""
    groups = dict.fromkeys(block.group for block in step.blocks)
    devices, blocks = counted(step.plan.num_devices, "device"), counted(len(step.blocks), "block")
    lines = [f"plan {step.name} ({step.digest}) on {devices}, as {blocks}"]
    for group in groups:
        told = any(map(COUNTS.search, lines))
        table = aligned([*_of_group(step, group)])
        lines += ["", f"devices {devices_text(group.devices)}", *table, *([] if told else layout_legend(table))]
    return "\n".join(lines)


def _of_group(step: StepPlan, group: DeviceMesh) -> Iterator[tuple[str, ...]]:
    for one in step.instructions.steps or (Run(0, (), ()),):
        if isinstance(one, Run):
            block = step.blocks[one.block]
            if block.group == group:
                ops = own_ops(step.graph, block) or ["no ops"]
                shown = " … ".join(dict.fromkeys((ops[0], ops[-1])))
                yield "run", step.block_name(one.block), microbatch_text(one.microbatches), shown
        elif isinstance(one, Send):
            transfer = step.transfers[one.transfer]
            source, target = transfer.crossing.source, transfer.crossing.target
            of = microbatch_text(() if one.microbatch is None else (one.microbatch,))
            size = readable_bytes(transfer.crossing.sent * transfer.tensor.itemsize)
            if source.mesh == group:
                to = f"to {devices_text(target.mesh.devices)}, {source.counts}, {size} of all devices"
                yield "send", transfer.tensor.name, of, to
            if target.mesh == group:
                came = f"from {devices_text(source.mesh.devices)}, {target.counts}"
                yield "take", transfer.tensor.name, of, came
        elif any(one.value in block.imports for block in step.blocks if block.group == group):
            assert isinstance(one, Gather)
            yield "stack", f"{len(one.pieces)} micro-batches", "", ""
