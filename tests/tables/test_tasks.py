"""Blocks beside sends: by hand, and a clock that agrees with the simulation in one pass where nothing is slowed down."""

import dataclasses
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given
from of_the_day import drawn

from jscaler.tables.tasks import Task, times_of


def block(seconds: float, *waits: int, place: str = "a") -> Task:
    return Task((place,), seconds, waits)


def send(seconds: float, *waits: int, link: str = "ab", slows: tuple[str, ...] = ("a", "b")) -> Task:
    return Task((link,), seconds, waits, slows)


@pytest.mark.parametrize(
    ("tasks", "times"),
    [
        ([block(1), send(0.5)], [(0, 1.25), (0, 0.5)]),  # half of it at half the speed
        ([send(0.5), block(1)], [(0, 0.5), (0, 1.25)]),  # in whatever order they are started
        ([block(1), send(5)], [(0, 2), (0, 5)]),
        ([block(1), send(0.5, slows=("b",))], [(0, 1), (0, 0.5)]),
        # two at once slow it down no more than one: for 0.75 seconds in all
        (
            [block(1), send(0.5), block(0.25, place="c"), send(0.5, 2, link="ac")],
            [(0, 1.375), (0, 0.5), (0, 0.25), (0.25, 0.75)],
        ),
        # a send behind the first block, beside the second, of which nobody knows when that begins
        ([block(1), send(1, 0), block(1)], [(0, 1), (1, 2), (1, 2.5)]),
        # who waits for a block that is slowed down waits longer; sends are not slowed down
        ([block(1), send(0.5), send(1, 0)], [(0, 1.25), (0, 0.5), (1.25, 2.25)]),
        ([block(0), send(0), block(0, 0, 1)], [(0, 0), (0, 0), (0, 0)]),
    ],
)  # fmt: skip
def test_by_hand(tasks: list[Task], times: list[tuple[float, float]]) -> None:
    assert times_of(tasks, 2.0) == times


@given(st.integers(0, 2**32 - 1))
@drawn(60)
def test_where_nothing_is_slowed_down_the_clock_has_the_times_of_one_pass(seed: int) -> None:
    rng = random.Random(seed)
    tasks = []
    for number in range(rng.randrange(1, 30)):
        waits = tuple(sorted(rng.sample(range(number), min(number, rng.randrange(3)))))
        places = tuple(rng.sample("abcd", rng.randrange(1, 3)))
        tasks.append(Task(places, float(rng.randrange(4)), waits))
    beside = [dataclasses.replace(task, slows=("nowhere",)) for task in tasks]
    assert times_of(beside, 3.0) == times_of(tasks)


@given(st.integers(0, 2**32 - 1))
@drawn(40)
def test_work_is_done_at_the_speed_of_its_time(seed: int) -> None:
    """Of each block the seconds beside sends count for a half, the others whole."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    for number in range(rng.randrange(2, 24)):
        waits = tuple(sorted(rng.sample(range(number), min(number, rng.randrange(3)))))
        own, other = rng.sample("abc", 2)
        seconds = rng.randrange(1, 8) / 4
        tasks.append(
            send(seconds, *waits, link=own + other, slows=(own, other))
            if rng.random() < 0.5
            else block(seconds, *waits, place=own)
        )
    times = times_of(tasks, 2.0)
    for task, (begin, end) in zip(tasks, times, strict=True):
        sends = [times[n] for n, one in enumerate(tasks) if {*one.slows} & {*task.places}]
        edges = sorted({begin, end, *(t for pair in sends for t in pair if begin < t < end)})
        done = sum((b - a) / (2 if any(s <= a and b <= e for s, e in sends) else 1) for a, b in itertools.pairwise(edges))
        assert done == pytest.approx(task.seconds)
        assert all(times[n][1] <= begin for n in task.waits)
