"""Lower bounds of a step's makespan and of a period that need no search.

A period that is proved is none of them: a step of m micro-batches, run again and again, is periodic in m micro-batches
together, and may take less than m periods of one. It is never below the load of the busiest device, which counts here.
"""

from fractions import Fraction
from math import ceil

from jscaler.tables.search.activities import LaneActivities, Lifetime, Model


def least_makespan(model: Model) -> int:
    """Ticks that every schedule takes: the busiest device or link, with the least before its first activity and behind its
    last; the fullest memory, in the same way; or the critical path of a micro-batch.

    Example:
        >>> from jscaler.tables.search.activities import model_of
        >>> from jscaler.tables.search.chain_problem import chain_problem, unit_costs
        >>> from jscaler.tables.search.ticks import in_ticks
        >>> problem = chain_problem([unit_costs()] * 4, lies=range(4), microbatches=8, memory=4)
        >>> least_makespan(model_of(in_ticks(problem).problem))
        27
    """
    lanes = model.lanes[: model.microbatches]
    busy = [_busy(model, one) for one in model.resources]
    full = [_full(model, device) for device in range(len(model.limits))]
    return max(*busy, *full, *(lane.critical_path for lane in lanes))


def least_round(model: Model) -> int:
    """Ticks that no period is below: the load of the busiest device or link, or of the fullest memory.

    Example:
        >>> from jscaler.tables.search.activities import model_of
        >>> from jscaler.tables.search.tessel import tessel_problem
        >>> from jscaler.tables.search.ticks import in_ticks
        >>> [least_round(model_of(in_ticks(tessel_problem("V", memory=memory)).problem)) for memory in (4, 2)]
        [4, 8]
    """
    stand = [ceil(_standing(model, device)) for device in range(len(model.limits))]
    return max(1, *map(model.load, model.resources), *stand)


def _busy(model: Model, resource: int) -> int:
    work, heads, tails = 0, list[int](), list[int]()
    for number, lane in enumerate(model.lanes[: model.microbatches]):
        own = [place for place, one in enumerate(lane.activities) if resource in one.resources]
        copies = len(range(number, model.microbatches, len(model.lanes)))
        work += copies * sum(lane.activities[place].ticks for place in own)
        heads += [lane.heads[place] for place in own]
        tails += [lane.tails[place] for place in own]
    return work + min(heads, default=0) + min(tails, default=0)


def _full(model: Model, device: int) -> int:
    """Ticks between the first beginning and the last end of what stands on a device, with the least before and behind."""
    work, heads, tails = Fraction(0), list[int](), list[int]()
    for number, lane in enumerate(model.lanes[: model.microbatches]):
        own = [one for one in lane.lifetimes if one.device == device]
        copies = len(range(number, model.microbatches, len(model.lanes)))
        work += copies * sum(one.units * least_ticks(lane, one) for one in own)
        heads += [lane.heads[one.first] for one in own]
        tails += [lane.tails[one.last] for one in own]
    return ceil(work / usable) + min(heads) + min(tails) if heads and (usable := _usable(model, device)) else 0


def _standing(model: Model, device: int) -> Fraction:
    """Ticks for which a round fills the memory of a device."""
    usable = _usable(model, device)
    work = sum(one.units * least_ticks(lane, one) for lane in model.lanes for one in lane.lifetimes if one.device == device)
    return Fraction(work, usable) if usable else Fraction(0)


def _usable(model: Model, device: int) -> int | None:
    """Units of a limit that can be taken: a multiple of those of a lifetime, where all take as many. None: no limit."""
    limit = model.limits[device]
    units = {one.units for lane in model.lanes for one in lane.lifetimes if one.device == device and one.units}
    if limit is None or not units:
        return None
    return limit - limit % min(units) if len(units) == 1 else limit


def least_ticks(lane: LaneActivities, one: Lifetime) -> int:
    """The longest path from the beginning of a lifetime to its end."""
    longest = {one.first: lane.activities[one.first].ticks}
    for _ in lane.activities:
        for before, after in lane.edges:
            if before in longest:
                reached = longest[before] + lane.activities[after].ticks
                longest[after] = max(longest.get(after, 0), reached)
    return longest[one.last]
