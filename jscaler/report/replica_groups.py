"""Who takes part in a collective: the replica groups of an HLO op, in each of the three ways in which XLA writes them.

Devices are positions in the program's device list, which for a program over a mesh is ``mesh.devices.flat``; they are
not the ids of the devices. The members of a group come in their order: it is theirs in an all-gather's result.
"""

import math
import re
from itertools import pairwise

import numpy as np

from jscaler.errors import JscalerError

Groups = tuple[tuple[int, ...], ...]
_LISTS = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")  # {{0,1},{2,3}}, or {}: all devices
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")  # [groups,members]<=[sizes]T(permutation)
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(((?:\[[\d,]+\](?:T\([\d,]+\))?|[\d, ]+))\))? \{([^}]*)\}")
_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")  # 'a', or 'a':(before)size for a part of it


def replica_groups(line: str, num_devices: int) -> Groups:
    """The groups of one op, in the text's order.

    Args:
        line: the op, as printed in a compiled module.
        num_devices: of the program, for groups that are left out.

    Raises:
        JscalerError: the groups are written in a way that is not known here.
    """
    _, found, spelling = line.partition("replica_groups=")
    if not found:
        return (tuple(range(num_devices)),)
    if match := _LISTS.match(spelling):
        groups = re.findall(r"\{([\d,]*)\}", match[1])
        return tuple(tuple(_integers(g)) for g in groups) or (tuple(range(num_devices)),)
    if match := _IOTA.match(spelling):
        return _rows(_numbering(match[3]).reshape(int(match[1]), int(match[2])))
    if match := _MESH.match(spelling):
        return _mesh_groups(match[1], match[2], match[3])
    raise JscalerError(f"cannot read the replica groups of '{line.strip()[:200]}'")


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """Groups along ``axes`` of a mesh, the first one slowest; an axis may be a part of one of the mesh."""
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    chosen = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(axes)]
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, before, size in chosen:
        cuts[name] |= {before, before * size}
    parts = [(name, low, high // low) for name in sizes for low, high in pairwise(sorted(cuts[name]))]
    grouped = [parts.index(part) for part in chosen if part[2] > 1]
    others = [i for i in range(len(parts)) if i not in grouped]
    devices = _numbering(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    members = math.prod(parts[i][2] for i in grouped)
    return _rows(devices.reshape([size for *_, size in parts]).transpose(others + grouped).reshape(-1, members))


def _numbering(text: str) -> np.ndarray:
    """Device numbers: in full, or as the transpose of 0, 1, 2, … in a shape."""
    if not text.startswith("["):
        return np.array(_integers(text))
    sizes, permutation = (re.search(pattern, text) for pattern in (r"\[([\d,]+)\]", r"T\(([\d,]+)\)"))
    assert sizes is not None, text
    shape = _integers(sizes[1])
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_integers(permutation[1])) if permutation else numbers


def _integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in table.tolist())
