"""Lower bounds of a step's makespan that need no search.

A period that is proved is none of them: a step of m micro-batches, run again and again, is periodic in m micro-batches
together, and may take less than m periods of one. It is never below the load of the busiest device, which counts here.
"""

from jscaler.tables.search.activities import Model


def least_makespan(model: Model) -> int:
    """Ticks that every schedule takes: the busiest device or link, with the least before its first activity and behind its
    last, or the critical path of a micro-batch.

    Example:
        >>> from jscaler.tables.search.activities import model_of
        >>> from jscaler.tables.search.chain_problem import chain_problem, unit_costs
        >>> from jscaler.tables.search.ticks import in_ticks
        >>> problem = chain_problem([unit_costs()] * 4, lies=range(4), microbatches=8, memory=4)
        >>> least_makespan(model_of(in_ticks(problem).problem))
        27
    """
    lanes = model.lanes[: model.microbatches]
    return max(max(lane.critical_path for lane in lanes), *(_busy(model, one) for one in model.resources))


def _busy(model: Model, resource: int) -> int:
    work, heads, tails = 0, list[int](), list[int]()
    for number, lane in enumerate(model.lanes[: model.microbatches]):
        own = [place for place, one in enumerate(lane.activities) if resource in one.resources]
        copies = len(range(number, model.microbatches, len(model.lanes)))
        work += copies * sum(lane.activities[place].ticks for place in own)
        heads += [lane.heads[place] for place in own]
        tails += [lane.tails[place] for place in own]
    return work + min(heads, default=0) + min(tails, default=0)
