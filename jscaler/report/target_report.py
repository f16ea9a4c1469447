"""``TargetReport``: what XLA made of a planned step for a cluster that need not be there, as data and as tables."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from jscaler.clusters import Cluster
from jscaler.estimate.memory import MEMORY_KINDS, Memory, preallocation
from jscaler.ir.overview import FoldingTable, Overview, Shown
from jscaler.ir.walk import grouped
from jscaler.lower.instructions import Send
from jscaler.lower.segment import only
from jscaler.lower.step_plan import StepPlan
from jscaler.report.hlo import HloCollective, collectives
from jscaler.report.xla_memory import Contributor, DeviceMemory
from jscaler.text.device_list import devices_text
from jscaler.text.tables import printed, table
from jscaler.text.units import counted, readable_bytes

MOST_ROWS = 12
SEND = "send"
SUMMED = ("launches", "payload", "sent")  # of like rows
WHAT = {
    "parameters": "arguments",
    "optimizer": "arguments: all other state that the step updates",
    "inputs": "arguments: the batch, keys; constants",
    "gradients": "of parameters, at the peak",
    "activations": "made by the forward, kept for the backward or computed again, at the peak",
    "temporaries": "cotangents, copies, scratch space, at the peak",
    "outputs": "results that take no argument's place",
}


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind, type and grouping.

    Attributes:
        launches: how often one of them runs in a step, loops counted.
        payload: bytes per device, the larger of what goes in and what comes out, over all launches.
        sent: bytes that one device sends in a step.
        members: logical devices per group.
        groups: the logical devices of each group, in order; empty for a permute; of a send those of both ends.
        crosses: whether a group (of a permute: a message) spans hosts.
    """

    kind: str
    dtypes: tuple[str, ...]
    launches: int
    payload: int
    sent: float
    members: int
    groups: tuple[tuple[int, ...], ...]
    crosses: bool

    def is_sent_by(self, device: int) -> bool:
        """Whether a device is one of the senders; of a permute all are."""
        senders = self.groups[:1] if self.kind == SEND else self.groups
        return not senders or any(device in group for group in senders)


