"""A ``Cost`` as text that a person can read."""

from typing import TYPE_CHECKING

from jscaler.report.folding import folded
from jscaler.report.moves import readable_bytes
from jscaler.report.tables import aligned

if TYPE_CHECKING:
    from jscaler.estimate.query import Cost

MOST_OPS = 12
MOST_TENSORS = 8


def cost_text(cost: "Cost") -> str:
    """Totals, then the groups of ops (layer numbers folded) that take longest, then what lies there at the peak."""
    return "\n".join([*_totals(cost), "", *_ops(cost), "", *_memory(cost)])


def readable_seconds(seconds: float | None) -> str:
    """``1.5 ms`` for 0.0015."""
    if seconds is None:
        return "unknown"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _totals(cost: "Cost") -> list[str]:
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


def _ops(cost: "Cost") -> list[str]:
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


def _memory(cost: "Cost") -> list[str]:
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
