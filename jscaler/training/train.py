"""``train``: a job under a plan, step by step, with all that weeks of it need."""

import signal
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jscaler.api import Parallelized, PlanLike
from jscaler.capture.names import leaf_names
from jscaler.errors import JobError, JscalerError, check_count
from jscaler.report.written import as_path, check_folder
from jscaler.runtime.agreement import check_shares, largest
from jscaler.runtime.compiled import Compiled
from jscaler.runtime.fetching import fetch
from jscaler.runtime.graph_nodes import holds_nodes
from jscaler.runtime.out_of_memory import told_of_memory
from jscaler.runtime.watch import READS, RUNS, Watch
from jscaler.text.units import counted
from jscaler.training.evaluation import Evaluation
from jscaler.training.job import Job
from jscaler.training.not_finite import SKIPPED, NotFinite, OnNan, skipping
from jscaler.training.planned_job import PlannedJob
from jscaler.training.records import Speed, StepRecord, peak_bytes, seconds_at_peak
from jscaler.training.signals import Stopped, noted
from jscaler.training.trackers import Tracker

if TYPE_CHECKING:  # which needs the extra that has Orbax
    from jscaler.runtime.checkpoint import Checkpoints

MIB = 1 << 20
STOP = (signal.SIGINT, signal.SIGTERM)
Before = Callable[[Compiled, Any, Any, int], None]  # is shown the executable, the state, the batch and the step's number


def train(
    job: Job | tuple[Any, ...],
    plan: PlanLike,
    steps: int,
    *,
    devices: Any = None,
    seed: int = 0,
    strict: bool = False,
    checkpoint: Path | str | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    resume: bool = False,
    on_nan: OnNan | str = OnNan.STOP,
    evaluation: Evaluation | None = None,
    trackers: Sequence[Tracker] = (),
    hang_after: int = 300,
    say: Callable[[str], None] = print,
    before_step: Before | None = None,
) -> Any:
    """Train a job under a plan: what ``jscaler train`` does, from Python.

    A first SIGINT or SIGTERM ends it behind the step that runs, with its state saved where checkpoints are. In a job of
    several processes (``jax.distributed.initialize`` comes first) all call it, and process 0 speaks.

    Args:
        job: as `Job`.
        plan: a plan's name, with its values, the file of a saved one, or what `parallelize` takes.
        steps: of the whole run, those of a checkpoint that it goes on from among them.
        devices: as `parallelize` takes them.
        seed: of the key that the state is made from.
        strict: whether a plan that loses parallelism is refused.
        checkpoint: the folder of its states.
        save_every, keep: steps between two states; how many stay, the latest.
        resume: whether to go on from the latest state, where there is one.
        on_nan: where a loss is not finite: "stop", "skip" the step, or "restore" the last checkpoint.
        evaluation: what is computed of the state every so many steps; by default the job's.
        trackers: are told of each step.
        hang_after: seconds that a process of the job may be silent, or all may take for one step.
        say: where sentences go.
        before_step: is shown each step behind the first before it runs; in a job of several processes the batch lies where
            the plan has it.

    Returns:
        The state after the last step, in the plan's layout.

    Raises:
        JobError: it is no job, or the step does not return its next state and a loss.
        DeviceError: the processes of a job have different numbers of devices.
        PlanError: a count is none; or what `parallelize` raises.
        DataError: batches have ended, or are not alike; the checkpoint is of another model, or in use.
        NotFiniteError: a loss is not finite, and the run is to stop.
        ProcessError: the processes of a job are not about the same, or do not see the same folder.
        KeyboardInterrupt: a signal came; its text says what is saved.

    Example:
        >>> state = jscaler.train(job, "zero3", 3, devices=4, checkpoint=folder / "run", say=lambda _: None)
        >>> state = jscaler.train(job, "data_parallel", 5, devices=2, checkpoint=folder / "run", resume=True)
        loss ... -> ... in 2 steps; median step ... ms
    """
    steps, choice = check_count("train: steps", steps), _choice(on_nan)
    job = _job(job)
    evaluation = evaluation or job.evaluation
    every = {"save_every": save_every, "keep": keep, "evaluation: every": evaluation and evaluation.every}
    for name, count in every.items():
        if count is not None:
            check_count(f"train: {name}", count)
    if choice is OnNan.SKIP:
        job = job._replace(train_step=skipping(job.train_step))
    if choice is OnNan.RESTORE and checkpoint is None:
        raise JscalerError("on_nan='restore' goes back to a state of checkpoint=…, which is not given")
    folder = None if checkpoint is None else as_path("checkpoint", checkpoint)
    speaks = jax.process_index() == 0
    tell = say if speaks else lambda _: None
    check_shares()
    with Watch(hang_after) as watch:
        planned = PlannedJob(job, plan, devices, seed, strict)
        planned.agree(every | {"steps": steps, "on_nan": choice, "resume": resume, "checkpoint": folder is not None})
        start, state = planned.start(_resumed(folder, resume))
        if start >= steps:
            tell(f"the checkpoint is of {start} steps, and --steps is {steps}: nothing is left")
            return state
        if folder is not None and (told := planned.told_of(folder, start)):
            tell(told)
        kept = _checkpoints(planned, folder, save_every, keep)
        read = start if folder is None else planned.batches_read(folder, start)
        run = _Run(
            planned.step, range(start, steps), kept, NotFinite(choice, kept, planned.target, state), watch,
            tuple(trackers) if speaks else (), evaluation, tell, before_step,
        )  # fmt: skip
        return run.go(state, planned, read)


