"""``Found``: what a search has found, as data, as text and as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from jscaler.clusters import Cluster
from jscaler.errors import PlanError
from jscaler.estimate.cost import Cost
from jscaler.estimate.difference import Difference, difference
from jscaler.estimate.memory import preallocation
from jscaler.estimate.query import cost
from jscaler.plan_search.candidates import Candidate
from jscaler.plan_search.draw_found import found_figure
from jscaler.primitives import Plan
from jscaler.report.draw_layout import save_picture
from jscaler.text.bars import bars
from jscaler.text.tables import FittingTable, printed
from jscaler.text.units import readable_bytes, readable_seconds

MOST_ROWS = 12
MOST_REASONS = 3  # why plans are not legal
# columns that go first where there is little room
EXPENDABLE = ("at peaks", "launches", "moved", "sent", "memory over the step", "FLOPs", "by")
ACCURACY = 0.15  # of an estimated peak
STATE = 0.5  # of a device: state above this is what does not fit


@dataclass(frozen=True)
class Reason:
    """Why the plan is as it is: what another choice would change, or a constraint that binds.

    Attributes:
        what: the choice or the constraint: ``"tp=4"``, ``"memory"``.
        instead: the plan that would be the best with another choice, or without the constraint; of one decision of a plan
            that a program filled, what it would be.
        seconds: by how much that plan is slower; below 0 for a constraint, without which the step would be faster; infinite
            where no other plan fits.
        peak: its bytes on the device that holds most.
        by: what says so: ``"cost"``, or ``"tables"`` where time was too short to ask it.
    """

    what: str
    instead: str
    seconds: float
    peak: float
    by: str = "cost"

    def __str__(self) -> str:
        if self.seconds == math.inf:
            return f"{self.what}: nothing else fits"
        said = readable_seconds(abs(self.seconds))
        if self.seconds < 0:
            return f"{self.what} binds: without it {self.instead} takes {said} less, with {readable_bytes(self.peak)}"
        by = "" if self.by == "cost" else f", by {self.by}"
        return f"{self.what}: {said} less than {self.instead}, which has {readable_bytes(self.peak)}{by}"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        seconds = None if self.seconds == math.inf else self.seconds
        return {"what": self.what, "instead": self.instead, "seconds": seconds, "peak": self.peak, "by": self.by}


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        cluster: the devices.
        memory: bytes that each may take; None where it does not count.
        chosen: the fastest that fits; None where nothing does.
        bound: seconds that no plan of the spaces that fits is below, by the tables of `jscaler.estimate.prices`, less
            the part by which they may be too high.
        why: a reason for each choice, and for each constraint that binds; of what a program filled, for the decisions that
            weigh most.
        candidates: all that were looked at and are legal: the chosen one, others that fit, then those that do not, each the
            fastest first.
        illegal: text of a plan -> why it is not legal, or of one with holes why it was not filled.
        num_points: how many plans the spaces have.
        searched: seconds that the search took.
        complete: whether it went to its end, and was not stopped.
        interrupted: whether Ctrl-C stopped it.
        note: what else is to be said: of XLA's account of the memory, say.
        least: of plans with holes of which it is proved that none fits, the fewest bytes that one holds, and its text.

    Example:
        >>> spaces = ["zero", "megatron"]
        >>> found = jscaler.search(train_step, state, batch, target="4xH100-80GB", space=spaces, confirm=False)
        >>> found.plan.num_devices, found.cost.seconds.total < 1, found.gap < 1, found.smallest.peak < 1e8
        (4, True, True, True)
        >>> found.headroom(found.smallest) > 70e9  # bytes to spare
        True
        >>> all(found.fits(other) and other.seconds >= found.bound for other in found.runners_up)
        True
        >>> sum(line.seconds for line in found.diff(found.runners_up[0]).lines) > -1e-9  # it is none the faster
        True
        >>> found.draw(folder / "found.png")  # seconds against memory
        >>> found.as_json()["complete"]
        True
    """

    cluster: Cluster
    memory: float | None
    chosen: Candidate | None
    bound: float
    why: tuple[Reason, ...]
    candidates: tuple[Candidate, ...]
    illegal: dict[str, str]
    num_points: int
    searched: float
    complete: bool
    interrupted: bool = False
    note: str = ""
    least: tuple[float, str] | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan that was found, for ``jscaler.parallelize``; None where nothing fits."""
        return None if self.chosen is None else self.chosen.plan

    @property
    def cost(self) -> Cost | None:
        """What it costs, by ``jscaler.cost``."""
        return None if self.chosen is None else self.chosen.cost

    @property
    def gap(self) -> float:
        """By which part the plan's seconds are above the bound."""
        return float("inf") if self.chosen is None else max(0.0, self.chosen.seconds / self.bound - 1)

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """Other plans that fit, the fastest first."""
        return tuple(one for one in self.candidates if one is not self.chosen and self.fits(one))

    @property
    def smallest(self) -> Candidate | None:
        """The plan that holds least."""
        return min(self.candidates, key=lambda one: one.peak, default=None)

    def fits(self, one: Candidate) -> bool:
        """Whether a candidate fits, as well as that is known.

        Args:
            one: the candidate, of ``candidates``.
        """
        return one.fits(self.memory)

    def headroom(self, one: Candidate) -> float:
        """Bytes that a candidate leaves of a device; negative where it does not fit.

        Args:
            one: the candidate, of ``candidates``.
        """
        return one.capacity(self.memory) - one.peak

    def diff(self, other: Candidate) -> Difference:
        """Which decisions of another candidate differ from those of the plan that was found, and what each costs.

        Args:
            other: the candidate, of ``candidates``.

        Raises:
            PlanError: nothing fits, so that there is no plan to compare with.
        """
        if self.chosen is None or self.cost is None:
            raise PlanError(
                "nothing fits, and so no plan was found to compare with: give a larger memory=, or another space"
            )
        priced = other.cost or cost(self.cost.step.captured, other.plan, self.cluster)
        return difference(self.cost, priced, (self.chosen.text, other.text))

    def as_json(self) -> dict[str, Any]:
        """Plain data; the first of ``candidates`` is the plan that was found, if there is one."""
        return {
            "target": self.cluster.name, "devices": self.cluster.num_devices, "memory": self.memory,
            "plan": None if self.chosen is None else self.chosen.text, "bound": self.bound,
            "gap": None if self.chosen is None else self.gap, "complete": self.complete, "searched": self.searched,
            "points": self.num_points, "looked_at": len(self.candidates) + len(self.illegal), "note": self.note,
            "why": [one.as_json() for one in self.why], "candidates": [self._row(one) for one in self.candidates],
        }  # fmt: skip

    def _row(self, one: Candidate) -> dict[str, Any]:
        row = {
            "plan": one.text, "seconds": one.seconds, "peak": round(one.peak), "fits": self.fits(one),
            "by": "cost" if one.cost is not None else "tables", "compiled_peak": one.compiled_peak, "why": one.why,
            "headroom": None if self.memory is None else round(self.headroom(one)),
        }  # fmt: skip
        if one.cost is None:
            return row
        memory = one.cost.memory
        return row | {
            "predicted_peak": memory.peak, "at": memory.at, "parts": memory.by_kind,
            "flops": one.cost.flops, "flops_ratio": one.flops_ratio, "sent": one.cost.sent.total,
            "moved": one.cost.moved, "launches": one.cost.launches, "bound": one.cost.bound, "idle": one.cost.seconds.idle,
        }  # fmt: skip

    def draw(self, path: str | Path) -> None:
        """Draw seconds against memory of all candidates.

        Args:
            path: of the picture: .png, .svg or .pdf.
        """
        title = f"plans for {self.cluster.name}"
        save_picture(Path(path), found_figure(self.candidates, self.chosen, self.memory, self.bound, title), dpi=110)

    def __str__(self) -> str:
        return printed([found_table(self), *verdict(self)], 160)


