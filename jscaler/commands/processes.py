"""The processes of a job: each joins the others before JAX sees a device, or one command starts all on its machine.

    jscaler train … --local-processes 2
        ├── jscaler train … --coordinator localhost:PORT --processes 2 --process 0     speaks for all
        └── jscaler train … --coordinator localhost:PORT --processes 2 --process 1

Who starts them watches: where one ends with an error, the others would wait for it in a collective, so they are ended too.
And they watch who starts them, who may be killed: then they end as on SIGTERM.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import jax
import typer

from jscaler.errors import DataError, DeviceError, ProcessError
from jscaler.runtime.watch import HUNG
from jscaler.training.signals import SIGNALLED, noted

PANEL = "Processes"  # of the help
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of process 0, where no launcher (Slurm, Open MPI, Kubernetes) says it", rich_help_panel=PANEL
    ),
]
Processes = Annotated[int | None, typer.Option(help="processes of the job", min=1, rich_help_panel=PANEL)]
Process = Annotated[int | None, typer.Option(help="the number of this one, from 0", min=0, rich_help_panel=PANEL)]
Distributed = Annotated[
    bool, typer.Option("--distributed", help="join the processes that a launcher has started", rich_help_panel=PANEL)
]
LocalDevices = Annotated[
    str | None,
    typer.Option(
        help="GPUs of its host that a process takes: all, or 0,1; under Slurm and Open MPI JAX gives it one, by its number",
        rich_help_panel=PANEL,
        metavar="all|0,1,…",
    ),
]
StartedBy = Annotated[int | None, typer.Option(hidden=True)]  # the process that has started this one, and watches it

JAX_WAITS = 100  # seconds until JAX takes a process for dead, by itself
GRACE = 5.0  # seconds that processes have to end by themselves, once one has
LINES = 12  # of what a process said at last
REASON = re.compile(r"ProcessError: (.*); process \d+ ends$", re.MULTILINE)
LOOKS = 1.0  # seconds between two looks at who has started a process


def join(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    distributed: bool,
    local_devices: str | None = None,
    hang_after: int = 0,
) -> None:
    """Join the other processes, where there are some. JAX must not have seen a device yet.

    Args:
        local_devices: the GPUs of its host that it takes: "all", or their numbers; None for what JAX thinks.
        hang_after: seconds after which somebody else notices that a process is gone, and says so: JAX waits for longer.

    Raises:
        DeviceError: they are not there, nobody says where, or JAX runs already.
    """
    if not distributed and coordinator is None:
        if local_devices is not None:
            raise DeviceError("--local-devices is of a process of a job: give --coordinator or --distributed too")
        if processes is not None or process is not None:
            raise DeviceError(
                f"--processes {processes} and --process {process} say nothing of where the others are: give --coordinator "
                "HOST:PORT too, or --distributed under a launcher"
            )
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # which takes SIGTERM, and ends nothing
    try:
        patience = max(JAX_WAITS, 2 * hang_after)
        jax.distributed.initialize(
            coordinator, processes, process, _numbers(local_devices), heartbeat_timeout_seconds=patience
        )
    except (ValueError, RuntimeError) as error:
        raise DeviceError(
            f"cannot join the processes of the job: {error}; start it under Slurm, Open MPI, Kubernetes or on Cloud TPU, "
            "or give --coordinator HOST:PORT --processes N --process I on every host"
        ) from None


def _numbers(local_devices: str | None) -> list[int] | None:
    """As JAX takes them: of none it is not asked to leave any out."""
    if local_devices is None:
        return None
    words = [] if local_devices == "all" else local_devices.split(",")
    if not all(word.isdecimal() for word in words):
        raise DeviceError(f"--local-devices is all, or numbers such as 0,1, and not {local_devices!r}")
    return [int(word) for word in words]


def end_with(starter: int | None) -> None:
    """End this process as SIGTERM does, behind a step that is saved, once the one that has started it is gone."""

    def look() -> None:
        while os.getppid() == starter:
            time.sleep(LOOKS)
        with suppress(OSError):  # who read it may be gone, too
            sys.stderr.write(f"the command that has started this process ({starter}) is gone\n")
            sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    if starter is not None:
        threading.Thread(target=look, daemon=True).start()


def devices_of_one(devices: int | None, processes: int | None) -> int | None:
    """How many of ``devices`` one of the processes has.

    Raises:
        DeviceError: they do not divide.
    """
    if devices is None or processes is None:
        return devices
    if devices % processes:
        raise DeviceError(f"{devices} devices are not shared by {processes} processes: give a multiple of {processes}")
    return devices // processes


@dataclass(frozen=True)
class _Started:
    number: int
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]

    @property
    def end(self) -> str:
        """How it has ended, in words; "" where it has not, or as it should."""
        code = self.process.poll()
        if not code:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_lines(self) -> str:
        self.said.seek(0)
        return "\n".join(self.said.read().decode(errors="replace").splitlines()[-LINES:])

    @property
    def reason(self) -> str:
        """Why a watch has ended it; "" where none has, or it has said so on the terminal, and not here."""
        found = REASON.search(self.last_lines()) if self.process.poll() == HUNG and self.number else None
        return found[1] if found else ""


def run_locally(count: int, restarts: int, words: Sequence[str], checkpoint: Path | None) -> None:
    """Start ``jscaler`` with ``words`` as ``count`` processes on this machine, and wait for them.

    Args:
        restarts: how often they are started again, from the last checkpoint, where one has failed.

    Raises:
        DataError: ``checkpoint`` holds the state of another run, from which ``words`` do not go on.
        ProcessError: one has failed, once more than that. Its exit code is theirs, where a watch has ended them.
        typer.Exit: a signal came, and all have ended as it asked; process 0 has said where.
    """
    if checkpoint is not None and not {"--resume", "--resume-if-any"} & set(words) and _has_state(checkpoint):
        raise DataError(f"there is a checkpoint in {checkpoint}: go on from it with --resume, or give another folder")
    for restart in range(restarts + 1):
        resumed = ["--resume-if-any"] if restart and checkpoint is not None else []
        with ExitStack() as stack:
            started = _start(count, [*words, *resumed], stack)
            failed = _watched(started)
            if failed is None:
                return
            ends = [one.process.poll() for one in started]
            hung = failed.process.poll() == HUNG
            reason = next(filter(None, (one.reason for one in started)), "it has said why") if hung else ""
            told = f"process {failed.number} of {count} {failed.end}; the others were ended"
            told += f": {reason}" if hung else ""
            lines = failed.last_lines() if failed.number and not hung else ""
        if restart == restarts:
            told += f", and said:\n{lines}" if lines else ""
            error = ProcessError(told if checkpoint is None else f"{told}\ngo on from the last checkpoint with --resume")
            if HUNG in ends and all(end is None or end <= 0 or end == HUNG for end in ends):  # none by an error of its own
                error.exit_code = HUNG
            raise error
        said = lines.rpartition("\n")[2]
        sys.stderr.write(f"{told}; restart {restart + 1} of {restarts}\n" + (f"it said: {said}\n" if said else ""))


def _has_state(folder: Path) -> bool:
    """Asked without Orbax, which would take this process a device."""
    return folder.is_dir() and any(path.name.isdecimal() for path in folder.iterdir())


def _start(count: int, words: Sequence[str], stack: ExitStack) -> list[_Started]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    found = []
    for number in range(count):
        own = ["--coordinator", f"localhost:{port}", "--processes", str(count), "--process", str(number)]
        own += ["--started-by", str(os.getpid())]
        said: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "jscaler", *words, *own], stdout=said if number else None,
            stderr=said if number else None, start_new_session=True,  # a Ctrl-C of the terminal comes once, from here
        )  # fmt: skip
        stack.callback(_end, process)
        found.append(_Started(number, process, said))
    return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _watched(started: Sequence[_Started]) -> _Started | None:
    """The first that fails; the others are given a moment to say why. A signal is handed on to all, and is no failure; a
    second one ends them at once."""
    asked: tuple[int, ...] = ()  # how those end that do as a signal asked: behind a step, or at once where they have none
    with _raising(signal.SIGTERM), noted(signal.SIGINT, signal.SIGTERM) as signals:
        while any(one.process.poll() is None for one in started):
            if signals and not asked:
                asked = SIGNALLED + signals[0], -signals[0]
                for one in started:
                    one.process.send_signal(signals[0])
            if _failed(started, asked):
                _wait(started)
                break
            time.sleep(0.05)
    failed = _failed(started, asked)
    if signals and not failed:
        raise typer.Exit(SIGNALLED + signals[0])
    return next(iter(failed), None)


@contextmanager
def _raising(number: int) -> Iterator[None]:
    """The signal is an exception: what it leaves is put in order, so no process stays behind."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _failed(started: Sequence[_Started], asked: Sequence[int]) -> list[_Started]:
    """Those that have ended and should not have, nor with an exit code that was ``asked`` for; one that was killed comes
    first, since others fail for want of it, and last those that a watch has ended."""
    found = (one for one in started if one.end and one.process.returncode not in asked)
    return sorted(found, key=lambda one: (one.process.returncode >= 0) + (one.process.returncode == HUNG))


def _wait(started: Sequence[_Started]) -> None:
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(one.process.poll() is None for one in started):
        time.sleep(0.05)


def without(words: Sequence[str], *options: str) -> list[str]:
    """A command's words without these options and their values."""
    found: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif word.partition("=")[0] not in options:
            found.append(word)
    return found