class Inspectable:
    """What an executable says of itself; it stands in ``compiled``."""

    compiled: Any

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        """What XLA allocates on a device, in bytes, as JAX has it."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """What XLA counts: FLOPs, bytes, as JAX has it."""
        return self.compiled.cost_analysis()


@dataclass(frozen=True)
class CompiledBlock(Inspectable):
    """A block of a step, compiled for a described cluster.

    Attributes:
        name: its cells of the table, or ``block 7``.
        devices: of its group.
        times: how often it runs in a step.
        xla: ``memory_analysis()``, in bytes.
        flops: of one run on one device, as XLA counts them; a loop's body counts once.
        alike: the number of the block that was compiled in its place: one of the same text, on a group that lies on the
            hosts as its own.
        compiled: JAX's executable. It has text and figures and cannot run.
    """

    name: str
    devices: tuple[int, ...]
    times: int
    xla: dict[str, int]
    flops: float
    alike: int
    compiled: Any = field(repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class TargetReport(Shown, Inspectable):
    """A step compiled for a described cluster: does it fit, what takes the memory, and what travels.

    Attributes:
        plan: the plan that was compiled, for as many devices as the cluster has.
        by_devices: the memory of each set of devices that hold alike: one, or one for each stage.
        collectives: one row for each kind, type and grouping; and what groups send to each other.
        blocks: what was compiled; one, of a step on one device group.
        seconds: what lowering and compiling took.
    """

    plan: StepPlan
    cluster: Cluster
    by_devices: tuple[DeviceMemory, ...]
    collectives: tuple[CollectiveRow, ...]
    blocks: tuple[CompiledBlock, ...]
    seconds: dict[str, float]

    @property
    def fullest(self) -> DeviceMemory:
        """The devices that have the least left."""
        return min(self.by_devices, key=lambda one: one.memory.headroom)

    @property
    def memory(self) -> Memory:
        """Of one of the fullest devices, by kind."""
        return self.fullest.memory

    @property
    def contributors(self) -> tuple[Contributor, ...]:
        """What such a device holds at the peak, the largest first; they add up to it."""
        return self.fullest.contributors

    @property
    def fits(self) -> bool:
        return self.memory.headroom >= 0

    @property
    def compiled(self) -> Any:
        """JAX's executable of a step that runs on one group. It has text and figures and cannot run."""
        return only(self.blocks, "what XLA compiled").compiled

    @property
    def xla(self) -> dict[str, int]:
        """``memory_analysis()`` of the block that runs when most is held, in bytes."""
        return self.blocks[self.fullest.block].xla

    @property
    def flops(self) -> float:
        """That a device executes in a step, of those that execute most, as XLA counts them; a loop's body counts once."""
        own = ({one.devices[0]} for one in self.by_devices)
        return max(sum(b.flops * b.times for b in self.blocks if here <= {*b.devices}) for here in own)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step, of those that send most."""
        return max(sum(row.sent for row in self.collectives if row.is_sent_by(one.devices[0])) for one in self.by_devices)

    def as_text(self, block: int | None = None) -> str:
        """The optimized HLO: of all blocks, each behind a line that says which it is, or of the one with a number."""
        if block is not None or len(self.blocks) == 1:
            return self.blocks[block or 0].as_text()
        return "\n".join(f"// {n}: {one.name}\n{one.as_text()}" for n, one in enumerate(self.blocks))

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        kinds = [part.device.name for part in self.cluster.kinds if part.device is not None]
        return {
            "plan": self.plan.name,
            "target": self.cluster.name,
            "device": "+".join(dict.fromkeys(kinds)) or None,
            "devices": self.cluster.num_devices,
            "memory": self.memory.as_json(),
            "contributors": [dataclasses.asdict(c) for c in self.contributors],
            "collectives": [dataclasses.asdict(c) for c in self.collectives],
            "by_devices": [dataclasses.asdict(one) | {"memory": one.memory.as_json()} for one in self.by_devices],
            "xla": self.xla,
            "flops": self.flops,
            "blocks": [{f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.compare} for one in self.blocks],
            "seconds": self.seconds,
        }

    def overview(self) -> Overview:
        """Whether it fits, the bytes by kind, and what travels; in a notebook also what is held at the peak."""
        kinds = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in self.memory.by_kind.items() if size)
        lines = [
            heading(self),
            verdict(self.memory),
            f"the fullest device: {kinds}",
            f"a device sends {readable_bytes(self.sent)} in a step, and executes {self.flops:.4g} FLOPs",
            f"{counted(len(self.blocks), 'block')} compiled in {sum(self.seconds.values()):.1f} s",
            "print(report) has the tables, .contributors and .collectives are their rows, .as_text() is XLA's text",
        ]
        header = "bytes", "kind", "arrays", "source"
        table = FoldingTable("held at the peak", header, self.contributors, lambda one: one.op, _cells, "print(report)")
        return Overview(lines, lambda: [table])

    def __str__(self) -> str:
        return as_text(self)


def _cells(one: Contributor) -> tuple[str, ...]:
    return readable_bytes(one.nbytes), one.kind, f"{one.count} × {one.shape}" if one.shape else "", one.source


def xla_bytes(stats: Any) -> dict[str, int]:
    """What JAX's ``memory_analysis()`` says, by name."""
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def collective_rows(text: str, devices: Sequence[int], cluster: Cluster, times: int = 1) -> tuple[CollectiveRow, ...]:
    """The collectives in a compiled module, like ones together, the most bytes first.

    Args:
        devices: the logical device at each position of the program's device list.
        cluster: whose hosts the devices sit on.
        times: how often the module runs in a step.
    """
    found: dict[Any, list[HloCollective]] = {}
    for one in collectives(text):
        groups = tuple(tuple(devices[i] for i in group) for group in one.groups)
        pairs = tuple((devices[a], devices[b]) for a, b in one.pairs)
        crosses = any(cluster.spans_hosts(group) for group in (*groups, *pairs))
        found.setdefault((one.kind, one.dtypes, one.members, groups, crosses), []).append(one)
    rows = [
        CollectiveRow(
            kind,
            dtypes,
            times * sum(c.times for c in ones),
            times * sum(c.times * c.nbytes for c in ones),
            times * sum(c.times * c.sent for c in ones),
            members,
            groups,
            crosses,
        )
        for (kind, dtypes, members, groups, crosses), ones in found.items()
    ]
    return tuple(sorted(rows, key=lambda r: -r.sent))


