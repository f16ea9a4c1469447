"""Periodic schedules: every micro-batch runs its blocks one period behind the micro-batch before it.

This is modulo scheduling. (Rau, Iterative Modulo Scheduling, 1994; Lin et al., Tessel, HPCA 2024, calls one period a
repetend.) Activity i of round r begins at ``(r + turn[i]) * period + offset[i]`` with an offset below the period. A round
is one micro-batch of each lane. Two facts keep the model small::

    between two activities of a device only their order on the circle counts:  before[i, j] = offset[i] < offset[j]
    at the beginning of p, of a lifetime from a to b stand  turn[b] - turn[a] + before[p, b] - before[p, a]  copies

A schedule of some period can be stretched to any longer one: turns and orders on the circle stay. So all periods that are
too short lie below those that are feasible, and bisection finds the least.
"""

import math
from dataclasses import dataclass
from typing import Any

from jscaler.tables.search.activities import Activity, Lifetime, Model
from jscaler.tables.search.cp_solver import Answer, cp_sat, run
from jscaler.tables.search.lower_bound import least_round

Limits = tuple[int | None, ...]
Starts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Periodic:
    """A periodic schedule, in ticks and units of bytes.

    Attributes:
        period: ticks from a round to the next.
        starts: of the activities of round 0, for each lane.
        value: what was made least: the period, the most units of a device, or the latency of a round.
        bound: no periodic schedule has a lower value.
        spent: deterministic seconds of the search.
    """

    period: int
    starts: Starts
    value: int
    bound: int
    spent: float

    @property
    def proved(self) -> bool:
        """Whether the value is the least."""
        return self.value <= self.bound


