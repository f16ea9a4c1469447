"""Who is told of a run, step by step: a log of JSON lines, TensorBoard, a profiler, or what a user writes."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import jax

from jscaler.errors import JscalerError
from jscaler.report.written import as_path, writing, written_whole
from jscaler.runtime.compiled import Compiled
from jscaler.training.records import StepRecord


@runtime_checkable
class Tracker(Protocol):
    """What `jscaler.train` tells of a run; in a job of several processes, process 0 alone.

    One that has a method ``stopping`` is called where a signal came, and the step that runs is waited for.

    Example:
        >>> class Losses:
        ...     def begin(self, compiled, start, steps):
        ...         self.found = []
        ...     def step(self, record):
        ...         self.found.append(record.loss)
        ...     def end(self, error):
        ...         pass
        >>> isinstance(Losses(), jscaler.Tracker)
        True
    """

    def begin(self, compiled: Compiled, start: int, steps: int) -> None:
        """The step is compiled; steps ``start`` to ``steps`` - 1 follow.

        Args:
            compiled: its plan, programs and memory can be asked for.
            start: the first step of this run, above 0 where it is resumed.
            steps: of the whole run.
        """

    def step(self, record: StepRecord) -> None:
        """A step was taken. Where a run goes back to a checkpoint, the same numbers come again.

        Args:
            record: what is known of it.
        """

    def end(self, error: BaseException | None) -> None:
        """The run is over.

        Args:
            error: what has ended it early; None where it is done.
        """


class JsonLines(Tracker):
    """A tracker: one line of JSON for each step, and beside them, in ``LOG.run``, the plan and the devices.

    A resumed run goes on behind the steps that its checkpoint has. ``jscaler runs`` compares logs.

    Args:
        path: of the file.
        about: more that is written beside them: what tells this run from others.

    Raises:
        JscalerError: ``about`` is no data.
        OutputError: when the run begins, or at a step: it cannot be written.

    Example:
        >>> log = jscaler.JsonLines(folder / "log")
        >>> log.begin(compiled, 0, 2), log.step(jscaler.StepRecord(0, 0.5, 0.1, jscaler.Speed("rows", 80.0))), log.end(None)
        (None, None, None)
        >>> state = jscaler.train(job, "zero3", 2, devices=4, say=lambda _: None, trackers=[log])
        >>> [json.loads(line)["step"] for line in (folder / "log").read_text().splitlines()]
        [0, 1]
    """

    def __init__(self, path: Path | str, about: Mapping[str, Any] | None = None):
        self.path, self.about = as_path("log", path), dict(about or {})
        try:
            json.dumps(self.about)
        except (TypeError, ValueError) as error:
            raise JscalerError(f"JsonLines: about is written as JSON, and holds something else: {error}") from None
        self._file: BinaryIO | None = None

    def begin(self, compiled: Compiled, start: int, steps: int) -> None:
        with writing("log", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if start and self.path.exists():  # steps that come again are taken away
                kept = _before(self.path, start)
                with written_whole("log", self.path) as half:
                    half.write_bytes(b"".join(kept))
            self._file = self.path.open("ab" if start else "wb", buffering=0)  # a line is there when it is written
        if self.path.is_file():  # and no pipe
            with written_whole("log", beside(self.path)) as half:
                half.write_text(json.dumps(_about(compiled) | self.about) + "\n", encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        assert self._file is not None, "a tracker is told of a beginning first"
        with writing("log", self.path):
            self._file.write(json.dumps(record.as_json()).encode() + b"\n")

    def end(self, error: BaseException | None) -> None:
        if self._file is not None:
            self._file.close()


def beside(log: Path) -> Path:
    """Where a log's plan and devices stand."""
    return log.with_name(f"{log.name}.run")


def _about(compiled: Compiled) -> dict[str, Any]:
    plan, devices = compiled.plan.plan, compiled.lowered.devices
    kinds = dict.fromkeys(device.device_kind for device in devices)
    versions = {"jscaler": metadata.version("jscaler"), "jax": jax.__version__}
    about = {"plan": plan.name, "devices": plan.num_devices, "device": ", ".join(kinds)}
    return about | {"processes": jax.process_count(), **versions}


