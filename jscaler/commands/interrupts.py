"""Ctrl-C and SIGTERM: a sentence and the exit code that shells know, and no checkpoint that is half written."""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

from jscaler.commands.screen import show_error
from jscaler.training.signals import SIGNALLED, Stopped, noted

Display = TypeVar("Display")
INTERRUPTED = SIGNALLED + signal.SIGINT


class Interruptible(TyperGroup):
    """Commands that end with a sentence when they are interrupted; what a command says of it is the exception's text."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            show_error("interrupted", str(stopped) or "before it was done")
            raise typer.Exit(SIGNALLED + stopped.number if isinstance(stopped, Stopped) else INTERRUPTED) from None


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
