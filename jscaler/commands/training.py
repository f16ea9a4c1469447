"""How ``jscaler train`` shows a run: the plan, then progress; and timelines of a few of its steps."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jscaler.commands.interrupts import finished_before_interrupts
from jscaler.commands.screen import show
from jscaler.report.draw_timeline import draw_timelines
from jscaler.report.summary import summary
from jscaler.report.trace_file import write_trace
from jscaler.runtime.compiled import Compiled
from jscaler.text.units import readable_bytes
from jscaler.training.records import StepRecord

TRACED = 3  # steps behind the first
WORTH_TELLING = 0.05  # of a run's time


class OnScreen:
    """A tracker: the plan in five lines, or op by op, and a bar; before them, in its ``with``, that something goes on."""

    def __init__(self, console: Console, explain: bool):
        self._console, self._explain = console, explain
        self._status = console.status("capturing, planning and compiling")
        self._entered = time.perf_counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: Any = None
        self._began = self._waited = self._saving = 0.0

    def __enter__(self) -> "OnScreen":
        with finished_before_interrupts():
            self._status.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with finished_before_interrupts():  # line and cursor are given back
            self._status.stop()
            self._progress.stop()

    def begin(self, compiled: Compiled, start: int, steps: int) -> None:
        with finished_before_interrupts():
            self._status.stop()
        plan = compiled.plan
        shown = plan.explain() if self._explain else f"{summary(plan.report)}\n(--explain shows every op)"
        show(self._console, f"{shown}\ncompiled in {time.perf_counter() - self._entered:.1f} s")
        self._began = time.perf_counter()
        self._task = self._progress.add_task("training", total=steps, completed=start, told="")
        with finished_before_interrupts():
            self._progress.start()

    def step(self, record: StepRecord) -> None:
        what, speed = record.speed
        self._waited += record.waited
        self._saving += record.saving
        told = f"loss {record.loss:.3f} {speed:,.0f} {what}/s {record.seconds:.3f} s/step{self._more(record)}"
        self._progress.update(self._task, completed=record.step + 1, told=told)
        if record.evaluation:
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in record.evaluation.items())
            show(self._progress.console, f"after {record.step + 1} steps: {numbers}")

    def _more(self, record: StepRecord) -> str:
        """What else is known: the part of the peak, memory, and where a run stands still, if that is much of it."""
        elapsed = time.perf_counter() - self._began
        still = {"waiting for data": self._waited / elapsed, "saving": self._saving / elapsed}
        told = [] if record.utilisation is None else [f"{record.utilisation:.0%} of the peak"]
        told += [] if record.peak_bytes is None else [readable_bytes(record.peak_bytes)]
        told += [f"{share:.0%} {what}" for what, share in still.items() if share >= WORTH_TELLING]
        return "".join(f", {one}" for one in told)

    def stopping(self) -> None:
        """A signal came, and the step that runs is waited for."""
        if self._task is not None:
            self._progress.update(self._task, description="stopping behind this step")

    def end(self, error: BaseException | None) -> None:
        with finished_before_interrupts():
            self._progress.stop()


class Timelines:
    """Writes when blocks ran, for a few steps: each is run aside, watched, and counts for nothing.

    Args:
        trace: the folder of files for Perfetto.
        draw: the picture of the last of them.
    """

    def __init__(self, trace: Path | None, draw: Path | None):
        self._trace, self._draw = trace, draw
        self._left = TRACED

    def __call__(self, compiled: Compiled, state: Any, batch: Any, index: int) -> None:
        if not self._left:
            return
        self._left -= 1
        timeline = compiled.trace(state, batch)[1]
        if self._trace is not None:
            write_trace(self._trace / f"step_{index:05d}.json", timeline)
        if self._draw is not None:
            draw_timelines(self._draw, [timeline])
