"""Pipelines whose stages have devices and plans of their own: the fastest for a number of micro-batches, and a bound."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jscaler import plans
from jscaler.errors import JscalerError, PlanError
from jscaler.estimate.prices import Price, Prices
from jscaler.estimate.prices.candidate import Candidate
from jscaler.estimate.prices.price import Tables
from jscaler.estimate.prices.segments import SegmentPrices, finest, in_microbatches, segment_prices
from jscaler.estimate.prices.staged import seconds_of_turns
from jscaler.plan_search.at_hand import of_devices
from jscaler.plan_search.program import NothingFitsError
from jscaler.plan_search.stages.cutter import Chain, Choice, Stages
from jscaler.plan_search.stages.row import SegmentRow
from jscaler.plans.batch import BATCH
from jscaler.primitives.planner import Policy
from jscaler.spaces import Point, StageOpening
from jscaler.stages import transform
from jscaler.tables import Published, Table, find_schedule
from jscaler.tables.simulator import turns_of
from jscaler.tables.table import cells_of, one_by_one
from jscaler.text.units import counted, readable_bytes

Key = tuple[object, int, int]  # a plan, devices, micro-batches
HIGH = 1.15  # tables put a stage's peak at most so many times too high


@dataclass(frozen=True)
class CutStages:
    """A pipeline that was found.

    Attributes:
        text: of the plan.
        bound: no other cut of the same space takes fewer seconds, by the tables.
        price: with the schedule's own order.
        stages: of each its last device, what it is, and bytes on its devices by tables.
    """

    text: str
    policy: Policy
    bound: float
    price: Price
    stages: tuple[tuple[int, Key, float], ...]


@dataclass(frozen=True)
class _Group:
    """Plans for so many devices."""

    tables: Tables
    plans: Sequence[tuple[Point, Candidate, frozenset[tuple[int, int]]]]


class StageCuts:
    """Cuts of one step on one cluster; ``batch`` is the path or pattern of the batch among its inputs."""

    def __init__(self, prices: Prices, batch: str = BATCH):
        self.prices, self.cluster, self.batch = prices, prices.cluster, batch
        self._groups: dict[tuple[int, tuple[object, ...]], _Group] = {}
        self._segments: dict[Key, SegmentPrices] = {}
        self.refused: dict[str, None] = {}  # plans of stages that are not legal, and why
        self._larger: dict[Key, float] = {}  # by which factor a stage held more than tables say

    @cached_property
    def row(self) -> SegmentRow:
        """The model's segments."""
        return SegmentRow.of(self.prices.captured, self.prices.tables.folded, self.cluster, self.batch)

    def cut(self, opening: StageOpening, memory: float | None) -> CutStages:
        """The fastest pipeline that fits; where none does by tables, the fastest that may.

        Raises:
            NothingFitsError: none fits, though tables may be too high.
            PlanError: the model is no row, or no plan of a stage is legal.
        """
        chain, points = self.chain(opening, memory)
        roomy = None if memory is None else HIGH * memory
        known = [self._larger.get(self._key(opening, chain, points, n), 1.0) for n in range(len(points))]
        own = [dataclasses.replace(c, held=x * c.held, kept=x * c.kept) for c, x in zip(chain.choices, known, strict=True)]
        found = dataclasses.replace(chain, choices=own).cut()
        least = dataclasses.replace(chain, lower=True, memory=roomy).cut()
        if least is None:
            limit = "any memory" if memory is None else readable_bytes(memory)
            raise NothingFitsError(
                f"no stages fit in {limit}, in {counted(opening.microbatches, 'micro-batch', 'micro-batches')}; take more "
                "micro-batches or devices, or let more be computed again"
            )
        fitting = [least] if found is None else [found]
        if found is not None and not self._larger and (memory is None or max(chain.peaks(least.stages)) <= memory):
            fitting.append(least)
        priced = [(self.price(opening, chain, one.stages, points), one.stages) for one in fitting]
        price, stages = min(priced, key=lambda pair: pair[0].seconds)
        ends = itertools.accumulate(chain.choices[n].devices for *_, n in stages)
        keys = (self._key(opening, chain, points, n) for *_, n in stages)
        held = tuple(zip((end - 1 for end in ends), keys, chain.peaks(stages), strict=True))
        return CutStages(*self._pipeline(opening, chain, stages, points), least.seconds, price, held)

    def heed(self, found: CutStages, device: int, peak: float) -> None:
        """Take it that a stage like that of ``device`` holds as much more than tables say as it does here."""
        _, key, held = next(stage for stage in found.stages if device <= stage[0])
        self._larger[key] = max(self._larger.get(key, 1.0), peak / held)

    @staticmethod
    def _key(opening: StageOpening, chain: Chain, points: Sequence[Point], number: int) -> Key:
        return points[number].key, chain.choices[number].devices, opening.microbatches

    def chain(self, opening: StageOpening, memory: float | None) -> tuple[Chain, list[Point]]:
        """The tables of all that stages may be, and the plan of each choice."""
        choices, points, row = list[Choice](), list[Point](), self.row
        for devices, inside in opening.plans.items():
            group = self._group(devices, inside)
            for point, candidate, cuts in group.plans:
                if any(size % (opening.microbatches * parts) for size, parts in cuts):
                    continue
                own = self._segment_prices(group, point, candidate, devices, opening.microbatches)
                choices.append(_choice(own, row, devices))
                points.append(point)
        if not choices:
            raise PlanError(
                f"no plan of a stage is legal in {counted(opening.microbatches, 'micro-batch', 'micro-batches')}"
                f"{''.join(f'; {why}' for why in list(self.refused)[:1])}"
            )
        sizes, segments, given = [one.devices for one in choices], len(row.kinds), self.cluster.num_devices
        if not any(n <= segments and n * min(sizes) <= given <= n * max(sizes) for n in opening.counts):
            numbers = (" or ".join(map(str, dict.fromkeys(own))) for own in (opening.counts, sizes))
            raise PlanError(
                f"the space has {' stages of '.join(numbers)} devices; there are {given} devices, and the model can be cut "
                f"into {segments}"
            )
        hops = {one.devices: self._hops(one.devices, opening.microbatches) for one in choices}
        most = max(2, min(len(row.kinds), self.cluster.num_devices // min(hops), max(opening.counts)))
        under_way = _under_way(opening.schedule, most, opening.microbatches)
        chain = Chain(
            len(row.kinds), self.cluster.num_devices, choices, opening.microbatches, under_way, hops, memory,
            opening.counts, self.cluster.devices_per_host,
        )  # fmt: skip
        return chain, points

    def _group(self, devices: int, points: tuple[Point, ...]) -> _Group:
        """The legal plans of so many devices."""
        key = devices, tuple(point.key for point in points)
        if key not in self._groups:
            self._groups[key] = self._planned(devices, points)
        return self._groups[key]

    def _planned(self, devices: int, points: Sequence[Point]) -> _Group:
        shared, captured, cluster = self.prices.tables, self.prices.captured, of_devices(self.cluster, devices)
        tables = dataclasses.replace(shared, cluster=cluster, _skeletons={})
        found = list[tuple[Point, Candidate, frozenset[tuple[int, int]]]]()
        for point in points:
            try:
                policy = plans.accumulate(2, point.make())
                plan = transform(captured, policy, devices, cost=cluster)
                candidate = Candidate.of(plan, shared.folded)
                if candidate.without is not None:
                    raise PlanError("some layers run again, and tables of stages have all or none")
                found.append((point, candidate, finest(tables, candidate)))
            except JscalerError as error:
                self.refused.setdefault(f"'{point.text}': {error}")
        return _Group(tables, found)

    def _segment_prices(
        self, group: _Group, point: Point, candidate: Candidate, devices: int, microbatches: int
    ) -> SegmentPrices:
        key = point.key, devices, microbatches
        if key not in self._segments:
            own = in_microbatches(candidate, microbatches)
            self._segments[key] = segment_prices(group.tables, own, self.row.shares, self.row.count)
        return self._segments[key]

    def _hops(self, devices: int, microbatches: int) -> np.ndarray:
        """Seconds from a stage of so many devices to the next and back: within a host, and to another."""
        host, each = self.cluster.devices_per_host, self.row.nbytes / microbatches / devices
        found = np.zeros((2, len(each)))
        for across in (0, 1):
            behind = max(devices, host) if across else devices
            pairs = np.array([(device, device + behind) for device in range(devices)])
            legal = behind + devices <= self.cluster.num_devices and (across or 2 * devices <= host)
            if legal:
                found[across] = [2 * self.cluster.messages(pairs, nbytes, self.cluster.num_devices) for nbytes in each]
        return found

    def _pipeline(self, opening: StageOpening, chain: Chain, stages: Stages, points: Sequence[Point]) -> tuple[str, Policy]:
        """The plan, as a text and as a policy."""
        sizes, own = [chain.choices[n].devices for *_, n in stages], [points[n] for *_, n in stages]
        groups: int | list[int] = len(sizes) if len(set(sizes)) == 1 else sizes
        alike = len({point.key for point in own}) == 1
        text = own[0].text if alike else f"[{', '.join(point.text for point in own)}]"
        cuts = self.row.cuts([start for start, *_ in stages[1:]])
        cuts |= {} if self.batch == BATCH else {"batch": self.batch}
        said = "".join(f", {name}={value!r}" for name, value in cuts.items())
        schedule = "" if opening.schedule == "1f1b" else f", {opening.schedule!r}"
        made_of = {point.key: point.make() for point in own}  # equal plans run once
        policies = made_of[own[0].key] if alike else [made_of[point.key] for point in own]
        made = functools.partial(plans.pipeline, groups, opening.microbatches, opening.schedule, policies)
        return f"pipeline({groups}, {opening.microbatches}{schedule}, plan={text}{said})", made(**cuts)

    def price(self, opening: StageOpening, chain: Chain, stages: Stages, points: Sequence[Point]) -> Price:
        """By the order of the schedule's table."""
        kinds, blocks = self.row.kinds, dict[str, dict[int, float]](F={}, B={})
        once, fixed = list[float](), list[float]()
        for stage, (start, stop, number) in enumerate(stages):
            devices = chain.choices[number].devices
            own = self._segments[points[number].key, devices, opening.microbatches]
            here = kinds[start:stop]
            blocks["F"][stage], blocks["B"][stage] = float(own.forward[here].sum()), float(own.backward[here].sum())
            once.append(float(own.once[here].sum()))
            fixed.append(float((own.state + own.sums)[here].sum()))
        firsts = np.cumsum([0, *(chain.choices[n].devices for *_, n in stages)])

        def hop(first: int, second: int) -> float:
            before, behind = sorted((first, second))
            is_across = int(firsts[behind] % chain.per_host == 0)
            return float(chain.hops[chain.choices[stages[before][2]].devices][is_across, stages[behind][0]] / 2)

        turns = turns_of(one_by_one(_table(opening.schedule, len(stages), opening.microbatches)))
        seconds = seconds_of_turns(turns, blocks, once, hop, self.cluster.interference)
        busiest = max(opening.microbatches * (blocks["F"][n] + blocks["B"][n]) + once[n] for n in range(len(stages)))
        return Price(seconds, max(chain.peaks(stages)), busiest, 0.0, busiest, max(fixed))


def _choice(prices: SegmentPrices, row: SegmentRow, devices: int) -> Choice:
    """What ranges of segments cost under a plan."""

    def total(rows: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(rows[row.kinds])])
        return sums[None, :] - sums[:, None]

    beside = np.zeros((len(row.kinds) + 1,) * 2)
    for start in range(len(row.kinds)):
        beside[start, start + 1 :] = np.maximum.accumulate(prices.beside[row.kinds[start:]])
    at_work = total(prices.sums) + beside
    held = total(prices.state) + np.maximum(at_work, total(prices.late))
    seconds = total(prices.forward + prices.backward)
    return Choice(devices, seconds, total(prices.forward), total(prices.once), held, total(prices.kept))


def _table(schedule: str, stages: int, microbatches: int) -> Table:
    published = find_schedule(schedule)
    assert isinstance(published, Published)
    return published.table(stages, microbatches)


def _under_way(schedule: str, stages: int, microbatches: int) -> list[int]:
    """How many micro-batches are under way in the last of so many stages, in the one before, and so on."""
    found = list[int]()
    for row in reversed(_table(schedule, stages, microbatches).rows):
        live = itertools.accumulate(1 if cell.kind == "F" else -1 for cell in cells_of(row))
        found.append(max(live))
    return found
