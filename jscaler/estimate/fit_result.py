"""``Fit``: what `jscaler.fit` tried, as data and as text: a table with the memory over the step, and what to do where
nothing fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from jscaler.clusters import Cluster
from jscaler.estimate.cost import Cost
from jscaler.estimate.memory import preallocation
from jscaler.estimate.prices import Price
from jscaler.text.tables import FittingTable, printed
from jscaler.text.units import readable_bytes, readable_seconds

BARS = "▁▂▃▄▅▆▇█"
OVER = "▲"  # in place of a bar that is higher than a device
WIDTH = 28  # bars for a step
# columns that go first where there is little room
EXPENDABLE = ("at peaks", "launches", "moved", "sent", "memory over the step")
STATE = 0.5  # of a device: state above this is what does not fit
ACCURACY = 0.15  # of the estimate


@dataclass(frozen=True, eq=False)
class Tried:
    """A plan that was tried.

    Attributes:
        plan: its text.
        cost: what it costs; None where it is not legal for the step, or was not worked out.
        why: why it is not legal; or what it was warned of.
        flops_ratio: FLOPs of all devices, as a multiple of the step's on one device.
        compiled_peak: bytes that XLA allocates on a device; None where nobody has asked.
        guess: the price by tables, which was too large to work the plan out.
    """

    plan: str
    cost: Cost | None
    why: str = ""
    flops_ratio: float = 1.0
    compiled_peak: int | None = None
    guess: Price | None = None

    @property
    def peak(self) -> int:
        """Bytes of a device of those that have the least left, as well as they are known."""
        assert self.cost is not None
        return self.cost.memory.peak if self.compiled_peak is None else self.compiled_peak

    @property
    def capacity(self) -> int:
        """Bytes of such a device."""
        assert self.cost is not None
        return self.cost.memory.capacity

    @property
    def headroom(self) -> int:
        """Bytes that are left at the peak; negative where it does not fit."""
        return self.capacity - self.peak

    @property
    def fits(self) -> bool:
        return self.cost is not None and self.headroom >= 0

    @property
    def price(self) -> tuple[float, float, int]:
        """What the ladder is ordered by: extra FLOPs (to a tenth of the step; a device that waits for other stages could
        compute as many), bytes that a device sends, launches."""
        assert self.cost is not None
        return round(self.flops_ratio / (1 - self.cost.seconds.idle), 1), self.cost.sent.total, self.cost.launches

    def as_json(self) -> dict[str, Any]:
        """Plain data, the parts of the peak included."""
        record: dict[str, Any] = {"plan": self.plan, "fits": self.fits, "why": self.why}
        if self.guess is not None:
            return record | {"by_tables": {"peak": round(self.guess.peak), "seconds": self.guess.seconds}}
        if self.cost is None:
            return record
        memory = self.cost.memory
        return record | {
            "peak": self.peak, "predicted_peak": memory.peak, "compiled_peak": self.compiled_peak,
            "headroom": self.headroom, "at": memory.at, "memory": memory.by_kind,
            "flops": self.cost.flops, "flops_ratio": self.flops_ratio, "sent": self.cost.sent.total,
            "moved": self.cost.moved, "launches": self.cost.launches,
            "seconds": self.cost.seconds.total, "bound": self.cost.bound, "idle": self.cost.seconds.idle,
        }  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """What was tried, in the order of the ladder.

    Attributes:
        cluster: whose devices' memory it is about.
        tried: each plan with its cost, or why it is not legal for the step.

    Example:
        >>> found = jscaler.fit(train_step.graph(state, batch), "4xH100-80GB", ["data_parallel", "zero3"])
        >>> found.chosen.plan, found.smallest.fits, found.as_json()["fits"]
        ('data_parallel', True, True)
    """

    cluster: Cluster
    tried: tuple[Tried, ...]

    @property
    def chosen(self) -> Tried | None:
        """The cheapest that fits: in extra FLOPs, then in bytes sent, then in launches; None if nothing does."""
        return min((one for one in self.tried if one.fits), key=lambda one: one.price, default=None)

    @property
    def smallest(self) -> Tried | None:
        """What needs least memory; None where no plan is legal."""
        return min((one for one in self.tried if one.cost is not None), key=lambda one: one.peak, default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain data; ``chosen`` is a position in ``tried``."""
        chosen = self.chosen
        return {
            "target": self.cluster.name, "devices": self.cluster.num_devices, "capacity": self.cluster.memory,
            "fits": chosen is not None, "chosen": None if chosen is None else self.tried.index(chosen),
            "tried": [one.as_json() for one in self.tried],
        }  # fmt: skip

    def __str__(self) -> str:
        return as_text(self)


def fit_table(found: Fit) -> FittingTable:
    """A row for each plan that was tried: what it needs, what it costs, and its memory from the step's first kernel to the
    last, where the highest bar is a whole device."""
    device = " or ".join(dict.fromkeys(readable_bytes(part.memory) for part in found.cluster.kinds))
    made = FittingTable(f"plans for {found.cluster.name}, {device} per device", EXPENDABLE)
    made.add_column("plan")
    for name in ("peak", "to spare", "FLOPs", "sent", "moved", "launches", "seconds", "at peaks"):
        made.add_column(name, justify="right")
    made.add_column("memory over the step")
    made.add_column("verdict")
    chosen, numbers = found.chosen, _numbers(found)
    for one in found.tried:
        made.add_row(*_row(one, one is chosen, numbers))
    return made


