"""XLA's own account of a compiled program's memory: which buffers it allocates, who lies in them, and from when to when.

JAX hands out totals only. With the compiler option ``xla_dump_to`` XLA writes its buffer assignment and its live ranges
into a folder, as text; this module reads them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jscaler.errors import JscalerError

AllocationKind = Literal["argument", "output", "constant", "temporary"]
_HEAD = "after_optimizations"
_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*)")
_VALUE = re.compile(
    r" value: <\d+ (?P<name>\S+?)(?P<index>\{[\d,]*\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>\S+)"
)
_RANGE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


@dataclass(frozen=True)
class BufferValue:
    """An array of the program in a buffer.

    Attributes:
        instruction: the HLO instruction that makes it; of a loop, also the loop's or its body's parameter.
        index: where in the instruction's tuple; () for an array.
        offset, size: its bytes in the allocation.
        shape: as in HLO, ``bf16[8,2048]``.
        start, stop: the first and the last position of the schedule at which it is held.
    """

    instruction: str
    index: tuple[int, ...]
    offset: int
    size: int
    shape: str
    start: int
    stop: int


@dataclass(frozen=True)
class Allocation:
    """A buffer.

    Attributes:
        parameter: the number of the program's argument that lies in it, for kind ``argument``.
    """

    kind: AllocationKind
    size: int
    parameter: int | None
    values: tuple[BufferValue, ...]


@dataclass(frozen=True)
class Dump:
    """What XLA wrote about one program: its optimized HLO and its buffers."""

    text: str
    allocations: tuple[Allocation, ...]

    def size(self, kind: AllocationKind) -> int:
        """Bytes of all allocations of a kind."""
        return sum(a.size for a in self.allocations if a.kind == kind)

    @property
    def peak(self) -> int:
        """Bytes that are allocated while the program runs: XLA reserves all of them at once."""
        return sum(a.size for a in self.allocations)


def dump_options(folder: Path) -> dict[str, str | bool]:
    """The compiler options with which XLA writes what ``read_dump`` reads."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def read_dump(folder: Path) -> Dump:
    """What XLA wrote about the largest program compiled into ``folder``.

    Raises:
        JscalerError: it wrote nothing there.
    """
    found = sorted(folder.glob(f"*{_HEAD}-buffer-assignment.txt"), key=lambda p: p.stat().st_size)
    if not found:
        raise JscalerError(
            f"XLA wrote no buffer assignment into {folder}; if JAX's persistent compilation cache is on, it gave back an "
            "executable without compiling: set jax.config.update('jax_enable_compilation_cache', False)"
        )
    stem = found[-1].name.removesuffix("-buffer-assignment.txt")
    assignment, ranges = ((folder / f"{stem}-{what}.txt").read_text() for what in ("buffer-assignment", "live-range"))
    return Dump((folder / f"{stem}.txt").read_text(), parse_allocations(assignment, ranges))


def parse_allocations(assignment: str, ranges: str) -> tuple[Allocation, ...]:
    """The allocations in the text of a buffer assignment, without those that stay on a core; ``ranges`` says how long."""
    live = {(m[1], m[2]): (int(m[3]), int(m[4])) for m in map(_RANGE.match, ranges.splitlines()) if m}
    found: list[tuple[int, str, list[BufferValue]]] = []
    for line in assignment.splitlines():
        if head := _ALLOCATION.match(line):
            found.append((int(head[1]), head[2], []))
        elif found and (match := _VALUE.match(line)):
            found[-1][2].append(_value(match, live))
    return tuple(
        Allocation(_kind(said), size, int(number[1]) if (number := _PARAMETER.search(said)) else None, tuple(values))
        for size, said, values in found
        if "thread-local" not in said
    )


_PARAMETER = re.compile(r"\bparameter (\d+)")


def _kind(said: str) -> AllocationKind:
    if _PARAMETER.search(said):
        return "argument"
    if "constant" in said:
        return "constant"
    return "output" if "live-out" in said or "output shape" in said else "temporary"


def _value(match: re.Match[str], live: dict[tuple[str, str], tuple[int, int]]) -> BufferValue:
    index = match["index"] or "{}"
    start, stop = live.get((match["name"], index), (0, -1))  # what never lies in memory of its own has no range
    numbers = tuple(int(i) for i in index[1:-1].split(",") if i)
    shape = "tuple" if match["shape"].startswith("(") else re.sub(r"\{.*", "", match["shape"])  # a table of addresses
    return BufferValue(match["name"], numbers, int(match["offset"]), int(match["size"]), shape, start, stop)


@dataclass(frozen=True)
class HeldBuffer:
    """A value and the bytes that it alone stands for at one moment."""

    value: BufferValue
    nbytes: int


def fullest(allocation: Allocation) -> list[HeldBuffer]:
    """What lies in an allocation at the moment when most of it is in use, the largest first.

    Values that share bytes then (a result made in place of its operand) count once, for the one made last.
    """
    bounds, events = _events(allocation.values)
    if not events:
        return []
    widths, count = np.diff(bounds), np.zeros(len(bounds) - 1, np.int64)
    best, moment, used = -1, 0, 0
    for position, opening, first, last in events:
        part = count[first:last]
        used += int(widths[first:last][part == (0 if opening else 1)].sum()) * (1 if opening else -1)
        part += 1 if opening else -1
        if opening and used > best:
            best, moment = used, position
    return _shares([v for v in allocation.values if v.start <= moment <= v.stop], bounds)


def _events(values: Sequence[BufferValue]) -> tuple[np.ndarray, list[tuple[int, bool, int, int]]]:
    """The offsets at which values begin or end; and when each is opened and closed, between which of these offsets."""
    held = [v for v in values if v.size and v.start <= v.stop]
    bounds = np.unique([edge for v in held for edge in (v.offset, v.offset + v.size)])
    found: list[tuple[int, bool, int, int]] = []
    for v in held:
        first, last = (int(i) for i in np.searchsorted(bounds, [v.offset, v.offset + v.size]))
        found += [(v.start, True, first, last), (v.stop + 1, False, first, last)]
    return bounds, sorted(found)  # at one position closing comes before opening


def _shares(values: Sequence[BufferValue], bounds: np.ndarray) -> list[HeldBuffer]:
    widths, free, found = np.diff(bounds), np.ones(len(bounds) - 1, bool), list[HeldBuffer]()
    for v in sorted(values, key=lambda v: -v.start):
        first, last = np.searchsorted(bounds, [v.offset, v.offset + v.size])
        mine = int(widths[first:last][free[first:last]].sum())
        free[first:last] = False
        if mine:
            found.append(HeldBuffer(v, mine))
    return sorted(found, key=lambda h: -h.nbytes)


def twins(allocation: Allocation, value: BufferValue) -> list[BufferValue]:
    """The other values that lie in exactly the same bytes, the nearest in time first: of a loop, what its body writes."""
    same = [v for v in allocation.values if (v.offset, v.size, v.shape) == (value.offset, value.size, value.shape)]
    return sorted((v for v in same if v != value), key=lambda v: min(abs(v.start - value.stop), abs(v.stop - value.start)))