def least_period(model: Model, seconds: float, seed: int = 0) -> Periodic | None:
    """The periodic schedule of the least period within the limits of memory.

    Args:
        model: the activities.
        seconds: deterministic time of the solver.
        seed: of its random choices.

    Returns:
        The schedule; None where the time ends before one is found, or where no order keeps within the limits.
    """
    bound = low = least_round(model)
    longest, grain = sum(map(model.load, model.resources)), max(1, low // 1000)
    period, step, high, spent, found = low, grain, longest + 1, 0.0, None
    while high - low >= grain and spent < seconds:
        limit = max(seconds / 8, (seconds - spent) / 2)
        answer, starts = _solve(model, period, model.limits, None, limit, seed)
        spent += answer.spent + 1e-3
        if starts is not None:
            high, found = period, starts
        else:
            bound = period + 1 if answer.closed else bound
            low, step = period + 1, 2 * step
        period = (low + high) // 2 if found is not None else min(low + step // 2 - 1, longest)
    if found is None:
        return None
    return Periodic(high, found, high, bound, spent)


def least_memory(model: Model, period: int, seconds: float, seed: int = 0) -> Periodic | None:
    """The periodic schedule of this period whose fullest device holds the least; limits are left aside."""
    return _found(period, *_solve(model, period, model.limits, "memory", seconds, seed))


def least_latency(model: Model, period: int, memory: int, seconds: float, seed: int = 0) -> Periodic | None:
    """The periodic schedule of this period, and at most ``memory`` units on each device, with the shortest rounds."""
    return _found(period, *_solve(model, period, (memory,) * len(model.limits), "latency", seconds, seed))


def _found(period: int, answer: Answer, starts: Starts | None) -> Periodic | None:
    if starts is None:
        return None
    return Periodic(period, starts, round(answer.objective), math.ceil(answer.bound - 1e-6), answer.spent)


def _solve(
    model: Model, period: int, limits: Limits, objective: str | None, seconds: float, seed: int
) -> tuple[Answer, Starts | None]:
    """The solver's answer for one period, and where it has one the starts of round 0 for each lane."""
    cp = cp_sat().CpModel()
    activities = [one for lane in model.lanes for one in lane.activities]
    shifts = [sum(len(lane.activities) for lane in model.lanes[:number]) for number in range(len(model.lanes))]
    edges = [(i + shift, j + shift) for lane, shift in zip(model.lanes, shifts, strict=True) for i, j in lane.edges]
    lifetimes = [
        Lifetime(one.device, one.first + shift, one.last + shift, one.units)
        for lane, shift in zip(model.lanes, shifts, strict=True)
        for one in lane.lifetimes
    ]
    latest = _most_turns(activities, period)
    turn = [cp.new_int_var(0, latest, "") for _ in activities]
    offset = [cp.new_int_var(0, period - 1, "") for _ in activities]
    starts = [k * period + o for k, o in zip(turn, offset, strict=True)]
    for i, j in edges:
        _wait(cp, (turn[i], offset[i]), (turn[j], offset[j]), activities[i].ticks, period)
    before = _orders(cp, model, activities, offset, period)
    _keep_within(cp, model, lifetimes, turn, before, limits, objective == "memory")
    if objective == "latency":
        end = cp.new_int_var(0, (latest + 2) * period, "")
        for start, one in zip(starts, activities, strict=True):
            cp.add(end >= start + one.ticks)
        cp.minimize(end)
    answer = run(cp, seconds, seed)
    if answer.values is None:
        return answer, None
    values = [answer.value(start) for start in starts]
    ends = [*shifts[1:], len(values)]
    return answer, tuple(tuple(values[first:end]) for first, end in zip(shifts, ends, strict=True))


def _most_turns(activities: list[Activity], period: int) -> int:
    """A turn that no schedule needs to exceed. All activities behind some time begin a period earlier if they can, which
    holds no more: so the next one begins at most a period after one before it ends."""
    return len(activities) + sum(one.ticks for one in activities) // period


def _wait(cp: Any, first: tuple[Any, Any], second: tuple[Any, Any], ticks: int, period: int) -> None:
    """The second begins behind the first: in the same turn where its offset lets it, else one or two turns later.

    Differences of offsets with a literal are much easier for the solver than sums of turns times the period.
    """
    same, next_one = cp.new_bool_var(""), cp.new_bool_var("")
    cp.add(second[1] >= first[1] + ticks).only_enforce_if(same)
    cp.add(second[1] >= first[1] + ticks - period).only_enforce_if(next_one)
    cp.add(second[0] >= first[0] + 2 - same - next_one)


def _orders(
    cp: Any, model: Model, activities: list[Activity], offset: list[Any], period: int
) -> dict[tuple[int, int], Any]:
    """The order of each two activities of a resource on the circle, between which they do not overlap."""
    before: dict[tuple[int, int], Any] = {}
    for resource in model.resources:
        own = [i for i, one in enumerate(activities) if resource in one.resources]
        cp.add_no_overlap(
            cp.new_fixed_size_interval_var(offset[i] - shift, activities[i].ticks, "") for i in own for shift in (0, period)
        )
        for place, i in enumerate(own):
            for j in own[place + 1 :]:
                if (i, j) in before:
                    continue
                first = before[i, j] = cp.new_bool_var("")
                before[j, i] = 1 - first
                for one, other, literal in ((i, j, first), (j, i, first.negated())):
                    cp.add(offset[one] + activities[one].ticks <= offset[other]).only_enforce_if(literal)
                    cp.add(offset[other] + activities[other].ticks <= offset[one] + period).only_enforce_if(literal)
    return before


def _keep_within(
    cp: Any,
    model: Model,
    lifetimes: list[Lifetime],
    turn: list[Any],
    before: dict[tuple[int, int], Any],
    limits: Limits,
    least: bool,
) -> None:
    """What stands on a device when an activity begins is within its limit, or is made ``least`` on the fullest device."""
    whole = sum(one.units for one in lifetimes) * (len(turn) + 2)
    peak = cp.new_int_var(0, whole, "") if least else None
    for device, limit in enumerate(limits):
        own = [one for one in lifetimes if one.device == device]
        if limit is None and not least:
            continue
        for start in sorted({one.first for one in own}):
            held = sum(
                one.units
                * (
                    turn[one.last]
                    - turn[one.first]
                    + (1 if one.last == start else before[start, one.last])
                    - (0 if one.first == start else before[start, one.first])
                )
                for one in own
            )
            cp.add(held <= (limit if peak is None else peak))  # type: ignore[operator]
    if peak is not None:
        cp.minimize(peak)
