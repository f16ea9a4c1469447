"""How far a long command is: a line for each of the latest stages, with its seconds."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jscaler.commands.interrupts import on_screen

MOST_STAGES = 8  # that are shown: lines above the top of a terminal could not be taken back


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A function that is told each stage before it begins; what is shown is on stderr, and gone in the end."""
    columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn()
    with on_screen(Progress(*columns, console=Console(stderr=True), transient=True)) as progress:

        def begin(stage: str) -> None:
            for task in progress.tasks[-MOST_STAGES:]:
                progress.update(task.id, total=1, completed=1)
            for task in progress.tasks[: 1 - MOST_STAGES]:
                progress.remove_task(task.id)
            progress.add_task(stage, total=None)

        yield begin
