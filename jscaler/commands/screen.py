"""Where commands print: the terminal, as wide as it is, or a pipe, whose lines are as long as they are written."""

from rich.console import Console

from jscaler.text.narrowing import narrowed

PIPED = 200  # columns of a table where the output is no terminal


def screen(quiet: bool = False) -> Console:
    """The output; ``quiet`` for a process of a job for which another speaks."""
    console = Console(quiet=quiet)
    return console if console.is_terminal else Console(width=PIPED, quiet=quiet)


def show_error(mark: str, text: str) -> None:
    """Print to the terminal of errors, the mark in red."""
    console = Console(stderr=True)
    mark_, _, rest = (narrowed(f"{mark} {text}", console.width) if console.is_terminal else f"{mark} {text}").partition(" ")
    console.print(f"[bold red]{mark_}[/]", end=" ")
    console.print(rest, highlight=False, markup=False, soft_wrap=True)


def show(console: Console, text: str) -> None:
    """Print plain text, on a terminal in lines that fit."""
    fitting = narrowed(text, console.width) if console.is_terminal else text
    console.print(fitting, highlight=False, markup=False, soft_wrap=True)