def shown_rows(found: Found, most: int = MOST_ROWS) -> Sequence[Candidate]:
    """The chosen plan, then runners-up, then the fastest that do not fit."""
    fitting = [one for one in found.candidates if found.fits(one)]
    rest = found.candidates[len(fitting) :]
    fitting = fitting[: most - min(3, len(rest))]
    return [*fitting, *rest[: most - len(fitting)]]


def found_table(found: Found, most: int = MOST_ROWS) -> FittingTable:
    """The plan, its runners-up, and the fastest that do not fit: what each needs and costs, and its memory from the step's
    first kernel to the last where that was worked out. The highest bar is a whole device."""
    each = "" if found.memory is None else f", {readable_bytes(found.memory)} per device"
    made = FittingTable(f"plans for {found.cluster.name}{each}", EXPENDABLE)
    made.add_column("plan")
    for name in ("seconds", "peak", "to spare", "FLOPs", "sent", "moved", "launches", "at peaks"):
        made.add_column(name, justify="right")
    for name in ("memory over the step", "by", "verdict"):
        made.add_column(name)
    for one in shown_rows(found, most):
        made.add_row(*_cells(found, one))
    return made


def _cells(found: Found, one: Candidate) -> list[Text | str]:
    is_chosen, fits = one is found.chosen, found.fits(one)
    spare = "" if found.memory is None else readable_bytes(found.headroom(one))
    front = [
        Text(one.text, style="bold" if is_chosen else ""),
        readable_seconds(one.seconds),
        readable_bytes(one.peak),
        spare,
    ]
    style = "bold green" if is_chosen else "green" if fits else "red"
    said = Text("chosen" if is_chosen else "fits" if fits else "does not fit", style=style)
    if one.cost is None:
        return [*front, *[""] * 6, "tables", said]
    held = [moment.nbytes for moment in one.cost.held.timeline]
    shown = "" if found.memory is None else bars(held, one.capacity(found.memory))
    return [
        *front, f"{one.flops_ratio:.2f}×", readable_bytes(one.cost.sent.total), readable_bytes(one.cost.moved),
        f"{one.cost.launches:,}", readable_seconds(one.cost.bound), shown,
        "cost" if one.compiled_peak is None else "cost, XLA", said,
    ]  # fmt: skip