def _job(given: Any) -> Job:
    """What is given as a `Job`, its step without a plan of its own."""
    if not isinstance(given, tuple) or not 3 <= len(given) <= len(Job._fields):
        what = f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, tuple) else "")
        raise JobError(f"train takes a job, and was given {what}: give jscaler.Job(make_state, train_step, batches)")
    job = Job(*given)
    return job._replace(train_step=job.train_step.fun) if isinstance(job.train_step, Parallelized) else job


def _choice(on_nan: OnNan | str) -> OnNan:
    try:
        return OnNan(on_nan)
    except ValueError:
        raise JscalerError(f"on_nan is {', '.join(map(repr, map(str, OnNan)))}, and not {on_nan!r}") from None


def _resumed(folder: Path | None, resume: bool) -> Path | None:
    """The folder to go on from; one that is not gone on from must be unused."""
    if folder is None:
        return None
    from jscaler.runtime.checkpoint import check_unused, found_step

    if resume:
        return folder if found_step(folder) is not None else None
    check_folder("checkpoint", folder)
    check_unused(folder)
    return None


def _checkpoints(planned: PlannedJob, folder: Path | None, every: int | None, keep: int | None) -> "Checkpoints | None":
    if folder is None:
        return None
    from jscaler.runtime.checkpoint import Checkpoints

    return Checkpoints(folder, every, keep, planned.about)


