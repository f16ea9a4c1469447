"""``Timeline``: what ran, or would run, on which devices and when; simulated or measured."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jscaler.errors import PlanError, shown
from jscaler.tables.table import TableCell
from jscaler.text.device_list import devices_text
from jscaler.text.tables import aligned
from jscaler.text.units import readable_bytes, readable_seconds

Devices = tuple[int, ...]


@dataclass(frozen=True)
class TimedRun:
    """A run of a block on all of ``devices``, from ``begin`` to ``end`` in seconds.

    Attributes:
        name: of the block; its ``cells`` of the table say more, where it has any.
        waits: how long it has waited for a send, with its devices free.
    """

    devices: Devices
    name: str
    cells: tuple[TableCell, ...]
    begin: float
    end: float
    waits: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class TimedSend:
    """A value on its way from ``source`` to ``target``.

    Attributes:
        nbytes: of all devices.
    """

    source: Devices
    target: Devices
    name: str
    microbatch: int | None
    begin: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """A step in time.

    Attributes:
        name: of the step or its schedule.
        runs: each run of a block: devices, begin and end in seconds.
        sends: each value on its way from devices to devices.
        memory: the devices that hold alike -> times, in order, and the bytes that each device holds from then on.
        capacity: the same devices -> bytes that each has; 0 where that is not known.
        exposed: seconds by which the step is longer than if sends took none; 0 where that is not known.

    Example:
        >>> timeline = jscaler.simulate(lowered, "4xH100-80GB")
        >>> timeline.devices, timeline.alike, len(timeline.by_device[0])
        ([0, 1, 2, 3], [(0, 1, 2, 3)], 1)
        >>> timeline.busy(0) == timeline.makespan, timeline.bubble  # seconds; a share of them
        (True, 0.0)
        >>> timeline.peak(0) > 0, timeline.fits, timeline.as_json()["fits"]  # bytes
        (True, True, True)
    """

    name: str
    runs: tuple[TimedRun, ...]
    sends: tuple[TimedSend, ...] = ()
    memory: Mapping[Devices, Sequence[tuple[float, int]]] = field(default_factory=dict, repr=False)
    capacity: Mapping[Devices, int] = field(default_factory=dict, repr=False)
    exposed: float = 0.0

    @property
    def makespan(self) -> float:
        """Seconds from the beginning to the end of the last run."""
        return max((one.end for one in self.runs), default=0.0)

    @functools.cached_property
    def by_device(self) -> dict[int, list[TimedRun]]:
        """The runs of each device, in order."""
        found: dict[int, list[TimedRun]] = {}
        for one in sorted(self.runs, key=lambda one: one.begin):
            for device in one.devices:
                found.setdefault(device, []).append(one)
        return found

    @property
    def devices(self) -> list[int]:
        """All devices, in order."""
        return sorted(self.by_device)

    def busy(self, device: int) -> float:
        """Seconds in which a device runs blocks.

        Args:
            device: its number.
        """
        return sum(one.seconds for one in self.by_device[device])

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they run nothing."""
        whole = len(self.devices) * self.makespan
        return 1 - sum(one.seconds * len(one.devices) for one in self.runs) / whole if whole else 0.0

    def peak(self, device: int) -> int:
        """The most bytes that a device holds.

        Args:
            device: its number.
        """
        return max((n for own, states in self.memory.items() if device in own for _, n in states), default=0)

    @property
    def fits(self) -> bool | None:
        """Whether each device holds no more than it has; None where that is not known."""
        if not self.memory or not all(self.capacity.get(own) for own in self.memory):
            return None
        return all(self.peak(own[0]) <= self.capacity[own] for own in self.memory)

    def as_json(self) -> dict[str, Any]:
        """Figures as numbers, strings, lists and dicts; the runs themselves are for `jscaler.write_trace`."""
        devices = [{"devices": list(own), "busy": self.busy(own[0]), "peak": self.peak(own[0])} for own in self.alike]
        figures = {"makespan": self.makespan, "bubble": self.bubble, "exposed": self.exposed, "fits": self.fits}
        return {"name": self.name, **figures, "devices": devices}

    def __str__(self) -> str:
        exposed = f", sends show {readable_seconds(self.exposed)}" if self.sends else ""
        lines = [f"{self.name}: {readable_seconds(self.makespan)}, of which devices wait {self.bubble:.1%}{exposed}"]
        rows = [("devices", "busy", "waiting", "of that for sends", "memory")]
        for own in self.alike:
            busy = self.busy(own[0])
            late = sum(one.waits for one in self.by_device[own[0]])
            peak = readable_bytes(self.peak(own[0])) if self.memory else ""
            waiting = readable_seconds(self.makespan - busy)
            rows.append((devices_text(own), readable_seconds(busy), waiting, readable_seconds(late), peak))
        return "\n".join([*lines, *aligned(rows)])

    @property
    def alike(self) -> list[Devices]:
        """The devices that run the same blocks, in order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for device, runs in sorted(self.by_device.items()):
            found.setdefault(tuple(map(id, runs)), []).append(device)
        return [tuple(own) for own in found.values()]


def check_timeline(function: str, timeline: Any) -> Timeline:
    """``timeline``; raises PlanError where it is none."""
    if isinstance(timeline, Timeline):
        return timeline
    raise PlanError(
        f"{function} takes a timeline, as jscaler.simulate(lowered, cluster) or compiled.trace(…)[1] gives it, not "
        f"{shown(timeline)}"
    )
