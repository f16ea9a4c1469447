"""A step as it runs: when each block begins and ends on its devices, in the order in which it runs anyway; and how long
each block takes alone.

Blocks are started ahead of the devices, which run them in order. So a thread for each device group, and for each pair of
groups that something is sent between, waits for what is under way there, one thing after the other, and looks at the
clock. A thread may wake late, so an end that is seen is the latest that it can be; nothing has ended later than what reads
it, or what runs behind it on the same devices. A block has begun when it was started, its devices were free, and what it
reads was there.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jscaler.errors import DeviceError
from jscaler.estimate.memory import memory_over_time
from jscaler.estimate.timed_step import step_tasks, with_times
from jscaler.lower.instructions import Run, Send
from jscaler.lower.step_plan import StepPlan
from jscaler.runtime.executable import Executable
from jscaler.tables.tasks import Task
from jscaler.tables.timeline import Timeline


@dataclass(frozen=True)
class Measured:
    """Seconds of one run of each block, and of each transfer, when nothing else runs.

    Attributes:
        names: of the blocks.
    """

    blocks: tuple[float, ...]
    hops: tuple[float, ...]
    names: tuple[str, ...]


class Tracer:
    """A step whose blocks reuse no buffers, so that all that they leave can be waited for; else as it was compiled."""

    def __init__(self, step: StepPlan, made: Executable, compiled: Sequence[Callable[..., Sequence[Any]]]):
        if jax.process_count() > 1:
            raise DeviceError(f"a step is watched in one process, and the job has {jax.process_count()}: start it alone")
        self.step, self.made, self.compiled = step, made, compiled
        self._instructions = step.instructions.steps or (Run(0, (), ()),)

    def trace(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], Timeline]:
        """The step's results, and when what ran."""
        jax.block_until_ready(list(leaves))
        queues: dict[Hashable, ThreadPoolExecutor] = {}
        started: list[float] = []
        ended: list[Future[float]] = []
        began = time.perf_counter()

        def observe(place: int, made: Sequence[Any]) -> None:
            where = self._where(place)
            if where not in queues:
                queues[where] = ThreadPoolExecutor(1)
            ended.append(queues[where].submit(_end, made))
            started.append(time.perf_counter() - began)

        try:
            results = self.made.run(self.compiled, leaves, observe)
            ends = [one.result() - began for one in ended]
        finally:
            for queue in queues.values():
                queue.shutdown()
        return results, self._timeline([0.0, *started[:-1]], ends)

    def measure(self, leaves: Sequence[Any], rounds: int = 5) -> Measured:
        """How long each block and each transfer takes alone: medians of ``rounds`` steps, behind one to warm up."""
        step = self.step
        blocks: list[list[float]] = [[] for _ in step.blocks]
        hops: list[list[float]] = [[] for _ in step.transfers]
        last = 0.0

        def observe(place: int, made: Sequence[Any]) -> None:
            nonlocal last
            jax.block_until_ready(made)
            now, one = time.perf_counter(), self._instructions[place]
            if isinstance(one, Run):
                blocks[one.block].append(now - last)
            elif isinstance(one, Send):
                hops[one.transfer].append(now - last)
            last = time.perf_counter()

        for number in range(rounds + 1):
            jax.block_until_ready(list(leaves))
            if number == 1:
                blocks, hops = [[] for _ in blocks], [[] for _ in hops]
            last = time.perf_counter()
            self.made.run(self.compiled, leaves, observe)
        names = tuple(step.block_name(number) for number in range(len(step.blocks)))
        medians = [[statistics.median(own) if own else 0.0 for own in every] for every in (blocks, hops)]
        return Measured(tuple(medians[0]), tuple(medians[1]), names)

    def _where(self, place: int) -> Hashable:
        one = self._instructions[place]
        if isinstance(one, Run):
            return self.step.blocks[one.block].group.devices
        return one.transfer if isinstance(one, Send) else place

    def _timeline(self, started: Sequence[float], seen: Sequence[float]) -> Timeline:
        step = self.step
        tasks = step_tasks(step, [0.0] * len(step.blocks), [0.0] * len(step.transfers))
        times = times_seen(tasks, started, seen)
        runs, sent = with_times(step, tasks, times)
        of_runs = [(one.begin, one.end) for one in runs]
        return Timeline(f"{step.name}, measured", tuple(runs), tuple(sent), memory_over_time(step, of_runs, donated=False))


def times_seen(tasks: Sequence[Task], started: Sequence[float], seen: Sequence[float]) -> list[tuple[float, float]]:
    """When each of ``tasks`` began and ended that was started, and was seen to have ended, at these times.

    Each begins no earlier than all that it reads ends, and what ran before it on its devices.
    """
    ends = list(seen)
    behind: dict[Hashable, float] = {}  # place -> the end of the task behind
    for number, task in reversed([*enumerate(tasks)]):
        ends[number] = min([ends[number], *(behind[place] for place in task.places if place in behind)])
        behind.update(dict.fromkeys(task.places, ends[number]))
        for maker in task.waits:
            ends[maker] = min(ends[maker], ends[number])
    free: dict[Hashable, float] = {}
    times: list[tuple[float, float]] = []
    for task, start, end in zip(tasks, started, ends, strict=True):
        begin = max([start, *(times[n][1] for n in task.waits), *(free.get(place, 0.0) for place in task.places)])
        assert begin <= end
        times.append((begin, end))
        free.update(dict.fromkeys(task.places, end))
    return times


def _end(made: Sequence[Any]) -> float:
    jax.block_until_ready(made)
    return time.perf_counter()
