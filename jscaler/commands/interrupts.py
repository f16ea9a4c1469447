"""Ctrl-C and SIGTERM: a sentence and the exit code that shells know, and no checkpoint that is half written."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

from jscaler.commands.screen import show_error

Display = TypeVar("Display")
SIGNALLED = 128  # exit codes as shells know them, of the signal's number
INTERRUPTED = SIGNALLED + signal.SIGINT


class Interruptible(TyperGroup):
    """Commands that end with a sentence when they are interrupted; what a command says of it is the exception's text."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            show_error("interrupted", str(stopped) or "before it was done")
            raise typer.Exit(SIGNALLED + stopped.number if isinstance(stopped, Stopped) else INTERRUPTED) from None


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
    it would have."""
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
    try:
        yield found
    finally:
        give_back()


@contextmanager
def finished_before_interrupts(told: str = "") -> Iterator[None]:
    """What is inside is done whole; an interrupt meanwhile comes behind it, with ``told``, and a second one at once."""
    with noted(signal.SIGINT) as pressed:
        yield
    if pressed:
        raise KeyboardInterrupt(told)


@contextmanager
def on_screen(display: AbstractContextManager[Display]) -> Iterator[Display]:
    """``display``, which no interrupt leaves half begun or half ended: line and cursor are given back."""
    with ExitStack() as stack:
        with finished_before_interrupts():
            shown = stack.enter_context(display)
        try:
            yield shown
        finally:
            with finished_before_interrupts():
                stack.close()
