"""How far a search is, on a terminal: a bar of the plans that were looked at, the best so far, its bound and gap."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jscaler.plan_search.engine import Progress, Told
from jscaler.text.units import readable_bytes, readable_seconds


def incumbent(progress: Progress) -> str:
    """The best so far, with its bound and gap, in a line."""
    best = progress.best
    if best is None:
        return "nothing fits yet"
    gap = best.seconds / progress.bound - 1 if progress.bound else float("inf")
    said = f"best {readable_seconds(best.seconds)}, {readable_bytes(best.peak)}: {best.text}"
    return f"{said} · bound {readable_seconds(progress.bound)}, gap {gap:.1%}"


@contextlib.contextmanager
def shown_progress() -> Iterator[Told]:
    """A function that is told how far a search is, and shows it on a terminal; elsewhere it shows nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("searching", total=None)

        def told(progress: Progress) -> None:
            text = f"{progress.stage}\n{incumbent(progress)}" if progress.points else progress.stage
            bar.update(task, completed=progress.looked, total=progress.points or None, description=text)

        yield told
