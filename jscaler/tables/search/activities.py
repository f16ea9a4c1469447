"""Activities: what the solver's models schedule, the blocks and hops of one micro-batch, over resources in ticks.

Resources are devices and links. A hop is an activity of its own on the link between two rows of the table, so blocks run
beside it. A lifetime is bytes that stand on a device from the beginning of one activity to the end of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from jscaler.errors import PlanError
from jscaler.tables.search.problem import Devices, Problem
from jscaler.tables.search.ticks import unit_of_bytes


@dataclass(frozen=True)
class Activity:
    """A block or a hop of a micro-batch.

    Attributes:
        resources: the numbers of its devices, or of its link; links have numbers behind those of devices.
        ticks: how long it takes.
        block: its place in the lane; None for a hop.
    """

    resources: tuple[int, ...]
    ticks: int
    block: int | None


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are held from the beginning of activity ``first`` to the end of activity ``last``, in units."""

    device: int
    first: int
    last: int
    units: int


@dataclass(frozen=True)
class LaneActivities:
    """The activities of a micro-batch of one lane.

    Attributes:
        activities: those of blocks in the order of the lane, then hops.
        edges: pairs of activities, of which the second waits for the first.
        lifetimes: what they hold on devices that have a limit, or on all.
    """

    activities: tuple[Activity, ...]
    edges: tuple[tuple[int, int], ...]
    lifetimes: tuple[Lifetime, ...]

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """The activities that each waits for."""
        return tuple(tuple(i for i, j in self.edges if j == number) for number in range(len(self.activities)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """For each activity the most edges of a path that leads to it."""
        found = [0] * len(self.activities)
        for _ in self.activities:
            for before, after in self.edges:
                found[after] = max(found[after], found[before] + 1)
        return tuple(found)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The least ticks before each activity."""
        return self._longest([(after, before) for before, after in self.edges])

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """The least ticks behind each activity."""
        return self._longest(list(self.edges))

    @property
    def critical_path(self) -> int:
        """The least ticks of a micro-batch."""
        return max(head + one.ticks for head, one in zip(self.heads, self.activities, strict=True))

    def _longest(self, edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        found = [0] * len(self.activities)
        for _ in self.activities:  # no path has more edges than there are activities
            before = list(found)
            for one, other in edges:
                found[one] = max(found[one], found[other] + self.activities[other].ticks)
            if before == found:
                break
        return tuple(found)


@dataclass(frozen=True)
class Model:
    """A problem as the solver sees it.

    Attributes:
        lanes: the activities of a micro-batch of each lane.
        limits: units that each device may hold; None where there is no limit.
        unit: bytes of a unit.
        microbatches: how many micro-batches a step has.
    """

    lanes: tuple[LaneActivities, ...]
    limits: tuple[int | None, ...]
    unit: Fraction
    microbatches: int

    @cached_property
    def resources(self) -> tuple[int, ...]:
        """The numbers of all devices and links."""
        return tuple(sorted({one for lane in self.lanes for activity in lane.activities for one in activity.resources}))

    def load(self, resource: int) -> int:
        """Ticks for which a micro-batch of each lane keeps a device or a link busy."""
        return sum(one.ticks for lane in self.lanes for one in lane.activities if resource in one.resources)


def model_of(problem: Problem) -> Model:
    """The activities of a problem in ticks.

    Raises:
        PlanError: what a block frees was never held, or is never freed.
    """
    links: dict[tuple[Devices, Devices], int] = {}
    sizes = [size for block in problem.lanes[0] for size in (block.held, block.freed)]
    unit = unit_of_bytes(sizes) if any(sizes) else Fraction(1)
    lanes = tuple(_lane(problem, number, links, unit) for number in range(len(problem.lanes)))
    whole = tuple(
        None if problem.limit(device) is None else int(Fraction(problem.limit(device) or 0) / unit)
        for device in range(problem.devices)
    )
    return Model(lanes, whole, unit, problem.microbatches)


def _lane(problem: Problem, number: int, links: dict[tuple[Devices, Devices], int], unit: Fraction) -> LaneActivities:
    blocks = problem.lanes[number]
    activities = [Activity(block.devices, int(block.seconds), place) for place, block in enumerate(blocks)]
    edges: list[tuple[int, int]] = []
    for edge in problem.edges:
        ends = blocks[edge.before].devices, blocks[edge.after].devices
        if not edge.hop or ends[0] == ends[1]:
            edges.append((edge.before, edge.after))
            continue
        link = links.setdefault(ends, problem.devices + len(links))
        edges += [(edge.before, len(activities)), (len(activities), edge.after)]
        activities.append(Activity((link,), int(edge.hop), None))
    return LaneActivities(tuple(activities), tuple(edges), tuple(_lifetimes(problem, number, unit)))


def _lifetimes(problem: Problem, number: int, unit: Fraction) -> list[Lifetime]:
    """On each device, what is freed goes to what was held last of all that must run before.

    A sum over such pairs of "the first has begun" less "the last has ended" is what stands there, whatever the pairs are.
    """
    blocks, found = problem.lanes[number], list[Lifetime]()
    earlier = ancestors(len(blocks), [(edge.before, edge.after) for edge in problem.edges])
    for device in range(problem.devices):
        held = {place: Fraction(blocks[place].held) for place in problem.order if device in blocks[place].devices}
        for place in [place for place in problem.order if device in blocks[place].devices]:
            left = Fraction(blocks[place].freed)
            for other in [one for one in reversed(held) if one in earlier[place] or one == place]:
                taken = min(left, held[other])
                held[other] -= taken
                left -= taken
                if taken:
                    found.append(Lifetime(device, other, place, int(taken / unit)))
            if left > Fraction(blocks[place].freed) / 10**9:
                raise PlanError(
                    f"{problem.name}: block '{blocks[place]}' frees {blocks[place].freed:g} bytes on device {device}, and "
                    f"blocks before it hold {blocks[place].freed - float(left):g}; let it free no more than they hold"
                )
        for place, left in held.items():
            if left > Fraction(blocks[place].held) / 10**9:
                raise PlanError(
                    f"{problem.name}: of what block '{blocks[place]}' holds on device {device}, {float(left):g} bytes are "
                    "never freed, so that each micro-batch would hold more; let a later block free them"
                )
    return found


def ancestors(count: int, edges: Sequence[tuple[int, int]]) -> list[set[int]]:
    """For each number the numbers from which a path of ``edges`` leads to it."""
    found: list[set[int]] = [set() for _ in range(count)]
    changed = True
    while changed:
        changed = False
        for before, after in edges:
            new = found[before] | {before}
            changed = changed or not new <= found[after]
            found[after] |= new
    return found
