"""The exact model of a step: all blocks of all micro-batches, one start each, and the makespan made least.

Micro-batches of a lane are interchangeable, so block b of one may run before block b of the next one, for every b. Nothing
is lost: take any schedule, and for each block sort its starts. The i-th start of b is not before the i-th end of what b
waits for, since each of the first i starts of b has such an end before it. Devices and memory see the same starts and ends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jscaler.tables.search.activities import LaneActivities, Model
from jscaler.tables.search.cp_solver import cp_sat, run

Slot = tuple[int, int]  # micro-batch and activity


Starts = Mapping[Slot, int]


@dataclass(frozen=True)
class Finite:
    """What the exact model found.

    Attributes:
        starts: of each activity of each micro-batch, in ticks; None where none was found.
        bound: no schedule has a lower makespan.
        feasible: False where no schedule keeps within the limits of memory and the makespan that was asked for.
        spent: deterministic seconds of the search.
    """

    starts: Starts | None
    bound: int
    feasible: bool
    spent: float


def solve_finite(
    model: Model,
    horizon: int,
    bound: int,
    seconds: float,
    seed: int = 0,
    hint: Starts | None = None,
) -> Finite:
    """A schedule of the least makespan, at most ``horizon``.

    Args:
        model: the activities, and how many micro-batches there are.
        horizon: ticks that a schedule may take.
        bound: ticks that each schedule takes at least.
        seconds: deterministic time of the solver.
        seed: of its random choices.
        hint: starts from which the search sets out.
    """
    if horizon < bound:
        return Finite(None, bound, False, 0.0)
    cp = cp_sat().CpModel()
    starts = _starts(cp, model, horizon)
    makespan = cp.new_int_var(bound, horizon, "")
    for (microbatch, number), start in starts.items():
        lane = lane_of(model, microbatch)
        cp.add(start + lane.activities[number].ticks + lane.tails[number] <= makespan)
    _add_order(cp, model, starts)
    _add_resources(cp, model, starts)
    _add_memory(cp, model, starts, horizon)
    for slot, start in (hint or {}).items():
        cp.add_hint(starts[slot], start)
    if horizon > bound:
        cp.minimize(makespan)
    answer = run(cp, seconds, seed, linear=False)
    if answer.values is None:
        return Finite(None, horizon + 1 if answer.closed else bound, not answer.closed, answer.spent)
    found = {slot: answer.value(start) for slot, start in starts.items()}
    proved = math.ceil(answer.bound - 1e-6) if horizon > bound else bound
    return Finite(found, max(bound, proved), True, answer.spent)


def lane_of(model: Model, microbatch: int) -> LaneActivities:
    """The activities of a micro-batch."""
    return model.lanes[microbatch % len(model.lanes)]


def own_of(model: Model, lane: int) -> range:
    """The micro-batches of a lane."""
    return range(lane, model.microbatches, len(model.lanes))


def _starts(cp: Any, model: Model, horizon: int) -> dict[Slot, Any]:
    """A variable for each start; copies of an activity run one after another."""
    starts: dict[Slot, Any] = {}
    for microbatch in range(model.microbatches):
        lane, mine = lane_of(model, microbatch), own_of(model, microbatch % len(model.lanes))
        place = mine.index(microbatch)
        for number, one in enumerate(lane.activities):
            first = lane.heads[number] + place * one.ticks
            last = horizon - lane.tails[number] - (len(mine) - place) * one.ticks
            starts[microbatch, number] = cp.new_int_var(first, max(first, last), "")
    return starts


def _add_order(cp: Any, model: Model, starts: Mapping[Slot, Any]) -> None:
    """Edges, and micro-batches of a lane one behind the other."""
    for microbatch in range(model.microbatches):
        lane = lane_of(model, microbatch)
        for before, after in lane.edges:
            cp.add(starts[microbatch, before] + lane.activities[before].ticks <= starts[microbatch, after])
        following = microbatch + len(model.lanes)
        for number, one in enumerate(lane.activities if following < model.microbatches else ()):
            cp.add(starts[microbatch, number] + one.ticks <= starts[following, number])


def _add_resources(cp: Any, model: Model, starts: Mapping[Slot, Any]) -> None:
    for resource in model.resources:
        own = [
            (start, lane_of(model, slot[0]).activities[slot[1]])
            for slot, start in starts.items()
            if resource in lane_of(model, slot[0]).activities[slot[1]].resources
        ]
        cp.add_no_overlap([cp.new_fixed_size_interval_var(start, one.ticks, "") for start, one in own])


def _add_memory(cp: Any, model: Model, starts: Mapping[Slot, Any], horizon: int) -> None:
    """A lifetime is an interval that takes its units of the limit. Of one lane at most ``limit // units`` stand at
    once: so a copy so far behind begins after the earlier one has ended."""
    for device, limit in enumerate(model.limits):
        kept = [(number, one) for number, lane in enumerate(model.lanes) for one in lane.lifetimes if one.device == device]
        if limit is None or not kept:
            continue
        intervals, units = list[Any](), list[int]()
        for number, one in kept:
            mine, most = own_of(model, number), limit // one.units if one.units else model.microbatches
            for place, microbatch in enumerate(mine):
                end = starts[microbatch, one.last] + model.lanes[number].activities[one.last].ticks
                if place + most < len(mine):
                    cp.add(end <= starts[mine[place + most], one.first])
                size = cp.new_int_var(0, horizon, "")
                intervals.append(cp.new_interval_var(starts[microbatch, one.first], size, end, ""))
                units.append(one.units)
        if len(kept) > 1:
            cp.add_cumulative(intervals, units, limit)
