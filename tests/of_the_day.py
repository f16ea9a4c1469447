"""Sweeps, and tests, too long for every run: each day has a share of their cases, and all days together have all.

The controller of a run draws the day's seed, prints it (`conftest`), and hands it to its workers in the environment.
``JSCALER_SWEEPS=<seed>`` repeats a day, ``JSCALER_SWEEPS=all`` runs every case. A test of several seconds is marked
``one_day_in(n)``: of any n days it runs on one; so does each case of it; and whenever it is asked for by its name.
"""

import datetime
import os
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import hypothesis

T = TypeVar("T")
VARIABLE = "JSCALER_SWEEPS"
SEED = os.environ.setdefault(VARIABLE, str(datetime.datetime.now(tz=datetime.UTC).date().toordinal()))


def of_the_day(cases: Iterable[T], one_in: int = 5, always: Iterable[T] = ()) -> Sequence[T]:
    """The day's share of ``cases``, in their order: one in ``one_in``, and one at least; with those that run ``always``,
    since no other case notices what they do."""
    found = list(cases)
    if SEED == "all":
        return found
    places = random.Random(f"{SEED} {len(found)}").sample(range(len(found)), -(-len(found) // one_in))
    return [found[place] for place in sorted({*places, *map(found.index, always)})]


def drawn(max_examples: int, one_in: int = 5, **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a hypothesis test: the day's share of ``max_examples``, from the day's seed."""
    if SEED == "all":
        return hypothesis.settings(max_examples=max_examples, **more)
    share = hypothesis.settings(max_examples=-(-max_examples // one_in), derandomize=False, **more)
    return lambda test: share(hypothesis.seed(int(SEED))(test))


def runs_today(name: str, one_in: int) -> bool:
    """Whether a test that runs on one day in ``one_in`` does today."""
    return SEED == "all" or (int(SEED) + zlib.crc32(name.encode())) % one_in == 0


def says() -> str:
    """What a run prints of it."""
    if SEED == "all":
        return "sweeps: all cases"
    return f"sweeps: the share of the day {SEED} ({VARIABLE}={SEED} repeats it, {VARIABLE}=all runs all cases)"
