"""Logs of runs, to be compared: what `JsonLines` has written, read again."""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jscaler.errors import DataError
from jscaler.training.trackers import beside

EVALUATION = "evaluation/"
SPEEDS = ("tokens_per_second", "rows_per_second", "utilisation")
STANDING = ("waited", "saving")
OF_LOGS = ("run", "steps", "loss", "lowest_loss", "seconds", *SPEEDS, *STANDING, "peak_bytes")  # whatever else is said


@dataclass(frozen=True)
class RunLog:
    """A run's log.

    Attributes:
        name: its path, from the folder in which it was looked for.
        about: the plan and devices, where that was written beside it.
        rows: a record's plain data for each step, in their order; of a step that was taken again, the last.
    """

    name: str
    about: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def values(self, name: str) -> list[tuple[int, float]]:
        """The steps whose records have a number of this name, and the number."""
        return [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]

    def as_json(self) -> dict[str, Any]:
        """What is told of it, as plain data; what its log does not say is left out."""
        losses = [loss for _, loss in self.values("loss")]
        last = self.rows[-1]["loss"]
        seconds = [value for _, value in self.values("seconds")]
        found: dict[str, Any] = {"run": self.name, **{k: v for k, v in self.about.items() if k not in OF_LOGS}}
        found |= {"steps": self.rows[-1]["step"] + 1, "loss": "not finite" if last is None else last}
        found["lowest_loss"] = min(losses, default=None)
        found["seconds"] = statistics.median(seconds) if seconds else None
        for speed in SPEEDS:
            if numbers := [value for _, value in self.values(speed)]:
                found[speed] = statistics.median(numbers)
        whole = sum(seconds)
        for still in STANDING:
            lost = sum(value for _, value in self.values(still))
            found[still] = lost / (whole + lost) if whole else None  # of the time for both
        if peaks := [value for _, value in self.values("peak_bytes")]:
            found["peak_bytes"] = max(peaks)
        evaluated = [row for row in self.rows if any(key.startswith(EVALUATION) for key in row)]
        found |= {key: value for key, value in (evaluated[-1] if evaluated else {}).items() if key.startswith(EVALUATION)}
        return {key: value for key, value in found.items() if value is not None}


def run_logs(path: Path) -> list[RunLog]:
    """The log at ``path``, or all that are in this folder and those in it, by name.

    Raises:
        DataError: there is none.
    """
    if not path.exists():
        raise DataError(f"there is no log, and no folder of logs, at '{path}'")
    found = [path] if path.is_file() else path.rglob("*")
    files = sorted(one for one in found if one.is_file() and not one.name.startswith("."))
    root = path.parent if path.is_file() else path
    if path.is_file() and not os.access(path, os.R_OK):
        raise DataError(f"the log '{path}' cannot be read: no permission")
    found = [RunLog(str(file.relative_to(root)), _about(file), rows) for file in files if (rows := list(_rows(file)))]
    if not found:
        raise DataError(f"no log of a run is in '{path}': jscaler train --log FILE and jscaler.JsonLines write them")
    return found


def _about(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(beside(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a log; nothing of a file that is none, or cannot be read. Its last line may be half written."""
    rows: dict[int, Mapping[str, Any]] = {}
    try:
        with path.open("rb") as file:
            for line in file:
                if (row := _row(line)) is not None:
                    rows[row["step"]] = row
                elif not rows:
                    return
    except OSError:
        return
    yield from (rows[step] for step in sorted(rows))


def _row(line: bytes) -> Mapping[str, Any] | None:
    """The numbers of a record; None of a line that is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = {k: v for k, v in row.items() if v is None or type(v) in (int, float)} if isinstance(row, dict) else {}
    return numbers if isinstance(numbers.get("step"), int) and "loss" in numbers else None
