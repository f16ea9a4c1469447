"""A ``TargetReport`` as tables for people."""

import io

from rich.console import Console
from rich.table import Table

from jscaler.estimate.memory import Memory
from jscaler.report.explain import readable_bytes
from jscaler.report.steps import devices_text
from jscaler.report.tables import table
from jscaler.report.target_report import CollectiveRow, TargetReport

MOST_ROWS = 12
PREALLOCATED = 0.75  # of a device, that JAX takes at its first computation unless it is told otherwise
WHAT = {
    "parameters": "arguments",
    "optimizer": "arguments: all other state that the step updates",
    "inputs": "arguments: the batch, keys; constants",
    "gradients": "of parameters, at the peak",
    "activations": "made by the forward, kept for the backward or computed again, at the peak",
    "temporaries": "cotangents, copies, scratch space, at the peak",
    "outputs": "results that take no argument's place",
}


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


def preallocation(peak: int, capacity: int) -> str:
    """What to set where a peak that fits is more than JAX takes of a device; else nothing."""
    if peak <= PREALLOCATED * capacity:
        return ""
    share = min(0.98, round(peak / capacity + 0.02, 2))
    return f"; JAX takes {PREALLOCATED:.0%} of a device by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={share}"


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
