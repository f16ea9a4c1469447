"""Collectives of a compiled program, read from its HLO: kind, how many, and bytes per device.

Bytes are the payload: the larger of what one device puts in and gets out. They are exact on CPU and on GPU; counts are
those of the text, and on GPU XLA combines neighbours into one op with a tuple result.
"""

import math
import re
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ITEMSIZE = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
_OP = re.compile(rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<shape>[\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective op: ``arrays`` tensors in one launch, ``nbytes`` of payload, ``members`` devices per group."""

    kind: str
    arrays: int
    nbytes: int
    members: int
    dtypes: tuple[str, ...]


def collectives(text: str) -> list[Collective]:
    """Every collective in the text of a compiled module."""
    found = []
    for line in text.splitlines():
        match = _OP.search(line)
        if match:
            found.append(_collective(match, line))
    return found


def _collective(match: re.Match[str], line: str) -> Collective:
    kind = match["kind"]
    arrays = [(a["dtype"], a["shape"]) for a in _ARRAY.finditer(match["result"])]
    if match["start"] and kind in ("all-gather", "collective-permute"):
        # an asynchronous start returns (operands, results, contexts)
        arrays = [a for a in arrays if a != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    members = _members(line)
    nbytes = sum(_nbytes(*a) for a in arrays) * (members if kind == "reduce-scatter" else 1)
    return Collective(kind, 1 if kind == "all-to-all" else len(arrays), nbytes, members, tuple({d for d, _ in arrays}))


def _nbytes(dtype: str, shape: str) -> int:
    return ITEMSIZE[dtype] * math.prod(int(s) for s in shape.split(",") if s)


def _members(line: str) -> int:
    """Devices per group; HLO writes groups as lists, as ``[groups,members]<=[...]``, or as axes of a mesh."""
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']*)'", match[2]))
    return 2 if "source_target_pairs" in line else 1


@dataclass(frozen=True)
class Totals:
    """Collectives of one kind: launches, tensors, payload bytes per device."""

    count: int
    arrays: int
    nbytes: int


def totals(text: str) -> dict[str, Totals]:
    """Per kind of collective, in a fixed order."""
    table: dict[str, Totals] = {}
    every = collectives(text)
    for kind in KINDS:
        mine = [c for c in every if c.kind == kind]
        if mine:
            table[kind] = Totals(len(mine), sum(c.arrays for c in mine), sum(c.nbytes for c in mine))
    return table