def send_rows(step: StepPlan, cluster: Cluster | None = None) -> tuple[CollectiveRow, ...]:
    """What groups send to each other, like hops together: ``sent`` by each device of the first group, in the mean. Without
    a cluster all devices are on one host."""
    found: dict[Any, tuple[int, int]] = {}
    for one in step.instructions.steps:
        if isinstance(one, Send):
            sent = step.transfers[one.transfer]
            ends = sent.crossing.source.mesh.devices, sent.crossing.target.mesh.devices
            key = str(sent.tensor.dtype), ends
            count, nbytes = found.get(key, (0, 0))
            found[key] = count + 1, nbytes + sent.crossing.sent * sent.tensor.itemsize
    rows = []
    for (dtype, ends), (count, nbytes) in ((key, figures) for key, figures in found.items() if figures[1]):
        crosses = cluster is not None and cluster.spans_hosts([*ends[0], *ends[1]])
        payload = nbytes // len(ends[1])
        rows.append(CollectiveRow(SEND, (dtype,), count, payload, nbytes / len(ends[0]), 2, ends, crosses))
    return tuple(sorted(rows, key=lambda r: -r.sent))


def together(rows: Iterable[CollectiveRow]) -> tuple[CollectiveRow, ...]:
    """The rows of all blocks: those of the same groups added up; then stages that do the same as one row, whose groups are
    those of all; the most bytes first."""
    added: dict[Any, CollectiveRow] = {}
    for row in rows:
        key = row.kind, row.dtypes, row.members, row.groups, row.crosses
        known = added.get(key)
        figures = {name: getattr(row, name) + getattr(known, name) for name in SUMMED} if known is not None else {}
        added[key] = dataclasses.replace(row, **figures)
    found = grouped((row if row.kind == SEND else dataclasses.replace(row, groups=()), row) for row in added.values())
    made = [dataclasses.replace(ones[0], groups=tuple(g for one in ones for g in one.groups)) for ones in found.values()]
    return tuple(sorted(made, key=lambda r: -r.sent))


# -- as text


def heading(report: TargetReport) -> str:
    """One line: the plan and the cluster."""
    cluster = report.cluster
    return f"plan {report.plan.name} on {cluster.name}: {cluster.described_hosts()}, compiled without them"


def verdict(memory: Memory) -> str:
    """Whether it fits, in words."""
    peak, capacity = (f"{readable_bytes(n)} ({n / 1e9:.2f} GB)" for n in (memory.peak, memory.capacity))
    if not memory.fits:
        beyond = readable_bytes(-memory.headroom)
        return f"does not fit: the peak of {peak} is {beyond} more than the {capacity} of a device"
    said = f"fits: {peak} of {capacity} per device at the peak, {readable_bytes(memory.headroom)} to spare"
    return said + preallocation(memory.peak, memory.capacity)