@dataclass
class _Run:
    """A run from a state on."""

    step: Parallelized
    steps: range
    checkpoints: "Checkpoints | None"
    guard: NotFinite
    watch: Watch
    trackers: tuple[Tracker, ...]
    evaluation: Evaluation | None
    say: Callable[[str], None]
    before_step: Before | None
    begun: list[Tracker] = field(default_factory=list)
    first: StepRecord | None = None
    last: StepRecord | None = None
    seconds: "array[float]" = field(default_factory=lambda: array("d"))  # of each step: weeks of them fit
    skipped: int = 0

    def go(self, state: Any, planned: PlannedJob, read: int) -> Any:
        """All steps; ``read`` batches have been read before."""
        planned.check_batches()
        compiled = self.step.compiled(self.step.bind(state, planned.first_batch))
        check_result(compiled, state)
        batches = planned.own_batches(compiled, read)
        with (
            noted(*STOP, at_once=self._stopping) as signals,  # for as long as something is written
            self.checkpoints or nullcontext(), self._told(), self._tracked(compiled),
        ):  # fmt: skip
            state = self._all(compiled, state, batches, read, signals)
        self._summed_up()
        if signals:  # while the last state was written
            saved = f"; its state is saved in {self.checkpoints.folder}" if self.checkpoints else ""
            raise Stopped(f"after step {self.steps.stop} of {self.steps.stop}{saved}", signals[0])
        return state

    def _all(self, compiled: Compiled, state: Any, batches: Iterator[Any], read: int, signals: list[int]) -> Any:
        evaluate = self.evaluation.following(self.step) if self.evaluation is not None else None
        at_peak = seconds_at_peak(compiled.lowered.captured.graph, compiled.lowered.devices)
        index, at, went_back = self.steps.start, self.watch.at, False
        while index < self.steps.stop:
            began = time.perf_counter()
            batch, read = next(batches), read + 1
            waited = time.perf_counter() - began
            compiles = self.last is None or went_back
            at("begins with" if compiles else RUNS, index)
            if self.before_step is not None and index > self.steps.start:
                self.before_step(compiled, state, batch, index)
            if went_back:  # what is restored has no weak types
                compiled, went_back = self.step.compiled(self.step.bind(state, batch)), False
            began = time.perf_counter()
            state, metrics = _state_and_metrics(compiled(state, batch), state)
            with told_of_memory(compiled.plan, "the step"):
                loss, others = _numbers(metrics)  # waits for the step
            seconds = time.perf_counter() - began
            # asked once: a signal that comes later waits for the next step
            stops, peak = largest(signals[0] if signals else 0, -(-(peak_bytes() or 0) // MIB))
            gives_up = self.guard.gives_up(bool(others.get(SKIPPED)))
            saved = self._is_saved(index + 1, stops or gives_up)
            at("looks at the state behind", index)
            what = self.guard.after(index, loss, state, saved)
            began = time.perf_counter()
            if not what and saved and self.checkpoints is not None:
                at("saves the state behind", index)
                with told_of_memory(compiled.plan, "saving the state"):
                    self.checkpoints.save(index + 1, state, read)
            saving = time.perf_counter() - began
            evaluated = dict[str, float]()
            last = index + 1 == self.steps.stop
            if not what and (last or not stops) and evaluate is not None and self._is_evaluated(index + 1):
                at("evaluates the state behind", index)
                evaluated = evaluate(state)
            used = None if at_peak is None else at_peak / seconds
            speed = Speed.of(batch, seconds)
            held = peak * MIB or None
            self._record(StepRecord(index, loss, seconds, speed, waited, saving, others, evaluated, held, used))
            if what:
                del state  # beside it the other may not fit
                with told_of_memory(compiled.plan, "restoring the state"):
                    done, state = self.guard.back(what)
                self.say(f"step {index} is not finite: back to the state after {done} steps")
                index, went_back = done, True
            else:
                index += 1
            if stops:
                raise Stopped("", stops)
            if gives_up:
                self.guard.end(index - 1)
            if index < self.steps.stop:
                at(READS, index)
        at("ends behind", index - 1)  # what is left of a checkpoint is written
        return state

    def _is_saved(self, done: int, ends: int) -> bool:
        last = done == self.steps.stop
        return self.checkpoints is not None and bool(ends or last or self.checkpoints.is_due(done))

    def _is_evaluated(self, done: int) -> bool:
        return self.evaluation is not None and (done % self.evaluation.every == 0 or done == self.steps.stop)

    def _record(self, record: StepRecord) -> None:
        self.first, self.last = self.first or record, record
        self.seconds.append(record.seconds)
        self.skipped += int(record.metrics.get(SKIPPED, 0))
        for tracker in self.trackers:
            tracker.step(record)

    def _stopping(self) -> None:
        for tracker in self.begun:
            getattr(tracker, "stopping", lambda: None)()

    @contextmanager
    def _tracked(self, compiled: Compiled) -> Iterator[None]:
        def end(tracker: Tracker, error: BaseException | None) -> None:  # what it returns is nobody's
            tracker.end(error)

        with ExitStack() as stack:
            for tracker in self.trackers:
                tracker.begin(compiled, self.steps.start, self.steps.stop)
                stack.push(lambda kind, error, trace, tracker=tracker: end(tracker, error))
                self.begun.append(tracker)
            yield

    @contextmanager
    def _told(self) -> Iterator[None]:
        """An interrupt says what is saved, and what is lost."""
        try:
            yield
        except KeyboardInterrupt as stopped:
            kept = self.checkpoints
            done = self.steps.start if self.last is None else self.last.step + 1
            saved = (kept and kept.latest) or self.steps.start
            told = f"after step {done} of {self.steps.stop}; "
            if kept and done == saved and self.last is not None:
                told += f"its state is saved in {kept.folder}: go on with --resume"
            else:
                are = "is" if done - saved == 1 else "are"
                why = "no --checkpoint was given" if kept is None else "a second signal does not wait for one"
                told += f"{counted(done - saved, 'step')} of this run {are} in no checkpoint: {why}"
            raise Stopped(told, stopped.number if isinstance(stopped, Stopped) else signal.SIGINT) from None

    def _summed_up(self) -> None:
        assert self.first is not None
        assert self.last is not None
        told = f"loss {self.first.loss:.3f} -> {self.last.loss:.3f} in {counted(len(self.steps), 'step')}"
        told += f"; median step {1000 * statistics.median_high(self.seconds):.0f} ms"
        self.say(told + (f"; {counted(self.skipped, 'step')} skipped" if self.skipped else ""))


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


def _numbers(metrics: Any) -> tuple[float, dict[str, float]]:
    """The loss, and by name the other numbers beside it; arrays are no numbers."""
    named = metrics if isinstance(metrics, Mapping) else {"loss": metrics}
    numbers = {str(name): value for name, value in named.items() if isinstance(value, jax.Array) and not value.shape}
    found = {name: float(value) for name, value in fetch(numbers).items()}
    return found.pop("loss"), found
