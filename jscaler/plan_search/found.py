"""``Found``: what a search has found, as data, as text and as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jscaler.clusters import Cluster
from jscaler.errors import PlanError
from jscaler.estimate.cost import Cost
from jscaler.estimate.difference import Difference, difference
from jscaler.estimate.query import cost
from jscaler.plan_search.candidates import Candidate
from jscaler.plan_search.draw_found import found_figure
from jscaler.primitives import Plan
from jscaler.report.draw_layout import save_picture
from jscaler.text.tables import FittingTable, printed
from jscaler.text.units import readable_bytes, readable_seconds

MOST_ROWS = 12


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
        candidates: all that were looked at and are legal, the fastest first.
        illegal: text of a plan -> why it is not legal.
        num_points: how many plans the spaces have.
        searched: seconds that the search took.
        complete: whether it went to its end, and was not stopped.
        interrupted: whether Ctrl-C stopped it.
        note: what else is to be said: of XLA's account of the memory, say.

    Example:
        >>> spaces = ["zero", "megatron"]
        >>> found = jscaler.search(train_step, state, batch, target="4xH100-80GB", space=spaces, confirm=False)
        >>> found.plan.num_devices, found.cost.seconds.total < 1, found.gap < 1, found.smallest.peak < 1e8
        (4, True, True, True)
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
        """Plain data."""
        rows = [] if self.chosen is None else [self.chosen]
        return {
            "target": self.cluster.name, "devices": self.cluster.num_devices, "memory": self.memory,
            "plan": None if self.chosen is None else self.chosen.text, "bound": self.bound,
            "gap": None if self.chosen is None else self.gap, "complete": self.complete, "searched": self.searched,
            "points": self.num_points, "looked_at": len(self.candidates) + len(self.illegal), "note": self.note,
            "why": [one.as_json() for one in self.why],
            "candidates": [self._row(one) for one in (*rows, *(c for c in self.candidates if c is not self.chosen))],
        }  # fmt: skip

    def _row(self, one: Candidate) -> dict[str, Any]:
        return {
            "plan": one.text, "seconds": one.seconds, "peak": round(one.peak), "fits": self.fits(one),
            "by": "cost" if one.cost is not None else "tables", "compiled_peak": one.compiled_peak, "why": one.why,
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
    rest = [one for one in found.candidates if not found.fits(one)]
    first = [found.chosen] if found.chosen is not None else []
    fitting = [*first, *found.runners_up][: most - min(3, len(rest))]
    return sorted([*fitting, *rest[: most - len(fitting)]], key=lambda one: (one is not found.chosen, one.seconds))


def found_table(found: Found) -> FittingTable:
    """The plan, its runners-up, and the fastest that do not fit."""
    each = "" if found.memory is None else f", {readable_bytes(found.memory)} per device"
    made = FittingTable(f"plans for {found.cluster.name}{each}", ("by",))
    made.add_column("plan")
    for name in ("seconds", "peak", "to spare"):
        made.add_column(name, justify="right")
    made.add_column("by")
    made.add_column("verdict")
    for one in shown_rows(found):
        spare = "" if found.memory is None else readable_bytes(found.memory - one.peak)
        verdict_ = "chosen" if one is found.chosen else "fits" if found.fits(one) else "does not fit"
        by = "tables" if one.cost is None else "cost" if one.compiled_peak is None else "cost, XLA"
        made.add_row(one.text, readable_seconds(one.seconds), readable_bytes(one.peak), spare, by, verdict_)
    return made


def verdict(found: Found) -> list[str]:
    """What was found, how good it is, and why it is so, in lines."""
    looked = len(found.candidates) + len(found.illegal)
    counts = f"{looked:,} of {found.num_points:,} plans looked at in {readable_seconds(found.searched)}"
    stopped = "" if found.complete else "; stopped before its end"
    if found.chosen is None:
        return [*nothing_fits(found), counts + stopped]
    lines = [
        f"found: {found.chosen.text}, {readable_seconds(found.chosen.seconds)} a step, "
        f"{readable_bytes(found.chosen.peak)} of a device",
        f"no plan of the space takes less than {readable_seconds(found.bound)}, by tables: gap {found.gap:.1%}{stopped}",
        counts,
        *map(str, found.why),
    ]
    return [*lines, found.note] if found.note else lines


def nothing_fits(found: Found) -> list[str]:
    """How much is missing, where, and what would help."""
    best = found.smallest
    if best is None and not found.illegal:
        return ["the search was stopped before any plan was looked at: give it more seconds"]
    if best is None:
        reasons = list(dict.fromkeys(found.illegal.values()))[:3]
        return ["nothing is legal for this step: " + "; ".join(reasons)]
    assert found.memory is not None
    at, helps = "", "more devices, a smaller batch, fewer bits"
    stopped = "" if found.complete else " of what was looked at before time was over"
    if best.cost is not None:
        memory = best.cost.memory
        state = memory.parameters + memory.optimizer
        at = f"; most in {memory.at or 'the results'}, where parameters and optimizer take {readable_bytes(state)}"
        helps = "more devices" if state > found.memory / 2 else "a smaller batch, a shorter sequence, fewer bits"
    return [
        f"nothing fits{stopped}: the least is {best.text} with {readable_bytes(best.peak)}, "
        f"{readable_bytes(best.peak - found.memory)} more than a device has{at}; what would help: {helps}"
    ]
