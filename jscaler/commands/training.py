"""The main job: train a model under a plan, with a progress bar and a log."""

import itertools
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jscaler.api import Parallelized
from jscaler.capture.names import leaf_names
from jscaler.commands.interrupts import Stopped, noted, on_screen
from jscaler.commands.not_finite import NotFinite, OnNan
from jscaler.commands.screen import show
from jscaler.errors import JobError
from jscaler.report.draw_timeline import draw_timelines
from jscaler.report.summary import summary
from jscaler.report.trace_file import write_trace
from jscaler.report.written import writing
from jscaler.runtime.agreement import any_process
from jscaler.runtime.compiled import Compiled
from jscaler.runtime.fetching import fetch
from jscaler.runtime.graph_nodes import holds_nodes
from jscaler.runtime.watch import READS, RUNS, Watch
from jscaler.text.units import counted

if TYPE_CHECKING:  # which needs the extra that has Orbax
    from jscaler.runtime.checkpoint import Checkpoints

TRACED = 3  # steps behind the first
STOP = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class StepRecord:
    """One line of the log."""

    step: int
    loss: float
    seconds: float
    speed: "Speed"

    def as_json(self) -> dict[str, Any]:
        """Plain data: the speed is ``tokens_per_second`` of text, ``rows_per_second`` of other data."""
        loss = self.loss if math.isfinite(self.loss) else None  # JSON has no NaN
        return {"step": self.step, "loss": loss, "seconds": self.seconds, self.speed.name: self.speed.rate}


class Speed(NamedTuple):
    """How much of the data a second takes: tokens, where a batch has ``"tokens"``, and else rows."""

    what: str
    rate: float

    @property
    def name(self) -> str:
        return f"{self.what}_per_second"

    @staticmethod
    def of(batch: Any, seconds: float) -> "Speed":
        if isinstance(batch, Mapping) and "tokens" in batch:
            return Speed("tokens", batch["tokens"].size / seconds)
        shape = jax.numpy.shape(jax.tree.leaves(batch)[0])
        return Speed("rows", (shape[0] if shape else 1) / seconds)