def verdict(found: Found) -> list[str]:
    """What was found, how good it is, and why it is so, in lines."""
    looked = len(found.candidates) + len(found.illegal)
    counts = f"{looked:,} of {found.num_points:,} plans looked at in {readable_seconds(found.searched)}"
    stopped = "" if found.complete else "; stopped before its end"
    if found.chosen is None:
        return [*nothing_fits(found), *(not_legal(found) if found.candidates else ()), counts + stopped]
    return [
        f"found: {found.chosen.text}, {readable_seconds(found.chosen.seconds)} a step, "
        f"{readable_bytes(found.chosen.peak)} of a device",
        *how_sure(found, found.chosen),
        f"no plan of the space takes less than {readable_seconds(found.bound)}, by tables: gap {found.gap:.1%}{stopped}",
        counts,
        *map(str, found.why),
        *([f"{found.chosen.text}: {found.chosen.why}"] if found.chosen.why else []),
        *not_legal(found),
        *([found.note] if found.note else []),
    ]


def how_sure(found: Found, chosen: Candidate) -> list[str]:
    """Whose figure the peak is, and what JAX has to be told so that it fits."""
    if found.memory is None or chosen.cost is None:
        return []
    capacity = chosen.capacity(found.memory)
    if chosen.compiled_peak is not None:
        said = f"the peak is XLA's own; the estimate was {readable_bytes(chosen.cost.memory.peak)}"
    else:
        near = ": it may not fit; compile it to be sure (--confirm)" if chosen.peak > (1 - ACCURACY) * capacity else ""
        said = f"the peak is an estimate, within {ACCURACY:.0%}{near}"
    return [said + preallocation(chosen.peak, capacity)]


def not_legal(found: Found) -> list[str]:
    """Why plans are not legal, in lines."""
    texts: dict[str, list[str]] = {}
    for text, why in found.illegal.items():
        texts.setdefault(why, []).append(text)
    shown = [*texts.items()][:MOST_REASONS]
    return [f"not legal: {own[0]}{f' and {len(own) - 1} more' if len(own) > 1 else ''}: {why}" for why, own in shown]


def nothing_fits(found: Found) -> list[str]:
    """How much is missing, where, and what would help, in lines."""
    best, stopped = found.smallest, "" if found.complete else " of what was looked at before time was over"
    if best is None and not found.illegal:
        return ["the search was stopped before any plan was looked at: give it more seconds"]
    if best is None and found.least is not None and found.memory is not None:
        held, text = found.least
        said = f"no plan of {text} holds less than {readable_bytes(held)}"
        more = f"{readable_bytes(held - found.memory)} more than a device has"
        return [f"nothing fits{stopped}: {said}, {more}", *not_legal(found)]
    if best is None:
        return [f"nothing fits{stopped}: none of the plans is legal for this step, or fits", *not_legal(found)]
    assert found.memory is not None
    least = f"nothing fits{stopped}: the least is {best.text} with {readable_bytes(best.peak)}, "
    least += f"{readable_bytes(-found.headroom(best))} more than a device has"
    if best.cost is None:
        return [f"{least}; what would help: more devices, a smaller batch, fewer bits"]
    memory, capacity, devices = best.cost.memory, best.capacity(found.memory), found.cluster.num_devices
    lines = [f"{least}; most in {memory.at or 'the results'}"]
    state = memory.parameters + memory.optimizer
    if state > STATE * capacity:
        kinds = {part.device for part in found.cluster.kinds}
        device = found.cluster.device if len(kinds) == 1 else None
        larger = f"{2 * devices}x{device.name}" if device else f"{2 * devices} devices"
        lines.append(
            f"parameters and optimizer take {readable_bytes(state)} of it: spread them over more devices, "
            f"--target {larger} (zero1, zero3, megatron)"
        )
    if best.peak - state > STATE * capacity:
        lines.append(
            f"gradients, activations and temporaries take {readable_bytes(best.peak - state)}: a smaller --batch, a "
            "shorter --seq, fewer bits (--dtype)"
        )
    if best.compiled_peak is None and best.peak <= (1 + ACCURACY) * capacity:
        lines.append(f"the estimate is within {ACCURACY:.0%} of what XLA allocates: this may fit; jscaler compile says")
    return lines
