"""A timeline as a file for https://ui.perfetto.dev or chrome://tracing, in the Trace Event Format (JSON)."""

import json
import os
from collections.abc import Iterator
from typing import Any

from jscaler.report.written import as_path, writing
from jscaler.tables.timeline import TimedSend, Timeline, check_timeline

MICRO = 1e6  # the format's unit is a microsecond
LINKS = 1_000_000  # the process that has the links as its threads


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events of a timeline: a process for each device, a slice for each run of a block, and of each send a slice on its
    link with an arrow from the run behind which it began to the one that waited for it; a device's memory as a counter."""
    events = [_meta("process_name", device, 0, f"device {device}") for device in timeline.devices]
    for one in timeline.runs:
        kinds = "+".join(dict.fromkeys(cell.kind for cell in one.cells))
        args = {"cells": " ".join(map(str, one.cells)), "waited for sends": one.waits}
        name = ";".join(map(str, one.cells)) or one.name
        events += [_slice(name, kinds or "other", device, 0, one.begin, one.end, args) for device in one.devices]
    events += _links(timeline)
    for own, states in timeline.memory.items():
        events += [
            {"name": "memory", "ph": "C", "pid": device, "ts": begin * MICRO, "args": {"bytes": nbytes}}
            for begin, nbytes in states
            for device in own
        ]
    return events


def write_trace(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write a timeline for Perfetto (https://ui.perfetto.dev), as JSON.

    Args:
        path: of the file.
        timeline: what `simulate` or ``compiled.trace`` has given.

    Raises:
        OutputError: the file cannot be written.
        PlanError: ``timeline`` is none.

    Example:
        >>> jscaler.write_trace("step.json", jscaler.simulate(lowered, "4xH100-80GB"))
    """
    target = as_path("trace", path)
    check_timeline("write_trace", timeline)
    text = json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"})
    with writing("trace", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _links(timeline: Timeline) -> Iterator[dict[str, Any]]:
    links = {ends: number for number, ends in enumerate(dict.fromkeys((s.source, s.target) for s in timeline.sends))}
    if links:
        yield _meta("process_name", LINKS, 0, "links")
    for (source, target), number in links.items():
        yield _meta("thread_name", LINKS, number, f"{list(source)} to {list(target)}")
    for number, send in enumerate(timeline.sends):
        args = {"bytes": send.nbytes, "micro-batch": send.microbatch}
        yield _slice(send.name, "send", LINKS, links[send.source, send.target], send.begin, send.end, args)
        before, behind = _ends(timeline, send)
        if before is not None and behind is not None:
            arrow = {"name": "send", "cat": "send", "id": number, "tid": 0}
            yield arrow | {"ph": "s", "pid": send.source[0], "ts": before * MICRO}
            yield arrow | {"ph": "f", "bp": "e", "pid": send.target[0], "ts": behind * MICRO}


def _ends(timeline: Timeline, send: TimedSend) -> tuple[float | None, float | None]:
    """Within which runs an arrow begins and ends: the last before the send, and the first behind it."""
    runs = timeline.by_device
    before = [one for one in runs.get(send.source[0], ()) if one.begin <= send.begin]
    behind = [one for one in runs.get(send.target[0], ()) if one.begin >= send.end]
    return (before[-1].begin if before else None), (behind[0].begin if behind else None)


def _slice(
    name: str, category: str, process: int, thread: int, begin: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": begin * MICRO, "dur": (end - begin) * MICRO}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **times, "args": args}


def _meta(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
