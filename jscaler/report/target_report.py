"""``TargetReport``: what XLA made of a planned step for a cluster that need not be there, as data and as tables."""

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from jscaler.clusters import Cluster
from jscaler.estimate.memory import Memory, preallocation
from jscaler.lower.step_plan import StepPlan
from jscaler.report.hlo import HloCollective, collectives
from jscaler.report.step_text import devices_text
from jscaler.report.xla_memory import Contributor
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes

MOST_ROWS = 12
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
        groups: the logical devices of each group, in order; empty for a permute.
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


class Inspectable:
    """What an executable says of itself; it stands in ``compiled``."""

    compiled: Any

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()


@dataclass(frozen=True)
class TargetReport(Inspectable):
    """A step compiled for a described cluster: does it fit, what takes the memory, and what travels.

    Attributes:
        plan: the plan that was compiled, for as many devices as the cluster has.
        memory: of one device, by kind. All devices run the same program.
        contributors: what is held at the peak, the largest first; they add up to it.
        collectives: one row for each kind, type and grouping.
        xla: ``memory_analysis()``, in bytes.
        flops: that one device executes in a step, as XLA counts them; a loop's body counts once.
        seconds: what lowering and compiling took.
        compiled: JAX's executable. It has text and figures and cannot run.
    """

    plan: StepPlan
    cluster: Cluster
    memory: Memory
    contributors: tuple[Contributor, ...]
    collectives: tuple[CollectiveRow, ...]
    xla: dict[str, int]
    flops: float
    seconds: dict[str, float]
    compiled: Any = field(repr=False)

    @property
    def fits(self) -> bool:
        return self.memory.headroom >= 0

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        device = self.cluster.device
        return {
            "plan": self.plan.name,
            "target": self.cluster.name,
            "device": device.name if device else None,
            "devices": self.cluster.num_devices,
            "memory": self.memory.as_json(),
            "contributors": [dataclasses.asdict(c) for c in self.contributors],
            "collectives": [dataclasses.asdict(c) for c in self.collectives],
            "xla": self.xla,
            "flops": self.flops,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return as_text(self)


def xla_bytes(stats: Any) -> dict[str, int]:
    """What JAX's ``memory_analysis()`` says, by name."""
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def collective_rows(text: str, devices: Sequence[int], devices_per_host: int) -> tuple[CollectiveRow, ...]:
    """The collectives in a compiled module, like ones together, the most bytes first.

    Args:
        devices: the logical device at each position of the program's device list.
        devices_per_host: device d sits on host ``d // devices_per_host``.
    """
    found: dict[Any, list[HloCollective]] = {}
    for one in collectives(text):
        groups = tuple(tuple(devices[i] for i in group) for group in one.groups)
        pairs = tuple((devices[a], devices[b]) for a, b in one.pairs)
        crosses = any(len({d // devices_per_host for d in group}) > 1 for group in (*groups, *pairs))
        found.setdefault((one.kind, one.dtypes, one.members, groups, crosses), []).append(one)
    rows = [
        CollectiveRow(
            kind,
            dtypes,
            sum(c.times for c in ones),
            sum(c.times * c.nbytes for c in ones),
            sum(c.times * c.sent for c in ones),
            members,
            groups,
            crosses,
        )
        for (kind, dtypes, members, groups, crosses), ones in found.items()
    ]
    return tuple(sorted(rows, key=lambda r: -r.sent))


# -- as text


def heading(report: TargetReport) -> str:
    """One line: the plan and the cluster."""
    cluster, device = report.cluster, report.cluster.device
    assert device is not None
    hosts = f"{cluster.hosts} hosts of {cluster.devices_per_host} " if cluster.hosts > 1 else f"{cluster.num_devices} "
    return f"plan {report.plan.name} on {cluster.name}: {hosts}{device.description}, compiled without them"


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
    made = table("memory of one device", ("kind", "bytes", "of the device", ""), rows)
    made.add_section()
    share = f"{memory.peak / memory.capacity:.1%}"
    made.add_row("peak", readable_bytes(memory.peak), share, "all of it is reserved at once")
    return made


def contributors_table(report: TargetReport, most: int = MOST_ROWS) -> Table:
    """What is held at the peak, the largest first."""
    shown = report.contributors[:most]
    rows = [(readable_bytes(c.nbytes), c.kind, f"{c.count} × {c.shape}" if c.shape else "", c.op, c.source) for c in shown]
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
    if not row.groups:
        return f"neighbours, {where}"
    count = f"{len(row.groups)} groups of {row.members}" if len(row.groups) > 1 else f"all {row.members}"
    shown = " ".join(map(devices_text, row.groups[:2])) + (" …" if len(row.groups) > 2 else "")
    return f"{count}, {where}: {shown}"


def tables(report: TargetReport, contributors: int = MOST_ROWS) -> tuple[Table, ...]:
    """All tables, in order; of the contributors so many rows."""
    made = memory_table(report.memory), contributors_table(report, contributors)
    return (*made, collectives_table(report)) if report.collectives else made


def as_text(report: TargetReport, width: int = 140) -> str:
    """The report as plain text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(heading(report), highlight=False, markup=False)
    for made in tables(report):
        console.print(made)
    console.print(verdict(report.memory), highlight=False, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
