"""A watch over the processes of a job: where one is gone, stopped or stuck, all others end, and say which and where.

::

    process 1 ──"runs step 12, for 0.3 s"──►  process 0  ──where it is, and what is wrong──►  process 1
    process 2 ─────────────────────────────►  judges     ────────────────────────────────►  process 2

Process 0 judges for all, once, and ends last: else who ends first would be the reason that the others give.
A process that waits for another in a collective cannot speak, nor be interrupted; a thread beside it can. JAX's own
heartbeat finds the dead, too, later, and ends a process without a word of which and where.
"""

import atexit
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

import jax
import numpy as np
from jax.experimental import multihost_utils

from jscaler.errors import BlockError, StateLostError, check_count

HUNG = 75  # the exit code: try again
RUNS, READS = "runs", "reads a batch for"  # what a process does for a step; all else may take as long as it wants
LEAVING = 3.0  # seconds that who ends waits for others to hear it


@dataclass(frozen=True)
class Beat:
    """What a process says of itself.

    Attributes:
        doing: in words.
        step: for which step; None before the first.
        seconds: since when; where it has failed, since then.
        failed: the error that ends it.
        left: whether it has ended, as it should or not.
    """

    doing: str = "starts"
    step: int | None = None
    seconds: float = 0.0
    failed: str = ""
    left: bool = False

    @property
    def where(self) -> str:
        return self.doing if self.step is None else f"{self.doing} step {self.step}"


@dataclass(frozen=True)
class Heard:
    """The last that was heard of a process, how many seconds ago, and whether its connection is gone."""

    beat: Beat = field(default_factory=Beat)
    silent: float = 0.0
    gone: bool = False


def verdict(heard: Mapping[int, Heard], limit: float) -> str:
    """What is wrong with a job of these processes, in a sentence; "" where nothing is.

    Args:
        limit: seconds that a process may be silent, or all may take for one step.
    """
    there = {number: one for number, one in heard.items() if not one.beat.left}
    for number, one in there.items():  # before those that fail for want of it
        if one.gone:
            return f"process {number} has gone ({one.beat.where})"
    for number, one in there.items():
        if one.silent > limit:
            return f"process {number} is silent for {one.silent:.0f} s ({one.beat.where}): it was stopped, or is cut off"
    failed = [(one.silent + one.beat.seconds, number) for number, one in heard.items() if one.beat.failed]
    if failed:
        beat = heard[first := max(failed)[1]].beat
        return f"process {first} has failed ({beat.where}): {beat.failed}"
    if there and all(one.beat.doing in (RUNS, READS) and one.beat.seconds > limit for one in there.values()):
        late = {number: one for number, one in there.items() if one.beat.doing != RUNS} or there
        who = ", ".join(f"process {number} {one.beat.where} for {one.beat.seconds:.0f} s" for number, one in late.items())
        return f"no process goes on: {who}; where steps take as long, give a longer --hang-after"
    return ""


