"""Signals that ask for an end: noted, so that what is under way is done first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALLED = 128  # exit codes as shells know them, of the signal's number


class Stopped(KeyboardInterrupt):
    """A signal has asked for an end, and what was under way is done.

    Attributes:
        number: the signal's.
    """

    def __init__(self, told: str, number: int):
        super().__init__(told)
        self.number = number


@contextmanager
def noted(*signals: int, at_once: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Of ``signals`` the first that comes while what is inside runs is noted, and ``at_once`` called; a second one acts as
    it would have.

    Where another process was asked to end, and so this one is `Stopped`, its own signal may come a moment later, and is the
    first all the same.
    """
    found: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield found
        return
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, _frame: Any) -> None:
        found.append(number)
        give_back()
        at_once()

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in signals:
        signal.signal(number, note)
    expected = False
    try:
        yield found
    except Stopped:
        expected = not found
        raise
    finally:
        if not expected:
            give_back()
