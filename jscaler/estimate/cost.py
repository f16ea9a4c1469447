"""``Cost``: what a plan costs on a cluster, as data and as text."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from jscaler.clusters import Cluster
from jscaler.estimate.block_costs import BlockCost
from jscaler.estimate.memory import Memory, MemoryEstimate, memory_by_devices
from jscaler.estimate.traffic import Traffic
from jscaler.ir.walk import grouped
from jscaler.lower.step_plan import StepPlan
from jscaler.text.device_list import devices_text
from jscaler.text.folding import folded
from jscaler.text.tables import aligned
from jscaler.text.units import counted, readable_bytes, readable_seconds

MOST_OPS = 12
MOST_TENSORS = 8


@dataclass(frozen=True)
class OpCost:
    """One op on each device, all iterations of its loops together.

    Attributes:
        kind: ``forward``, ``backward`` or ``update``.
        flops: of its products (dots, convolutions).
        read, written: bytes of the device's memory, elementwise work fused.
        seconds: of computing; None where the cluster does not say what its devices are.
        moved: what is moved in front of it.
        launches: kernels.
    """

    kind: str
    flops: float
    read: int
    written: int
    seconds: float | None
    moved: Traffic = field(default_factory=Traffic)
    launches: int = 0

    @property
    def sent(self) -> float:
        """Bytes that each device sends in front of it."""
        return self.moved.total

    @property
    def sending(self) -> float:
        """Seconds of that."""
        return self.moved.seconds

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        figures = {name: getattr(self, name) for name in ("kind", "flops", "read", "written", "seconds", "launches")}
        return figures | {"sent": self.sent, "sending": self.sending}


@dataclass(frozen=True)
class Seconds:
    """A step by what is reached of its devices and links.

    Attributes:
        compute: every kernel, one after the other; None where the cluster does not say what its devices are.
        communication: every collective, one after the other, but for what hides in overlapped entries of a table.
        waiting: for other device groups, and for what they send.
    """

    compute: float | None
    communication: float
    waiting: float = 0.0

    @property
    def total(self) -> float | None:
        return None if self.compute is None else self.compute + self.communication + self.waiting

    @property
    def idle(self) -> float:
        """The part of the time that a device waits; 0 where that is not known."""
        return self.waiting / self.total if self.total else 0.0


@dataclass(frozen=True)
class Profiled:
    """What of an estimate a profile has measured.

    Attributes:
        pieces: programs between collectives, each measured as a whole.
        ops: ops of other programs, each measured by itself.
        modelled: ops that the model prices.
        by_model: their part of all seconds of computing.
    """

    pieces: int
    ops: int
    modelled: int
    by_model: float

    def __str__(self) -> str:
        return (
            f"from the profile: {counted(self.pieces, 'program')} between collectives, {counted(self.ops, 'op')} of "
            f"others; by the model: {counted(self.modelled, 'op')}, {self.by_model:.1%} of the seconds of computing"
        )


@dataclass(frozen=True)
class DeviceShare:
    """What each of ``devices`` does in a step.

    Attributes:
        flops: of all products.
        compute: seconds of that and of all else it computes; None where the cluster does not say what its devices are.
        moved: bytes of the device's memory that kernels read and write.
        launches: kernels.
        sent: in collectives, and from group to group; its seconds are those of the collectives.
        hidden: seconds of these that hide behind arithmetic.
    """

    devices: tuple[int, ...]
    flops: float
    compute: float | None
    moved: int
    launches: int
    sent: Traffic
    hidden: float = 0.0

    @property
    def communication(self) -> float:
        """Seconds of collectives beside which nothing is computed."""
        return self.sent.seconds - self.hidden

    @property
    def busy(self) -> float:
        """Seconds."""
        return (self.compute or 0.0) + self.communication


@dataclass(frozen=True)
class Cost:
    """What a plan costs on a cluster.

    Attributes:
        plan: the plan's name.
        cluster: whose links and devices the figures are of.
        step: the completed plan and its program.
        by_op: path -> cost of one op, in the order of the program. Ops that the plan re-opened stand as their pieces.
        shares: of the devices that do alike: all, or those of a stage.
        elapsed: seconds of a step on several device groups; None where that is not known, or there is one.
        bound: seconds of the step at the peaks of all devices and links: none is faster. None where the cluster does not
            say what its devices are.
        donated: whether the step updates its state in place.
        profiled: what of the seconds was measured, where a profile is given.
        blocks: what each of the step's blocks takes, of which the seconds are the sum.

    Example:
        >>> found = jscaler.cost(lowered, None, "4xH100-80GB")
        >>> found.num_devices, found.fits, found.held.memory.peak == found.memory.peak == found.by_devices[0].memory.peak
        (4, True, True)
        >>> found.total_flops == 4 * found.flops, found.moved > 0, found.launches > 0  # FLOPs, bytes, kernels
        (True, True, True)
        >>> found.sent.total, found.seconds.total < 1e-3  # bytes, seconds
        (21510.0, True)
        >>> found.busiest.devices, found.busiest.busy == found.seconds.total
        ((0, 1, 2, 3), True)
        >>> sorted(found.as_json())[:3]
        ['by_op', 'cluster', 'devices']
    """

    plan: str
    cluster: Cluster
    step: StepPlan
    by_op: Mapping[str, OpCost]
    shares: tuple[DeviceShare, ...]
    elapsed: float | None = None
    bound: float | None = None
    donated: bool = True
    profiled: Profiled | None = None
    blocks: tuple[BlockCost, ...] = field(default=(), repr=False)

    @property
    def num_devices(self) -> int:
        """How many devices the plan is for."""
        return self.step.plan.num_devices

    @property
    def flops(self) -> float:
        """Of all products, on each device of those that have most."""
        return max(share.flops for share in self.shares)

    @property
    def total_flops(self) -> float:
        """Of all products, on all devices."""
        return sum(len(share.devices) * share.flops for share in self.shares)

    @property
    def moved(self) -> int:
        """Bytes that the kernels of a device read and write, of those that have most."""
        return max(share.moved for share in self.shares)

    @property
    def launches(self) -> int:
        """Kernels and collectives of each device, of those that have most."""
        return max(share.launches + sum(count for count, _ in share.sent.kinds.values()) for share in self.shares)

    @property
    def sent(self) -> Traffic:
        """Bytes per class of links, of the devices that send most."""
        return max((share.sent for share in self.shares), key=lambda sent: sent.total)

    @property
    def busiest(self) -> DeviceShare:
        """Of the devices that have most to do: those that the step's seconds are of."""
        return max(self.shares, key=lambda share: share.busy)

    @cached_property
    def seconds(self) -> Seconds:
        """Of the devices that have most to do."""
        busiest = self.busiest
        waiting = max(0.0, self.elapsed - busiest.busy) if self.elapsed is not None else 0.0
        return Seconds(busiest.compute, busiest.communication, waiting)

    @cached_property
    def by_devices(self) -> tuple[MemoryEstimate, ...]:
        """What each set of devices that hold alike holds, and when. Worked out when it is asked for: its lifetimes are
        those of the whole program."""
        return memory_by_devices(self.step, self.donated, lambda devices: self.cluster.of(devices).memory)

    @property
    def held(self) -> MemoryEstimate:
        """That of the devices that have the least left."""
        return min(self.by_devices, key=lambda found: found.memory.headroom)

    @property
    def memory(self) -> Memory:
        """Bytes by kind on one of these devices, and its peak."""
        return self.held.memory

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into each device's memory; None where the cluster does not say how much it has."""
        return self.memory.fits

    def as_json(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts; the timeline left out."""
        memory = {**self.memory.as_json(), "live": [asdict(tensor) for tensor in self.held.live]}
        seconds = {**asdict(self.seconds), "total": self.seconds.total, "bound": self.bound}
        return {
            "plan": self.plan, "devices": self.num_devices, "cluster": self.cluster.name, "seconds": seconds,
            "flops": self.flops, "launches": self.launches, "sent": asdict(self.sent), "memory": memory, "fits": self.fits,
            "shares": [asdict(share) for share in self.shares],
            "profiled": None if self.profiled is None else asdict(self.profiled),
            "by_op": {path: op.as_json() for path, op in self.by_op.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([*_totals(self), *_shares(self), "", *_ops(self), "", *_memory(self)])


def _totals(cost: Cost) -> list[str]:
    seconds, sent = cost.seconds, cost.sent
    kinds = ", ".join(f"{count}× {kind} {readable_bytes(nbytes)}" for kind, (count, nbytes) in sent.kinds.items())
    links = f"inside a host {readable_bytes(sent.inside)}, between hosts {readable_bytes(sent.between)}"
    out = f", out of the busiest host {readable_bytes(sent.leaving)}" if sent.leaving else ""
    waiting = f", waiting {readable_seconds(seconds.waiting)}" if len(cost.shares) > 1 else ""
    return [
        f"plan {cost.plan} on {counted(cost.num_devices, 'device')} of {cost.cluster.name}",
        f"seconds: {readable_seconds(seconds.total)} (computing {readable_seconds(seconds.compute)}, communicating "
        f"{readable_seconds(seconds.communication)}{waiting}; {cost.flops:.4g} FLOPs of products per device)",
        f"at the peaks of devices and links: {readable_seconds(cost.bound)}",
        *([str(cost.profiled)] if cost.profiled is not None else []),
        f"sent per device: {links}{out} ({kinds or 'no communication'})",
    ]


def _shares(cost: Cost) -> list[str]:
    """A line for each set of devices that do alike, where there are several."""
    if len(cost.shares) == 1:
        return []
    peaks = {one.devices: one.memory for one in cost.by_devices}
    total = cost.seconds.total
    rows = [("devices", "FLOPs", "computing", "communicating", "waiting", "sent", "memory", "most in")]
    for share in cost.shares:
        waiting = "" if not total else f"{1 - share.busy / total:.0%}"
        memory = peaks[share.devices]
        times = readable_seconds(share.compute), readable_seconds(share.communication), waiting
        sizes = readable_bytes(share.sent.total), readable_bytes(memory.peak)
        rows.append((devices_text(share.devices), f"{share.flops:.3g}", *times, *sizes, memory.at))
    return ["", *aligned(rows)]


def _ops(cost: Cost) -> list[str]:
    groups: dict[tuple[str, str], list[float]] = {}
    for path, op in cost.by_op.items():
        row = groups.setdefault((op.kind, folded(path)), [0.0] * 6)
        figures = (1, op.flops, op.read + op.written, op.seconds or 0.0, op.sent, op.sending)
        groups[op.kind, folded(path)] = [a + b for a, b in zip(row, figures, strict=True)]
    slowest = sorted(groups.items(), key=lambda item: -(item[1][3] + item[1][5]) or -item[1][2])[:MOST_OPS]
    rows = [("kind", "ops that take longest", "n", "FLOPs", "moved", "computing", "sent", "sending")]
    for (kind, path), (count, flops, moved, seconds, sent, sending) in slowest:
        known = readable_seconds(seconds if cost.cluster.device else None)
        shown = (readable_bytes(moved), known, readable_bytes(sent), readable_seconds(sending))
        rows.append((kind, path, f"{count:.0f}", f"{flops:.3g}", *shown))
    return aligned(rows)


def _memory(cost: Cost) -> list[str]:
    memory = cost.memory
    limit = f" of {readable_bytes(memory.capacity)}" if memory.capacity else ""
    fits = {True: ": fits", False: ": does NOT fit", None: ""}[cost.fits]
    shown = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in memory.by_kind.items() if kind != "outputs")
    found = grouped(((t.name, t.kind), t.nbytes) for t in cost.held.live)  # of a pipeline each micro-batch has its own
    largest = sorted(found.items(), key=lambda item: -sum(item[1]))[:MOST_TENSORS]
    rows = [("", "largest at the peak", "n", "kind", "bytes")]
    rows += [("", name, str(len(own)), kind, readable_bytes(sum(own))) for (name, kind), own in largest]
    return [
        f"memory per device: {readable_bytes(memory.peak)}{limit}{fits}, most in {memory.at or 'the results'}",
        shown,
        *aligned(rows),
    ]
