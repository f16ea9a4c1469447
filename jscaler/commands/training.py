"""The main job: train a model on real text under a plan, with a progress bar and a log."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jscaler.api import Parallelized
from jscaler.report.draw_timeline import draw_timelines
from jscaler.report.trace_file import write_trace
from jscaler.runtime.compiled import Compiled

TRACED = 3  # steps behind the first


@dataclass(frozen=True)
class StepRecord:
    """One line of the log."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float


def train(
    step: Parallelized,
    state: Any,
    batch_at: Callable[[int], dict[str, Any]],
    steps: range,
    console: Console,
    log: Path | None = None,
    trace: Path | None = None,
    draw: Path | None = None,
) -> Any:
    """Run the optimizer steps of these numbers; print the plan first, then progress.

    Args:
        step: ``step(state, batch) -> (state, {"loss": scalar})``.
        batch_at: the batch of a step; ``batch["tokens"]`` is counted.
        log: where a JSON line per step goes.
        trace: the folder to which timelines of the first steps behind the first go, for Perfetto.
        draw: where the picture of the last of these goes.

    Returns:
        The state after the last step.
    """
    with console.status("capturing, planning and compiling"):
        started = time.perf_counter()
        compiled = step.compiled(step.bind(state, batch_at(0)))
    console.print(compiled.plan.explain(), highlight=False, soft_wrap=True)
    console.print(f"compiled in {time.perf_counter() - started:.1f} s", highlight=False)
    records = []
    with _progress(console) as progress, _opened(log, steps.start) as file:
        task = progress.add_task("training", total=len(steps), loss=float("nan"), speed=0.0, seconds=0.0)
        for index in steps:
            batch = batch_at(index)
            if (trace or draw) and steps.start < index <= steps.start + TRACED:
                _traced(compiled, state, batch, index, trace, draw)
            began = time.perf_counter()
            state, metrics = compiled(state, batch)
            loss = float(metrics["loss"])  # waits for the step
            seconds = time.perf_counter() - began
            record = StepRecord(index, loss, seconds, batch["tokens"].size / seconds)
            records.append(record)
            if file:
                file.write(json.dumps(record.__dict__) + "\n")
                file.flush()
            progress.update(task, advance=1, loss=loss, speed=record.tokens_per_second, seconds=seconds)
    if records:
        first, last = records[0], records[-1]
        middle = sorted(r.seconds for r in records)[len(records) // 2]
        console.print(
            f"loss {first.loss:.3f} -> {last.loss:.3f} in {len(steps)} steps; median step {1000 * middle:.0f} ms",
            highlight=False,
        )
    return state


def _traced(
    compiled: Compiled, state: Any, batch: dict[str, Any], index: int, trace: Path | None, draw: Path | None
) -> None:
    """Run a step aside, watched: its arguments stay, and it counts for nothing."""
    timeline = compiled.trace(state, batch)[1]
    if trace is not None:
        write_trace(trace / f"step_{index:05d}.json", timeline)
    if draw is not None:
        draw_timelines(draw, [timeline])


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TextColumn("{task.fields[seconds]:.3f} s/step"),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def _opened(path: Path | None, first: int) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if first else "w") as file:
        yield file
