"""``Cost``: what a plan costs on a cluster, as data and as text."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from jscaler.clusters import Cluster
from jscaler.estimate.memory import Memory, MemoryEstimate, estimated_memory
from jscaler.estimate.traffic import Traffic
from jscaler.lower.step_plan import StepPlan
from jscaler.text.folding import folded
from jscaler.text.tables import aligned
from jscaler.text.units import readable_bytes, readable_seconds

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
        sent: what is moved in front of it: bytes that each device sends.
        sending: seconds of that.
        launches: kernels.
    """

    kind: str
    flops: float
    read: int
    written: int
    seconds: float | None
    sent: float = 0.0
    sending: float = 0.0
    launches: int = 0


@dataclass(frozen=True)
class Seconds:
    """A step by the peaks of its devices and links: no step is faster, and communication hides behind nothing.

    Attributes:
        compute: every kernel at the device's peak; None where the cluster does not say what its devices are.
        communication: every collective, one after the other.
    """

    compute: float | None
    communication: float

    @property
    def total(self) -> float | None:
        return None if self.compute is None else self.compute + self.communication


@dataclass(frozen=True)
class Cost:
    """What a plan costs on a cluster.

    Attributes:
        plan: the plan's name.
        cluster: whose links and devices the figures are of.
        step: the completed plan and its program.
        by_op: path -> cost of one op, in the order of the program. Ops that the plan re-opened stand as their pieces.
        sent: bytes per class of links.
    """

    plan: str
    cluster: Cluster
    step: StepPlan
    by_op: Mapping[str, OpCost]
    sent: Traffic
    donated: bool = True

    @property
    def num_devices(self) -> int:
        return self.step.plan.num_devices

    @property
    def flops(self) -> float:
        """Of all products, on each device."""
        return sum(op.flops for op in self.by_op.values())

    @property
    def launches(self) -> int:
        """Kernels and collectives of each device."""
        kernels = sum(op.launches for op in self.by_op.values())
        return kernels + sum(count for count, _ in self.sent.kinds.values())

    @cached_property
    def seconds(self) -> Seconds:
        known = [op.seconds for op in self.by_op.values() if op.seconds is not None]
        return Seconds(math.fsum(known) if len(known) == len(self.by_op) else None, self.sent.seconds)

    @cached_property
    def held(self) -> MemoryEstimate:
        """What a device holds, and when. Worked out when it is asked for: its lifetimes are those of the whole program."""
        return estimated_memory(self.step.graph, self.step.segments, self.donated, self.cluster.memory)

    @property
    def memory(self) -> Memory:
        return self.held.memory

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into a device's memory; None where the cluster does not say how much it has."""
        return self.memory.fits

    def as_json(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts; the timeline left out."""
        memory = {**self.memory.as_json(), "live": [asdict(tensor) for tensor in self.held.live]}
        seconds = {**asdict(self.seconds), "total": self.seconds.total}
        return {
            "plan": self.plan, "devices": self.num_devices, "cluster": self.cluster.name, "seconds": seconds,
            "flops": self.flops, "launches": self.launches, "sent": asdict(self.sent), "memory": memory, "fits": self.fits,
            "by_op": {path: asdict(op) for path, op in self.by_op.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([*_totals(self), "", *_ops(self), "", *_memory(self)])


def _totals(cost: Cost) -> list[str]:
    seconds, sent = cost.seconds, cost.sent
    kinds = ", ".join(f"{count}× {kind} {readable_bytes(nbytes)}" for kind, (count, nbytes) in sent.kinds.items())
    links = f"inside a host {readable_bytes(sent.inside)}, between hosts {readable_bytes(sent.between)}"
    out = f", out of the busiest host {readable_bytes(sent.leaving)}" if sent.leaving else ""
    return [
        f"plan {cost.plan} on {cost.num_devices} device(s) of {cost.cluster.name}",
        f"seconds: {readable_seconds(seconds.total)} (computing {readable_seconds(seconds.compute)}, communicating "
        f"{readable_seconds(seconds.communication)}; {cost.flops:.4g} FLOPs of products per device)",
        f"sent per device: {links}{out} ({kinds or 'no communication'})",
    ]


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
    limit = f" of {readable_bytes(cost.cluster.memory)}" if cost.cluster.memory else ""
    fits = {True: ": fits", False: ": does NOT fit", None: ""}[cost.fits]
    shown = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in memory.by_kind.items() if kind != "outputs")
    rows = [("", "largest at the peak", "kind", "bytes")]
    rows += [("", t.name, t.kind, readable_bytes(t.nbytes)) for t in cost.held.live[:MOST_TENSORS]]
    return [
        f"memory per device: {readable_bytes(memory.peak)}{limit}{fits}, most in {memory.at or 'the results'}",
        shown,
        *aligned(rows),
    ]
