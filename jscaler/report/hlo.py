"""Collectives of a compiled program, read from its HLO: kind, members in order, and bytes that each device sends.

Bytes and members are exact on CPU and on GPU. A loop's body stands in the text once: its collectives are found once, and
say how many ``times`` they run; totals count every run. XLA merges neighbours: into one op with a tuple result, all-reduces
on GPU into one array that holds them all (``AS_WRITTEN`` keeps them apart). An asynchronous pair counts once, at its start,
whose tuple holds inputs too.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from jscaler.report.hlo_loops import times
from jscaler.report.replica_groups import Groups, replica_groups

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ITEMSIZE = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3fnuz": 1, "f8e5m2fnuz": 1,
    "f8e4m3b11fnuz": 1, "f8e4m3": 1, "f8e3m4": 1, "f8e8m0fnu": 1,
}  # fmt: skip
# What one of n members sends, from the bytes that come out of the op (x, the bytes that go in, is the table's convention)
SENT: dict[str, Callable[[int, int], float]] = {
    "all-gather": lambda out, n: (n - 1) * out / n,  # (n-1)·x      of x = out/n
    "all-reduce": lambda out, n: 2 * (n - 1) * out / n,  # 2(n-1)·x/n   of x = out
    "reduce-scatter": lambda out, n: (n - 1) * out,  # (n-1)·x/n    of x = out·n
    "all-to-all": lambda out, n: (n - 1) * out / n,  # (n-1)·x/n    of x = out
}
# XLA's passes that merge, move, narrow or replace collectives. A program compiled with these options launches those that
# it was written with, to compare it with its plan; runs leave the passes on.
AS_WRITTEN = {
    "xla_disable_hlo_passes": ",".join(
        [
            "cpu-all-reduce-combiner",  # neighbours of one kind with equal groups become one launch
            "gpu-all-reduce-combiner",
            "gpu-all-gather-combiner",
            "gpu-reduce-scatter-combiner",
            "collective-permute-combiner",
            "all-reduce-folder",  # an all-reduce over one axis, then over another, becomes one over both
            "all-reduce-reassociate",  # the sum of two all-reduces becomes the all-reduce of the sum
            "reduce-scatter-reassociate",
            "all-gather-optimizer",  # and so for all-gathers
            "all-gather-bcast-reorder",  # a broadcast waits for its all-gather
            "collective-quantizer",  # a cast goes to the side of a collective where fewer bytes travel
            "while-loop-all-reduce-code-motion",  # a sum over a loop's steps is reduced once, after the loop
            "reduce-scatter-creator",  # an all-reduce of which each member takes a slice becomes a reduce-scatter
        ]
    )
}
_OP = re.compile(rf"\s*(?:ROOT )?%?[\w.\-]+ = (?P<result>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<shape>[\d,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True)
class HloCollective:
    """One collective op.

    Attributes:
        kind: one of ``KINDS``.
        arrays: tensors in this one launch.
        nbytes: payload, the larger of what one device puts in and gets out.
        members: devices per group; 2 for a permute.
        dtypes: of the arrays, each once.
        sent: bytes that one device sends each time, on average over all devices, in the convention of our transition table.
        groups: devices that exchange, in order (positions in the program's device list); empty for a permute.
        pairs: sender and receiver of each message of a permute, which may be one device; else empty.
        times: how often it runs, as far as the text says how many iterations its loops have.
    """

    kind: str
    arrays: int
    nbytes: int
    members: int
    dtypes: tuple[str, ...]
    sent: float = 0.0
    groups: Groups = ()
    pairs: tuple[tuple[int, int], ...] = ()
    times: int = 1


def collectives(text: str) -> list[HloCollective]:
    """Every collective in the text of a compiled module, each once, in order.

    Example:
        >>> line = "%g = f32[32]{0} all-gather(%p), replica_groups={{2,0},{1,3}}, dimensions={0}"
        >>> [(c.kind, c.sent, c.groups) for c in collectives(line)]
        [('all-gather', 64.0, ((2, 0), (1, 3)))]
    """
    lines = text.splitlines()
    num_devices = _num_devices(lines[0]) if lines else 0
    matches = [(match, number) for number, match in enumerate(map(_OP.match, lines)) if match]
    runs = times(lines) if matches else []
    return [
        dataclasses.replace(_collective(match, lines[number], num_devices), times=runs[number]) for match, number in matches
    ]


def _num_devices(header: str) -> int:
    """Devices of the program, from its first line; 0 in a text without one."""
    if not header.startswith("HloModule"):
        return 0
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(int(c) for c in counts)


def _collective(match: re.Match[str], line: str, num_devices: int) -> HloCollective:
    kind = match["kind"]
    arrays = [(a["dtype"], a["shape"]) for a in _ARRAY.finditer(_outputs(match))]
    count = 1 if kind == "all-to-all" else len(arrays)
    dtypes = tuple(dict.fromkeys(dtype for dtype, _ in arrays))
    out = sum(_nbytes(*a) for a in arrays)
    if kind == "collective-permute":
        pairs = _pairs(line)
        return HloCollective(kind, count, out, 2, dtypes, out * _sending(pairs, num_devices), (), pairs)
    groups = replica_groups(line, num_devices)
    members = max(map(len, groups)) or 1
    nbytes = out * members if kind == "reduce-scatter" else out
    return HloCollective(kind, count, nbytes, members, dtypes, float(SENT[kind](out, members)), groups)


def _outputs(match: re.Match[str]) -> str:
    """The shapes that come out: a start's tuple is (input, output, contexts) or ((inputs), outputs), by version."""
    parts = _elements(match["result"])
    nested = parts[0].startswith("(")
    if match["start"] and (nested or match["kind"] in ("all-gather", "collective-permute")):
        return parts[1]
    return match["result"]


def _elements(result: str) -> list[str]:
    """The elements of a tuple, which may be tuples; an array is its own."""
    if not result.startswith("("):
        return [result]
    elements, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/", "", result)[1:-1]:  # XLA numbers long tuples in comments
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return [e.strip() for e in elements]


def _pairs(line: str) -> tuple[tuple[int, int], ...]:
    match = _PAIRS.search(line)
    assert match is not None, line
    return tuple((int(source), int(target)) for source, target in re.findall(r"(\d+),(\d+)", match[1]))


def _sending(pairs: tuple[tuple[int, int], ...], num_devices: int) -> float:
    """The share of devices that send to another one; without the program's header, of those that the pairs name."""
    everyone = num_devices or len({device for pair in pairs for device in pair}) or 1
    return sum(source != target for source, target in pairs) / everyone


def _nbytes(dtype: str, shape: str) -> int:
    return ITEMSIZE[dtype] * math.prod(int(s) for s in shape.split(",") if s)


@dataclass(frozen=True)
class Totals:
    """Collectives of one kind: launches, tensors, payload bytes per device; those in loops as often as they run."""

    count: int
    arrays: int
    nbytes: int

    def plus(self, other: "Totals", times: int = 1) -> "Totals":
        """Both, the other so many times."""
        own = (self.count, self.arrays, self.nbytes)
        more = (other.count, other.arrays, other.nbytes)
        return Totals(*(a + times * b for a, b in zip(own, more, strict=True)))


def totals(text: str) -> dict[str, Totals]:
    """Per kind of collective, in a fixed order."""
    table: dict[str, Totals] = {}
    every = collectives(text)
    for kind in KINDS:
        mine = [c for c in every if c.kind == kind]
        if mine:
            launches = sum(c.times for c in mine)
            table[kind] = Totals(launches, sum(c.times * c.arrays for c in mine), sum(c.times * c.nbytes for c in mine))
    return table
