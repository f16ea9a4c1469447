"""``search_schedule``: the order of given blocks with the least step time, within the memory of each device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jscaler.errors import PlanError
from jscaler.tables.search import starts as in_starts
from jscaler.tables.search.activities import Model, model_of
from jscaler.tables.search.cp_solver import cp_sat
from jscaler.tables.search.finite import Starts, lane_of, solve_finite
from jscaler.tables.search.incumbents import Incumbent, from_catalogue, in_kinds_of, incumbent
from jscaler.tables.search.least_memory import check_memory
from jscaler.tables.search.lower_bound import least_makespan
from jscaler.tables.search.neighbourhood import improve, makespan_of
from jscaler.tables.search.period import Periodic, least_period
from jscaler.tables.search.problem import Problem
from jscaler.tables.search.replay import check_table, replay
from jscaler.tables.search.result import FoundSchedule
from jscaler.tables.search.swaps import share_devices, swapped
from jscaler.tables.search.ticks import InTicks, in_ticks
from jscaler.tables.table import Table

_FOR_ONE_ROUND, _FOR_PERIOD, _FOR_SMALL, _FOR_ENDS, _FOR_EXACT = 0.1, 0.1, 0.2, 0.5, 0.8  # shares of the time left
_MOST_SMALL, _MOST_EXACT = 400, 1500  # activities of an exact model that is solved first, and of one that is solved at all
_SWAPS = 50  # for each second, of small tables
_MOVED = 8_000  # cells of tables that are simulated in each second


def search_schedule(
    problem: Problem, seconds: float = 60.0, seed: int = 0, incumbents: Sequence[Table] = ()
) -> FoundSchedule:
    """The table of least step time that keeps within each device's memory, with a lower bound that is proved.

    The search takes the best of the published schedules that fit, the given incumbents, a periodic schedule with its
    warm-up and cool-down, the exact model, and windows that are ordered anew. It stops when the step time is the bound.

    Where rows of the table share devices, `jscaler.tables.legal.in_order` decides whose entry begins first. The step time
    follows it; the bound holds for any order, so it may not be reached.

    The solver runs on one core and counts deterministic time. So equal inputs and an equal seed give equal results, on a
    clock the search takes about ``seconds``, more on a slow machine.

    Args:
        problem: the blocks, their edges, and the memory limits.
        seconds: deterministic time, over all steps of the search.
        seed: of the solver's random choices.
        incumbents: tables to set out from, in the kinds of blocks of the problem or with whole backwards.

    Returns:
        The table, its step time, the bound, and who found it. Where the time ends before a proof, its gap says so.

    Raises:
        PlanError: no order keeps within the memory limits, or none was found in the time; an incumbent has other blocks.
        JscalerError: OR-Tools is not installed.

    Example:
        >>> from jscaler.tables.search.chain_problem import chain_problem, unit_costs
        >>> problem = chain_problem([unit_costs()] * 2, lies=[0, 1], microbatches=3, memory=2)
        >>> found = search_schedule(problem)
        >>> found.seconds, found.proved, found.peaks
        (10.0, True, (2.0, 2.0))
    """
    cp_sat()
    check_memory(problem)
    given = list(_given(problem, incumbents))
    search = _Search.of(problem, seconds, seed).better([*given, *from_catalogue(problem)])
    for step in (_one_round, _periodic, _small, _ends, _exact, _windows, _swaps):
        search = step(search)
    if search.best is None:
        raise PlanError(
            f"{problem.name}: no table within the memory limits was found in {seconds:g} s; give more of either"
        )
    best, bound = search.best, search.bound_seconds
    assert bound <= best.found.seconds * (1 + 1e-9), "a bound is below each schedule"
    bound = min(bound, best.found.seconds)  # sums of floats differ in their last digits
    period = search.ticks.seconds(search.period.period) if search.period is not None else None
    return FoundSchedule(best.table, best.found.seconds, bound, search.ticks.exact, period, best.found.peaks, best.source)


@dataclass(frozen=True)
class _Search:
    """What is known between two steps of the search; ``bound`` in ticks, ``least`` in seconds."""

    problem: Problem
    ticks: InTicks
    model: Model
    seed: int
    seconds: float
    left: float
    bound: int
    least: float
    best: Incumbent | None = None
    period: Periodic | None = None

    @staticmethod
    def of(problem: Problem, seconds: float, seed: int) -> "_Search":
        """Before the first step."""
        ticks, fine = in_ticks(problem), in_ticks(problem, fine=True)
        model = model_of(ticks.problem)
        least = fine.seconds(least_makespan(model_of(fine.problem)))
        return _Search(problem, ticks, model, seed, seconds, seconds, least_makespan(model), least)

    @property
    def bound_seconds(self) -> float:
        """Seconds that every schedule takes."""
        return max(self.least, self.ticks.seconds(self.bound))

    @property
    def done(self) -> bool:
        """Whether nothing can be found any more."""
        return self.best is not None and (self.horizon() <= self.bound or self.left <= 0)

    def horizon(self) -> int:
        """The makespan of the best table, in ticks."""
        assert self.best is not None
        return round(replay(self.ticks.problem, self.best.table).seconds)

    def starts(self) -> Starts:
        """The starts of the best table, in ticks."""
        assert self.best is not None
        return in_starts.starts_of(self.ticks.problem, self.model, replay(self.ticks.problem, self.best.table))

    def spend(self, seconds: float) -> "_Search":
        """Less time is left; a step takes a thousandth at least."""
        return replace(self, left=self.left - max(seconds, 1e-3))

    def better(self, found: Iterable[Incumbent | None]) -> "_Search":
        """With the shortest of the best so far and others; of equal ones that whose fullest device holds least."""
        every = [one for one in (self.best, *found) if one is not None]
        best = min(every, key=lambda one: (one.found.seconds, max(one.found.peaks)), default=None)
        return replace(self, best=best)

    def with_starts(self, starts: Starts, source: str) -> "_Search":
        """With a schedule of the solver, if it is shorter in the simulator, too."""
        return self.better([incumbent(self.problem, in_starts.table_of(self.problem, starts), source)])


def _given(problem: Problem, incumbents: Sequence[Table]) -> Iterable[Incumbent]:
    """The given tables that keep within the limits; raises PlanError where one has other blocks."""
    for number, table in enumerate(incumbents):
        table = in_kinds_of(problem, table)
        check_table(problem, table)
        replay(problem, table)
        one = incumbent(problem, table, f"incumbent {number}")
        if one is not None:
            yield one


def _one_round(search: _Search) -> _Search:
    """One micro-batch of each lane after another: some schedule, where there is one within the limits of memory."""
    if search.best is not None:
        return search
    lanes = min(len(search.model.lanes), search.model.microbatches)
    one = replace(search.model, microbatches=lanes)
    longest = sum(activity.ticks for lane in one.lanes for activity in lane.activities)
    answer = solve_finite(one, longest, least_makespan(one), _FOR_ONE_ROUND * search.left, search.seed)
    search = search.spend(answer.spent)
    if not answer.feasible:
        limits = ", ".join(f"device {device}: {search.problem.limit(device)}" for device in range(search.problem.devices))
        raise PlanError(
            f"{search.problem.name}: no order of a single micro-batch keeps within the memory limits of all devices "
            f"together ({limits}); raise them, or cut the batch into more micro-batches"
        )
    if answer.starts is None:
        return search
    rounds = tuple(
        tuple(answer.starts[lane % lanes, number] for number in range(len(search.model.lanes[lane].activities)))
        for lane in range(lanes)
    )
    period = makespan_of(one, answer.starts)
    whole = in_starts.repeated(search.model, Periodic(period, rounds, period, period, 0.0))
    return search.with_starts(whole, "one round after another")


def _periodic(search: _Search) -> _Search:
    """The periodic schedule, repeated; its period is told even where nothing is left to find."""
    found = least_period(search.model, _FOR_PERIOD * search.left, search.seed)
    search = replace(search.spend(found.spent if found else _FOR_PERIOD * search.left), period=found)
    if found is None or search.done:
        return search
    return search.with_starts(in_starts.repeated(search.model, found), "periodic")


def _small(search: _Search) -> _Search:
    """The exact model with a part of the time, where it is small."""
    return _exact_model(search, _MOST_SMALL, _FOR_SMALL)


def _exact(search: _Search) -> _Search:
    """The exact model with most of the time."""
    return _exact_model(search, _MOST_EXACT, _FOR_EXACT)


def _exact_model(search: _Search, most: int, share: float) -> _Search:
    """First a schedule that takes no longer than the bound, then the shortest, of at most so many activities."""
    count = sum(len(lane_of(search.model, microbatch).activities) for microbatch in range(search.model.microbatches))
    seconds = share * search.left / 2
    for to_bound in (True, False) if count <= most else ():
        if search.done:
            break
        known = search.best is not None
        shorter = search.horizon() - 1 if known else sum(search.model.load(one) for one in search.model.resources) * count
        hint = search.starts() if known and not to_bound else None
        horizon = min(search.bound, shorter) if to_bound else shorter
        answer = solve_finite(search.model, horizon, search.bound, seconds, search.seed, hint)
        search = replace(search.spend(answer.spent), bound=max(search.bound, answer.bound))
        if answer.starts is not None:
            search = search.with_starts(answer.starts, "exact model")
    return search


def _ends(search: _Search) -> _Search:
    """Windows of the periodic schedule, above all of its warm-up and cool-down."""
    if search.done or search.period is None:
        return search
    found = _improved(search, in_starts.repeated(search.model, search.period), _FOR_ENDS * search.left)
    return found[0].with_starts(found[1], "periodic, windows")


def _windows(search: _Search) -> _Search:
    """Windows of the best schedule."""
    if search.done or search.best is None:
        return search
    found = _improved(search, search.starts(), search.left)
    return found[0].with_starts(found[1], f"{search.best.source}, windows")


def _improved(search: _Search, starts: Starts, seconds: float) -> tuple[_Search, Starts]:
    found, spent = improve(search.model, starts, search.bound, seconds, search.seed)
    return search.spend(spent), found


def _swaps(search: _Search) -> _Search:
    """Entries of the best table in other places, where rows share devices."""
    if search.best is None or search.best.found.seconds <= search.bound_seconds or not share_devices(search.problem.rows):
        return search
    tries = search.seconds * min(_SWAPS, _MOVED / sum(1 for _ in search.best.table.cells()))
    return search.better([swapped(search.problem, search.best, round(tries), search.seed)])
