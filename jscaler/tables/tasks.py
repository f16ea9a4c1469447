"""When the blocks of a step run, and what waits: tasks in the order in which they are started, each on devices or on a
link.

A task begins when all it needs is free, and what it reads is there. Devices and links take tasks in the order in which they
are given, as streams of a GPU do; so going through them once, in that order, is the whole simulation::

    begin(task) = max(end of the last task of each of its devices and links, end of each task that it reads)

Where sends slow down the blocks beside them, a block's end depends on sends that begin later. So time goes from one begin
or end to the next.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """What runs for ``seconds`` on each of ``places`` (devices, links), behind the earlier tasks ``waits``.

    Attributes:
        slows: places whose tasks get on more slowly while it runs.
    """

    places: tuple[Hashable, ...]
    seconds: float
    waits: tuple[int, ...]
    slows: tuple[Hashable, ...] = ()


def times_of(tasks: Sequence[Task], interference: float | Sequence[float] = 1.0) -> list[tuple[float, float]]:
    """When each task begins and ends.

    Args:
        interference: how many times as long a task takes while others slow it down, however many; of all, or of each.

    Example:
        >>> block, send = Task(("device",), 1.0, ()), Task(("link",), 0.5, (), ("device",))
        >>> times_of([block, send]), times_of([block, send], 2.0)
        ([(0.0, 1.0), (0.0, 0.5)], [(0.0, 1.25), (0.0, 0.5)])
    """
    times = [interference] * len(tasks) if isinstance(interference, int | float) else interference
    if max(times, default=1.0) > 1 and any(task.slows for task in tasks):
        return _Clock(tasks, times).times()
    free: dict[Hashable, float] = {}
    found: list[tuple[float, float]] = []
    for task in tasks:
        begin = max((*(found[n][1] for n in task.waits), *(free.get(place, 0.0) for place in task.places)), default=0.0)
        end = begin + task.seconds
        free.update(dict.fromkeys(task.places, end))
        found.append((begin, end))
    return found


class _Clock:
    """Runs tasks, some of which slow others down. Of those that end at one time the first goes first."""

    def __init__(self, tasks: Sequence[Task], interference: Sequence[float]):
        self.tasks, self.interference = tasks, interference
        self.left = [task.seconds for task in tasks]  # of each the seconds to go, at full speed
        self.since = [0.0] * len(tasks)
        self.begins, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.behind: list[list[int]] = [[] for _ in tasks]
        self.missing = [0] * len(tasks)
        self.on: dict[Hashable, int] = {}  # place -> the task that runs there
        self.slowing = Counter[Hashable]()
        self.due: list[tuple[float, int]] = []  # ends, also such as have changed since

    def times(self) -> list[tuple[float, float]]:
        last: dict[Hashable, int] = {}
        for number, task in enumerate(self.tasks):
            before = {*task.waits, *(last[place] for place in task.places if place in last)}
            self.missing[number] = len(before)
            for other in before:
                self.behind[other].append(number)
            last.update(dict.fromkeys(task.places, number))
        for number in [n for n, count in enumerate(self.missing) if not count]:
            self._begin(number, 0.0)
        done = set[int]()
        while self.due:
            now, number = heapq.heappop(self.due)
            if number not in done and now == self.ends[number]:
                done.add(number)
                self._end(number, now)
        return list(zip(self.begins, self.ends, strict=True))

    def _begin(self, number: int, now: float) -> None:
        task = self.tasks[number]
        self.begins[number] = self.since[number] = now
        self.on.update(dict.fromkeys(task.places, number))
        self._aim(number, now)
        self._change(task.slows, now, 1)

    def _end(self, number: int, now: float) -> None:
        task = self.tasks[number]
        for place in task.places:
            del self.on[place]
        self._change(task.slows, now, -1)
        for other in self.behind[number]:
            self.missing[other] -= 1
            if not self.missing[other]:
                self._begin(other, now)

    def _change(self, places: Iterable[Hashable], now: float, by: int) -> None:
        """One more task slows ``places`` down, or one less."""
        places = tuple(places)
        running = dict.fromkeys(self.on[place] for place in places if place in self.on)
        for number in running:
            self.left[number] -= (now - self.since[number]) / self._times(number)
            self.since[number] = now
        for place in places:
            self.slowing[place] += by
        for number in running:
            self._aim(number, now)

    def _aim(self, number: int, now: float) -> None:
        self.ends[number] = now + max(self.left[number], 0.0) * self._times(number)
        heapq.heappush(self.due, (self.ends[number], number))

    def _times(self, number: int) -> float:
        slowed = any(self.slowing[place] for place in self.tasks[number].places)
        return self.interference[number] if slowed else 1.0