def reasons(found: Fit) -> list[str]:
    """What is said of plans that are not legal, or warned of, by the number that stands in their rows."""
    return [f"({number}) {why}" for why, number in _numbers(found).items()]


def _numbers(found: Fit) -> dict[str, int]:
    every = dict.fromkeys(one.why for one in found.tried if one.why)
    return {why: number for number, why in enumerate(every, start=1)}


def _row(one: Tried, chosen: bool, numbers: Mapping[str, int]) -> list[Text | str]:
    note = f" ({numbers[one.why]})" if one.why else ""
    if one.guess is not None:
        peak, seconds = f"~{readable_bytes(one.guess.peak)}", f"~{readable_seconds(one.guess.seconds)}"
        return [one.plan, peak, *[""] * 5, seconds, "", "", Text("too large", style="dim red")]
    if one.cost is None:
        return [one.plan, *[""] * 9, Text(f"not legal{note}", style="dim")]
    cost = one.cost
    verdict = "fits" if one.fits else "does not fit"
    verdict += note if one.compiled_peak is None else f", by XLA{note}"
    style = "bold green" if chosen else "green" if one.fits else "red"
    return [
        Text(one.plan, style="bold" if chosen else ""), readable_bytes(one.peak), readable_bytes(one.headroom),
        f"{one.flops_ratio:.2f}×", readable_bytes(cost.sent.total), readable_bytes(cost.moved), f"{cost.launches:,}",
        readable_seconds(cost.seconds.total), readable_seconds(cost.bound),
        bars([m.nbytes for m in cost.held.timeline], one.capacity), Text(verdict, style=style),
    ]  # fmt: skip


def bars(timeline: Sequence[int], capacity: int, width: int = WIDTH) -> Text:
    """Bytes over time as bars, each the most of its stretch of kernels; a full one is ``capacity``, more is a triangle.

    Example:
        >>> bars([1, 4, 8, 9], 8, width=4).plain
        '▁▄█▲'
    """
    text = Text()
    for stretch in stretches(len(timeline), width):
        most = max(timeline[i] for i in stretch)
        if most > capacity:
            text.append(OVER, style="red")
        else:
            text.append(BARS[max(0, -(-most * len(BARS) // capacity) - 1)], style="cyan")
    return text


def stretches(count: int, most: int) -> list[range]:
    """``range(count)`` in at most ``most`` stretches that are about equally long."""
    parts = min(count, most)
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def verdict(found: Fit) -> str:
    """What fits and how it is known; or how much is missing, and what would help."""
    chosen = found.chosen
    if chosen is None:
        return "\n".join(missing(found))
    assert chosen.cost is not None
    sizes = f"{readable_bytes(chosen.peak)} of {readable_bytes(chosen.capacity)}"
    said = f"fits: {chosen.plan}, {sizes} per device, {readable_bytes(chosen.headroom)} to spare, {_extra(chosen)}"
    said += preallocation(chosen.peak, chosen.capacity)
    if chosen.compiled_peak is not None:
        return f"{said}\nthe peak is XLA's own; the estimate was {readable_bytes(chosen.cost.memory.peak)}"
    if chosen.peak > (1 - ACCURACY) * chosen.capacity:
        return f"{said}\nthe peak is an estimate, within {ACCURACY:.0%}: it may not fit; compile it to be sure (--confirm)"
    return f"{said}\nthe peak is an estimate, within {ACCURACY:.0%}"


def _extra(one: Tried) -> str:
    assert one.cost is not None
    more = one.flops_ratio - 1
    flops = f"{more:+.1%} FLOPs" if abs(more) >= 5e-4 else "no extra FLOPs"
    sent = one.cost.sent.total
    return f"{flops}, {readable_bytes(sent)} sent per device" if sent else flops


def missing(found: Fit) -> list[str]:
    """How much is missing, and what would help, in lines."""
    best = found.smallest
    if best is None:
        return ["nothing fits: none of the plans is legal for this step"]
    assert best.cost is not None
    memory, capacity, devices = best.cost.memory, best.capacity, found.cluster.num_devices
    lines = [
        f"nothing fits: the least is {best.plan} with {readable_bytes(best.peak)}, {readable_bytes(-best.headroom)} more "
        f"than a device has; most in {memory.at or 'the results'}"
    ]
    state = memory.parameters + memory.optimizer
    if state > STATE * capacity:
        kinds = {part.device for part in found.cluster.kinds}
        device = found.cluster.device if len(kinds) == 1 else None
        larger = f"{2 * devices}x{device.name}" if device else f"{2 * devices} devices"
        lines.append(
            f"parameters and optimizer take {readable_bytes(state)} of it: spread them over more devices, "
            f"--target {larger} (zero1, zero3, megatron)"
        )
    rest = best.peak - state
    if rest > STATE * capacity:
        lines.append(
            f"gradients, activations and temporaries take {readable_bytes(rest)}: a smaller --batch, a shorter --seq, "
            "fewer bits (--dtype)"
        )
    if best.compiled_peak is None and best.peak <= (1 + ACCURACY) * capacity:
        lines.append(f"the estimate is within {ACCURACY:.0%} of what XLA allocates: this may fit; jscaler compile says")
    return lines


def as_text(found: Fit) -> str:
    """All of it as plain text."""
    return printed([fit_table(found), *reasons(found), verdict(found)], 160)