def train(
    step: Parallelized,
    state: Any,
    batches: Iterator[Any],
    steps: range,
    console: Console,
    log: Path | None = None,
    trace: Path | None = None,
    draw: Path | None = None,
    explain: bool = False,
    checkpoints: "Checkpoints | None" = None,
    watch: Watch | None = None,
    guard: NotFinite | None = None,
    read: int | None = None,
) -> Any:
    """Run the optimizer steps of these numbers; print the plan first, then progress.

    A first SIGINT or SIGTERM ends it behind the step that runs, where checkpoints are written with one of that state.

    Args:
        step: the train step of a `Job`.
        batches: those of these steps, and as many more as the ``guard`` leaves out.
        log: where a JSON line per step goes.
        trace: the folder to which timelines of the first steps behind the first go, for Perfetto.
        draw: where the picture of the last of these goes.
        explain: whether the plan is shown op by op, not in five lines.
        checkpoints: where states are written, as often as they are due and behind the last step.
        watch: that of the processes, which is told what this one does.
        guard: decides where a loss is not finite; by default the run stops.
        read: how many batches were read before; as many as steps, by default.

    Returns:
        The state after the last step.

    Raises:
        JobError: the step does not return its next state and a loss.
        Stopped: a signal came.
        NotFiniteError: a loss is not finite, and the run is to stop.
    """
    guard = guard or NotFinite(OnNan.STOP, checkpoints)
    at = watch.at if watch is not None else lambda *_: None
    first_batch = next(batches)
    with on_screen(console.status("capturing, planning and compiling")):
        started = time.perf_counter()
        compiled = step.compiled(step.bind(state, first_batch))
    check_result(compiled, state)
    shown = compiled.plan.explain() if explain else f"{summary(compiled.plan.report)}\n(--explain shows every op)"
    show(console, f"{shown}\ncompiled in {time.perf_counter() - started:.1f} s")
    records: list[StepRecord] = []
    with (
        checkpoints or nullcontext(), _told(records, steps, checkpoints), on_screen(_progress(console)) as progress,
        _opened(log, steps.start) as file,
    ):  # fmt: skip
        task = progress.add_task("training", total=len(steps), loss=float("nan"), speed=0.0, what="", seconds=0.0)
        with noted(*STOP, at_once=lambda: progress.update(task, description="stopping behind this step")) as signals:
            index, first_read, went_back = steps.start, steps.start if read is None else read, False
            for batches_read, batch in enumerate(itertools.chain([first_batch], batches), first_read + 1):
                at(RUNS if records else "begins with", index)  # the first step may take as long as it wants
                if (trace or draw) and steps.start < index <= steps.start + TRACED:
                    _traced(compiled, state, batch, index, trace, draw)
                if went_back:  # what is restored has no weak types
                    compiled, went_back = step.compiled(step.bind(state, batch)), False
                began = time.perf_counter()
                state, metrics = _state_and_metrics(compiled(state, batch), state)
                loss = float(fetch(_loss(metrics)))  # waits for the step
                seconds = time.perf_counter() - began
                record = StepRecord(index, loss, seconds, Speed.of(batch, seconds))
                records.append(record)
                if file:
                    with writing("log", file.name):
                        file.write(json.dumps(record.as_json()).encode() + b"\n")
                stops = any_process(signals[0] if signals else 0)  # asked once: what comes later waits for the next step
                saved = checkpoints is not None and bool(stops or index + 1 == steps.stop or checkpoints.is_due(index + 1))
                at("looks at the state behind", index)
                if (back := guard.after(index, loss, state, saved)) is not None:
                    show(console, f"step {index} is not finite: back to the state after {back[0]} steps")
                    (index, state), went_back = back, True
                    progress.update(task, completed=index - steps.start)
                    if stops:
                        raise Stopped("", stops)
                    continue
                index += 1
                what, speed = record.speed
                progress.update(task, completed=index - steps.start, loss=loss, speed=speed, what=what, seconds=seconds)
                if checkpoints and saved:
                    at("saves the state behind", index - 1)
                    checkpoints.save(index, state, batches_read)
                if stops:
                    raise Stopped("", stops)
                if index == steps.stop:
                    break
                at(READS, index)
    if records:
        first, last = records[0], records[-1]
        middle = sorted(r.seconds for r in records)[len(records) // 2]
        taken = counted(len(steps), "step")
        skipped = f"; {counted(guard.skipped, 'step')} skipped" if guard.skipped else ""
        show(console, f"loss {first.loss:.3f} -> {last.loss:.3f} in {taken}; median step {1000 * middle:.0f} ms{skipped}")
    return state


@contextmanager
def _told(records: Sequence[StepRecord], steps: range, checkpoints: "Checkpoints | None") -> Iterator[None]:
    """An interrupt says what is saved, and what is lost."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        done = records[-1].step + 1 if records else steps.start
        saved = (checkpoints and checkpoints.latest) or steps.start
        told = f"after step {done} of {steps.stop}; "
        if checkpoints and done == saved and records:
            told += f"its state is saved in {checkpoints.folder}: go on with --resume"
        else:
            are = "is" if done - saved == 1 else "are"
            why = "no --checkpoint was given" if checkpoints is None else "a second signal does not wait for one"
            told += f"{counted(done - saved, 'step')} of this run {are} in no checkpoint: {why}"
        raise Stopped(told, stopped.number if isinstance(stopped, Stopped) else signal.SIGINT) from None


def check_result(compiled: Compiled, state: Any) -> None:
    """Raises JobError, before anything runs, where the step does not return its next state and a loss."""
    tree, outputs = compiled.lowered.out_tree, compiled.lowered.captured.graph.outputs
    next_state, metrics = _state_and_metrics(jax.tree.unflatten(tree, range(tree.num_leaves)), state)
    if next_state is not state and jax.tree.structure(next_state) != jax.tree.structure(state):
        raise JobError(
            "the first that train_step returns is not the next version of its state: their trees differ; return (state, "
            "loss), with all that the state holds"
        )
    if next_state is not state and (told := _another(next_state, state, outputs)):
        raise JobError(
            f"the first that train_step returns is not the next version of its state: {told}; return each leaf as it came"
        )
    loss = _loss(metrics)
    if not isinstance(loss, int) or outputs[loss].shape:
        kind = f"an array of shape {outputs[loss].shape}" if isinstance(loss, int) else f"a {type(loss).__name__}"
        raise JobError(f"the loss that train_step returns is {kind}: return one number, or a dict with a 'loss'")


def _another(next_state: Any, state: Any, outputs: Sequence[Any]) -> str:
    """The first leaf of a next state that has another shape or dtype than it came with; nothing where none has."""
    named = zip(leaf_names("state", state), jax.tree.leaves(next_state), jax.tree.leaves(state), strict=True)
    for name, number, leaf in named:
        there = outputs[number]
        if (there.shape, there.dtype) != (leaf.shape, leaf.dtype):
            return f"'{name}' is {there.dtype}{list(there.shape)}, and was {leaf.dtype}{list(leaf.shape)}"
    return ""


def _state_and_metrics(result: Any, state: Any) -> tuple[Any, Any]:
    """The next state, and all else that a step has returned; nnx objects are changed in place."""
    if holds_nodes(state):
        return state, result
    if isinstance(result, tuple) and len(result) == 2:
        return result[0], result[1]
    what = f"{type(result).__name__}" + (f" of {len(result)}" if isinstance(result, tuple) else "")
    raise JobError(f'train_step returns a {what}: return (state, loss), or (state, {{"loss": loss, …}})')


def _loss(metrics: Any) -> Any:
    if not isinstance(metrics, Mapping):
        return metrics
    if "loss" not in metrics:
        raise JobError(f"train_step returns its metrics without a 'loss', only {', '.join(map(str, metrics))}; add it")
    return metrics["loss"]


def _traced(compiled: Compiled, state: Any, batch: Any, index: int, trace: Path | None, draw: Path | None) -> None:
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
        TextColumn("{task.fields[speed]:,.0f} {task.fields[what]}/s"),
        TextColumn("{task.fields[seconds]:.3f} s/step"),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def _opened(path: Path | None, first: int) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    with writing("log", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab" if first else "wb", buffering=0)  # a line is there when it is written
    with file:
        yield file