class Watch:
    """``with Watch(seconds) as watch``: while it is open, this process ends where the job hangs. Alone it does nothing.

    Args:
        limit: seconds that a process may be silent, or all may take for one step.
        end: what ends this process, given the sentence and an exit code.

    Raises:
        PlanError: when it is made: the limit is no number of seconds, from 1.
    """

    def __init__(self, limit: int, end: Callable[[str, int], None] | None = None):
        self.limit = check_count("watch: limit", limit)
        self._every = min(1.0, self.limit / 10)
        self._end = end or _end
        self._beat, self._since = Beat(), time.monotonic()
        self._heard: dict[int, tuple[Beat, float, bool]] = {}  # by process 0: what, when, whether gone
        self._told = ""  # what is wrong with the job, once that is known
        self._lock, self._leaving, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def at(self, doing: str, step: int | None = None) -> None:
        """Say what this process does now."""
        with self._lock:
            self._beat, self._since = Beat(doing, step), time.monotonic()

    def __enter__(self) -> "Watch":
        if jax.process_count() > 1:
            server, places, key = self._meet()
            if server is not None:
                self._start(self._accept, server, key)
                self._start(self._judge)
            else:
                self._start(self._speak, places, key, jax.process_index())
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        failed = f"{type(error).__name__}: {error}".splitlines()[0] if isinstance(error, Exception) else ""
        if failed and self._threads and may_be_for_want_of_another(error):
            self._closing.wait(2 * self._every)  # where another one is the cause, this one ends with its name
        if failed and self._told:
            time.sleep(LEAVING)  # until this one ends so
        with self._lock:
            self._since = time.monotonic() if failed else self._since
            self._beat = replace(self._beat, failed=failed, left=True)
        self._leaving.set()
        if failed and self._threads:
            end_soon()
        until = time.monotonic() + (LEAVING if failed else self.limit)
        while self._threads and time.monotonic() < until and not self._all_left():
            time.sleep(0.05)  # others hear it from here
        self._closing.set()
        if self._heard and failed:
            time.sleep(2 * self._every)

    def _meet(self) -> tuple[socket.socket | None, list[tuple[str, int]], bytes]:
        """Process 0 says where it listens, by all names that it may have, and the word that who comes must know."""
        server, said = None, np.zeros(256, np.uint8)
        if jax.process_index() == 0:
            server = socket.create_server(("", 0), backlog=jax.process_count())
            text = f"{secrets.token_hex(16)} {server.getsockname()[1]}".encode()
            for address in _addresses():
                text += f" {address}".encode() if len(text) + len(address) < len(said) else b""
            said[: len(text)] = list(text)
        key, port, *hosts = bytes(multihost_utils.broadcast_one_to_all(said)).rstrip(b"\0").decode().split()
        return server, [(host, int(port)) for host in hosts], key.encode()

    def _start(self, run: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=run, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _own(self) -> Beat:
        with self._lock:
            return replace(self._beat, seconds=time.monotonic() - self._since)

    def _all_left(self) -> bool:
        """Whether nobody has to hear of it any more."""
        if jax.process_index():
            return self._closing.is_set()
        return all(beat.left or gone for beat, _, gone in list(self._heard.values()))

    def _table(self) -> dict[int, Heard]:
        now = time.monotonic()
        found = {number: Heard(beat, now - at, gone) for number, (beat, at, gone) in list(self._heard.items())}
        return {0: Heard(self._own()), **found}

    def _judged(self) -> str:
        """What is wrong, as process 0 has seen it first: who ends then is no other reason."""
        table = self._table()
        with self._lock:
            self._told = self._told or verdict(table, self.limit)
            return self._told

    def _end_for(self, told: str) -> None:
        """End this process, unless it ends anyway, with an error of its own."""
        if not self._closing.is_set() and not self._own().failed:
            self._told = told
            self._end(told, HUNG)

    def _judge(self) -> None:
        """Process 0's own look at what it has heard."""
        while not self._closing.wait(self._every):
            if told := self._judged():
                self._closing.wait(2 * self._every)  # the others hear it
                self._end_for(told)

    def _accept(self, server: socket.socket, key: bytes) -> None:
        server.settimeout(1.0)
        with server:
            while not self._closing.is_set():
                try:
                    came, _ = server.accept()
                except OSError:
                    continue
                came.setblocking(True)
                self._start(self._listen, Connection(came.detach()), key)

    def _listen(self, connection: Connection, key: bytes) -> None:
        """Hear one of the others, and answer with where this one is, and what is wrong."""
        number, beat = 0, Beat()
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            while True:
                number, beat = connection.recv()
                self._heard[number] = beat, time.monotonic(), False
                told = self._judged()
                connection.send((Heard(self._own()), told))
        except AuthenticationError:  # of whoever else knocks
            return
        except (EOFError, OSError):
            if number:
                self._heard[number] = beat, time.monotonic(), True

    def _speak(self, places: Sequence[tuple[str, int]], key: bytes, own: int) -> None:
        """Tell process 0 where this one is, and end where it says that something is wrong, or says nothing any more."""
        connection = next(filter(None, (_connected(place, key) for place in places)), None)
        if connection is None:
            hosts = ", ".join(host for host, _ in places)
            sys.stderr.write(
                f"process {own} cannot reach process 0 at {hosts}: nobody notices where one of the two hangs\n"
            )
            self._closing.set()
            return
        leader = Heard()
        try:
            while True:
                beat = self._own()
                connection.send((own, beat))
                if not connection.poll(self.limit):
                    self._end_for(verdict({0: replace(leader, silent=self.limit + 1)}, self.limit))
                    return
                leader, told = connection.recv()
                if told:
                    self._end_for(told)
                if beat.left:
                    self._closing.set()
                    return
                self._leaving.wait(self._every)
        except (EOFError, OSError):
            if told := verdict({0: replace(leader, gone=True)}, self.limit):
                self._end_for(told)
            self._closing.set()


def may_be_for_want_of_another(error: object) -> bool:
    """Whether an error, or what is behind it (a state that could not be gathered to be saved), is of the devices.

    Of CPUs' collectives outside of a step it is a ValueError.
    """
    while isinstance(error, BaseException):
        if isinstance(error, jax.errors.JaxRuntimeError | BlockError | StateLostError) or "Gloo" in str(error):
            return True
        error = error.__cause__
    return False


def _connected(place: tuple[str, int], key: bytes) -> Connection | None:
    try:
        return Client(place, authkey=key)  # type: ignore[return-value]
    except (OSError, EOFError, AuthenticationError):
        return None


def _addresses() -> list[str]:
    """Of this host, as others may reach it: that of the way out, those of its name, and this machine's own."""
    found = list[str]()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect(("192.0.2.1", 9))  # nothing is sent
        found.append(out.getsockname()[0])
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*(one for one in found if not one.startswith("127.")), "127.0.0.1"]))


def end_soon() -> None:
    """Have this process, which ends with an error, end without the others: at its end JAX waits for them, and those wait
    for this one, or have ended for want of it."""

    def end() -> None:
        ending = threading.Timer(LEAVING, os._exit, [1])
        ending.daemon = True
        ending.start()

    atexit.register(end)


def _end(told: str, code: int) -> None:
    """The main thread may wait for ever in a collective: nothing but this ends it."""
    shown = "\033[?25h" if sys.stderr.isatty() else ""  # the cursor, which a progress bar hides
    sys.stderr.write(f"{shown}\nerror: ProcessError: {told}; process {jax.process_index()} ends\n")
    sys.stderr.flush()
    os._exit(code)
