"""A command in a pseudo-terminal of its own, where somebody may press Ctrl-C."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyte
from screens import shown

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0  # seconds that a command may take
START = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what somebody's background has started
runpy.run_module("jscaler", run_name="__main__", alter_sys=True)
"""
UNSET = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")  # which would speak for the terminal


class Ended(NamedTuple):
    """What a command has left on its terminal."""

    code: int
    lines: list[str]
    cursor_hidden: bool


def in_terminal(arguments: list[str], columns: int, rows: int, stop_at: bytes | None = None) -> Ended:
    """Run ``python -m jscaler``; press Ctrl-C once it has shown ``stop_at``."""
    settings = {name: value for name, value in os.environ.items() if name not in UNSET}
    settings |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    command = [sys.executable, "-c", START, *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings, start_new_session=True, cwd=ROOT
    ) as child:
        os.close(theirs)
        output = b""
        for part in _read(ours, child):
            output += part
            if stop_at is not None and stop_at in output:
                child.send_signal(signal.SIGINT)
                stop_at = None
    os.close(ours)
    assert stop_at is None, f"never shown: {stop_at!r} in {output!r}"
    screen = pyte.Screen(columns, rows)
    pyte.ByteStream(screen).feed(output)
    return Ended(child.returncode, shown(output, columns), screen.cursor.hidden)


def _read(terminal: int, child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What comes until the command has ended; one that takes too long is ended."""
    until = time.monotonic() + PATIENCE
    while True:
        if not select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0]:
            child.kill()
            return
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            return
        if not part:
            return
        yield part