def memory_table(memory: Memory) -> Table:
    """Bytes by kind."""
    rows = [
        (kind, readable_bytes(size), f"{size / memory.capacity:.1%}", WHAT[kind])
        for kind, size in memory.by_kind.items()
        if size or kind != "outputs"
    ]
    made = table("memory of one device", ("kind", "bytes", "of the device", "what"), rows)
    made.add_section()
    share = f"{memory.peak / memory.capacity:.1%}"
    made.add_row("peak", readable_bytes(memory.peak), share, "all of it is reserved at once")
    return made


def devices_table(report: TargetReport) -> Table:
    """Bytes by kind of each set of devices that hold alike, and when they hold most."""
    kinds = [kind for kind in MEMORY_KINDS if any(getattr(one.memory, kind) for one in report.by_devices)]
    rows = []
    for one in report.by_devices:
        memory = one.memory
        sizes = [readable_bytes(getattr(memory, kind)) for kind in kinds]
        share = f"{memory.peak / memory.capacity:.1%}"
        rows.append((devices_text(one.devices), *sizes, readable_bytes(memory.peak), share, one.at))
    header = ("devices", *kinds, "peak", "of the device", "most in")
    return table("memory of a device of each stage", header, rows, expendable=kinds[::-1])


def blocks_table(report: TargetReport) -> Table:
    """What was compiled."""
    rows = []
    for number, one in enumerate(report.blocks):
        sizes = (readable_bytes(one.xla[kind]) for kind in ("argument", "output", "alias", "temp"))
        as_ = f"as {report.blocks[one.alike].name}" if one.alike != number else ""
        rows.append((one.name, devices_text(one.devices), one.times, f"{one.flops:.4g}", *sizes, as_))
    header = ("block", "devices", "runs", "FLOPs", "arguments", "results", "in place", "temporaries", "compiled")
    return table("blocks, a run on one device", header, rows)


def contributors_table(report: TargetReport, most: int = MOST_ROWS) -> Table:
    """What is held at the peak, the largest first."""
    shown = report.contributors[:most]
    rows = []
    for one in shown:
        nbytes, kind, arrays, source = _cells(one)
        rows.append((nbytes, kind, arrays, one.op, source))
    rest = sum(c.nbytes for c in report.contributors[most:])
    if rest:
        rows.append((readable_bytes(rest), "", "", f"{len(report.contributors) - most} more", ""))
    return table("what is held at the peak", ("bytes", "kind", "arrays", "op, argument or tensor", "source"), rows)


def collectives_table(report: TargetReport) -> Table:
    """The NCCL calls of a step; bytes that one device sends."""
    rows = [
        (c.kind, ", ".join(c.dtypes), c.launches, readable_bytes(c.payload), readable_bytes(c.sent), groups_text(c))
        for c in report.collectives
    ]
    return table("collectives in a step", ("kind", "types", "launches", "payload", "sent per device", "groups"), rows)


def groups_text(row: CollectiveRow) -> str:
    """``4 groups of 8, inside hosts: [0 1 2 3 4 5 6 7] …``."""
    where = "across hosts" if row.crosses else "inside hosts"
    if row.kind == SEND:
        return f"{' to '.join(map(devices_text, row.groups))}, {where}"
    if not row.groups:
        return f"neighbours, {where}"
    count = f"{len(row.groups)} groups of {row.members}" if len(row.groups) > 1 else f"all {row.members}"
    shown = " ".join(map(devices_text, row.groups[:2])) + (" …" if len(row.groups) > 2 else "")
    return f"{count}, {where}: {shown}"


def tables(report: TargetReport, contributors: int = MOST_ROWS) -> tuple[Table, ...]:
    """All tables, in order; of the contributors so many rows."""
    made = [memory_table(report.memory), contributors_table(report, contributors)]
    if len(report.blocks) > 1:
        made = [devices_table(report), blocks_table(report), *made]
    return (*made, collectives_table(report)) if report.collectives else tuple(made)


def as_text(report: TargetReport, width: int = 140) -> str:
    """The report as plain text."""
    return printed([heading(report), *tables(report), verdict(report.memory)], width)