def _before(path: Path, start: int) -> list[bytes]:
    """The whole lines of a log that are of steps before ``start``; the last one may be half written."""
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            known = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if known < start:
            found.append(line)
    return found


class Profile(Tracker):
    """A tracker: what ``jax.profiler`` sees of some steps, for XProf, TensorBoard's profiler or Perfetto.

    Args:
        steps: the first, and the one behind the last.
        folder: where it is written.

    Raises:
        JscalerError: there is no step between both; when the run begins: it ends before them. (One that goes on behind them
            was seen before, and is not seen again.)
        OutputError: when it begins or ends: it cannot be written.

    Example:
        >>> seen = jscaler.Profile((1, 3), folder / "profile")
        >>> record = jscaler.StepRecord(0, 0.5, 0.1, jscaler.Speed("rows", 80.0))
        >>> seen.begin(compiled, 0, 4), seen.step(record), seen.end(None)
        (None, None, None)
        >>> sum(path.name.endswith(".xplane.pb") for path in (folder / "profile").rglob("*"))
        1
    """

    def __init__(self, steps: tuple[int, int], folder: Path | str):
        if not (len(steps) == 2 and all(isinstance(n, int) for n in steps) and 0 <= steps[0] < steps[1]):
            raise JscalerError(f"a profile is of steps (FROM, TO), with FROM below TO, and not of {steps}")
        self.first, self.behind = steps
        self.folder = as_path("profile", folder)
        self._on = self._done = False

    def begin(self, compiled: Compiled, start: int, steps: int) -> None:
        if self.first >= steps:
            told = f"the run has steps 0 to {steps - 1}, and none of {self.first} to {self.behind - 1}"
            raise JscalerError(f"there is nothing to profile: {told}; give steps that it has, or leave the profile out")
        self._before(start)

    def step(self, record: StepRecord) -> None:
        if record.step + 1 >= self.behind:
            self.end(None)
        self._before(record.step + 1)

    def end(self, error: BaseException | None) -> None:
        if self._on:
            self._on, self._done = False, True
            with writing("profile", self.folder):
                jax.profiler.stop_trace()

    def _before(self, step: int) -> None:
        if not self._on and not self._done and self.first <= step < self.behind:
            with writing("profile", self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                jax.profiler.start_trace(self.folder)
            self._on = True


class TensorBoard(Tracker):
    """A tracker: events that TensorBoard shows, one scalar for each number of a record.

    Args:
        folder: where they are written.

    Raises:
        JscalerError: tensorboardX is not installed: ``pip install "jscaler[tensorboard]"``.
        OutputError: when the run begins, or at a step: they cannot be written.

    Example:
        >>> events = jscaler.TensorBoard(folder / "tb")
        >>> record = jscaler.StepRecord(0, 0.5, 0.1, jscaler.Speed("rows", 80.0))
        >>> events.begin(compiled, 0, 2), events.step(record), events.end(None)
        (None, None, None)
        >>> [path.name.split(".")[0] for path in (folder / "tb").iterdir()]
        ['events']
    """

    def __init__(self, folder: Path | str):
        try:
            import tensorboardX  # noqa: F401
        except ImportError:
            missing = 'events for TensorBoard need tensorboardX, which is not installed: pip install "jscaler[tensorboard]"'
            raise JscalerError(missing) from None
        self.folder = as_path("events", folder)
        self._writer: Any = None

    def begin(self, compiled: Compiled, start: int, steps: int) -> None:
        # not its SummaryWriter: that writes in a thread, and where the disk is full it waits for ever
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        with writing("events", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self.folder / "events"))
            self._write(start, session_log=SessionLog(status=SessionLog.START))  # later ones are of an earlier run

    def step(self, record: StepRecord) -> None:
        from tensorboardX.summary import scalar

        values = {name: value for name, value in record.as_json().items() if name != "step" and value is not None}
        with writing("events", self.folder):
            for name, value in values.items():
                self._write(record.step, summary=scalar(name, value))
            self._writer.flush()

    def end(self, error: BaseException | None) -> None:
        if self._writer is not None:
            with suppress(OSError):  # all is flushed, or was said
                self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self._writer.write_event(Event(wall_time=time.time(), step=step, **what))
