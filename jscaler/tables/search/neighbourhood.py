"""Large-neighbourhood search: the activities of a window of time are ordered anew, all others keep their order.

What begins before the window keeps its time. What begins behind it keeps its order on each resource: so it takes as long
as the longest path through it. The window is then a small problem with heads and tails. (Shaw, Using Constraint Programming
and Local Search Methods, 1998; heads and tails as in Carlier, The One-Machine Sequencing Problem, 1982.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jscaler.tables.search.activities import Activity, Model
from jscaler.tables.search.cp_solver import cp_sat, run
from jscaler.tables.search.finite import Slot, Starts, lane_of

_LEAST_FREE, _MOST_FREE = 60, 240  # activities of a window
_SHARE = 0.1  # of the time, for one window
_OVERHEAD = 2e-5  # seconds outside the solver, for each activity of the step


@dataclass(frozen=True)
class Neighbours:
    """The arcs of a schedule: edges, and from each activity to the next on its resources, in the order of starts."""

    model: Model
    order: Sequence[Slot]
    before: Mapping[Slot, Sequence[Slot]]
    after: Mapping[Slot, Sequence[Slot]]

    def activity(self, slot: Slot) -> Activity:
        """What runs in a slot."""
        return lane_of(self.model, slot[0]).activities[slot[1]]

    def earliest(self) -> dict[Slot, int]:
        """The starts if each activity begins as early as its arcs let it."""
        found: dict[Slot, int] = {}
        for slot in self.order:
            found[slot] = max((found[one] + self.activity(one).ticks for one in self.before[slot]), default=0)
        return found

    def tails(self) -> dict[Slot, int]:
        """Ticks from the beginning of each activity to the end of the step, along the longest path."""
        found: dict[Slot, int] = {}
        for slot in reversed(self.order):
            found[slot] = self.activity(slot).ticks + max((found[one] for one in self.after[slot]), default=0)
        return found


def neighbours(model: Model, starts: Starts) -> Neighbours:
    """The arcs of a schedule that has these starts."""
    order = sorted(starts, key=lambda slot: (starts[slot], lane_of(model, slot[0]).ranks[slot[1]], slot))
    before: dict[Slot, list[Slot]] = {}
    last: dict[int, Slot] = {}
    for slot in order:
        lane = lane_of(model, slot[0])
        before[slot] = [(slot[0], first) for first in lane.before[slot[1]]]
        for resource in lane.activities[slot[1]].resources:
            before[slot] += [last[resource]] if resource in last else []
            last[resource] = slot
    after: dict[Slot, list[Slot]] = {slot: [] for slot in order}
    for slot, own in before.items():
        for one in own:
            after[one].append(slot)
    return Neighbours(model, order, before, after)


def makespan_of(model: Model, starts: Starts) -> int:
    """Ticks from the first start to the last end."""
    return max(start + lane_of(model, slot[0]).activities[slot[1]].ticks for slot, start in starts.items())


def improve(model: Model, starts: Starts, bound: int, seconds: float, seed: int = 0) -> tuple[Starts, float]:
    """A schedule that is no longer, from windows over the whole step, again and again; and the time that this took.

    Args:
        model: the activities.
        starts: of the first schedule.
        bound: ticks at which the search stops.
        seconds: deterministic time.
        seed: of the solver's random choices.
    """
    best = neighbours(model, starts).earliest()
    spent, size, idle = 0.0, min(_LEAST_FREE, len(best)), 0
    while spent < seconds and makespan_of(model, best) > bound and idle < 3:
        came_from = _worth(model, best)
        places = range(0, max(1, len(best) - size // 2), max(1, size // 2))
        for first in places:
            found, used = _reorder(model, best, first, size, min(seconds - spent, _SHARE * seconds), seed)
            spent += used + _OVERHEAD * len(best)
            best = found if found is not None and _worth(model, found) <= _worth(model, best) else best
            if spent >= seconds or makespan_of(model, best) <= bound:
                return best, spent
        if _worth(model, best) == came_from:
            size, idle = min(2 * size, _MOST_FREE, len(best)), idle + 1
    return best, spent


def _worth(model: Model, starts: Starts) -> tuple[int, int]:
    """The makespan, and of equal ones the sum of all starts."""
    return makespan_of(model, starts), sum(starts.values())


def _reorder(model: Model, starts: Starts, first: int, size: int, seconds: float, seed: int) -> tuple[Starts | None, float]:
    """The schedule with ``size`` activities from the ``first`` on in their best order, and the solver's time."""
    arcs, cp = neighbours(model, starts), cp_sat().CpModel()
    early, free, late = arcs.order[:first], arcs.order[first : first + size], arcs.order[first + size :]
    tails, horizon, past, later = arcs.tails(), makespan_of(model, starts), set(early), set(late)
    begin = {slot: cp.new_int_var(0, horizon, "") for slot in free}
    makespan = cp.new_int_var(0, horizon, "")
    ends = []
    for resource in model.resources:
        own = [slot for slot in free if resource in arcs.activity(slot).resources]
        if not own:
            continue
        cp.add_no_overlap([cp.new_fixed_size_interval_var(begin[slot], arcs.activity(slot).ticks, "") for slot in own])
        ready = max(
            (starts[s] + arcs.activity(s).ticks for s in early if resource in arcs.activity(s).resources), default=0
        )
        rest = next((tails[slot] for slot in late if resource in arcs.activity(slot).resources), 0)
        end = cp.new_int_var(0, horizon, "")
        ends.append(end)
        for slot in own:
            cp.add(begin[slot] >= ready)
            cp.add(begin[slot] + arcs.activity(slot).ticks <= end)
        cp.add(end + rest <= makespan)
    for slot in free:
        lane, ticks = lane_of(model, slot[0]), arcs.activity(slot).ticks
        for before, after in lane.edges:
            other = (slot[0], before)
            if after == slot[1]:
                cp.add(begin[slot] >= (starts[other] if other in past else begin[other]) + lane.activities[before].ticks)
            if before == slot[1] and (slot[0], after) in later:
                cp.add(begin[slot] + ticks + tails[slot[0], after] <= makespan)
        following = (slot[0] + len(model.lanes), slot[1])
        if following in begin:
            cp.add(begin[slot] + ticks <= begin[following])
        cp.add_hint(begin[slot], starts[slot])
    _add_memory(cp, model, begin, past, horizon)
    cp.minimize(makespan * (len(ends) * horizon + 1) + sum(ends))
    answer = run(cp, seconds, seed, linear=False)
    if answer.values is None:
        return None, answer.spent
    moved = {**starts, **{slot: answer.value(start) for slot, start in begin.items()}}
    order = [*early, *sorted(free, key=lambda slot: (moved[slot], arcs.order.index(slot))), *late]
    place = {slot: number for number, slot in enumerate(order)}
    return neighbours(model, place).earliest(), answer.spent


def _add_memory(cp: Any, model: Model, begin: Mapping[Slot, Any], past: set[Slot], horizon: int) -> None:
    """What stands before the window stands until it ends there; what begins there may stand beyond it."""
    for device, limit in enumerate(model.limits):
        intervals, units, standing = list[Any](), list[int](), 0
        for microbatch in range(model.microbatches if limit is not None else 0):
            lane = lane_of(model, microbatch)
            for one in (one for one in lane.lifetimes if one.device == device):
                first, last = (microbatch, one.first), (microbatch, one.last)
                if last in past or (first not in past and first not in begin):
                    continue
                if first in past and last not in begin:
                    standing += one.units
                    continue
                start = begin.get(first, 0)
                end = begin[last] + lane.activities[one.last].ticks if last in begin else 2 * horizon
                intervals.append(cp.new_interval_var(start, cp.new_int_var(0, 2 * horizon, ""), end, ""))
                units.append(one.units)
        if intervals and limit is not None:
            cp.add_cumulative(intervals, units, limit - standing)
