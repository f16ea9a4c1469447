"""What each collective does to the local arrays of all devices: who meets whom in which order, and what each gets.

Local arrays of all devices are stacked: axis 0 is the device's position in the mesh. A *group* lists the positions of
its members in order; axis names are taken in the order of the equation (the first is major), not of the mesh.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jscaler.errors import VerificationError
from jscaler.ir.mask import Combiner

REDUCTIONS: dict[str, Combiner] = {"psum": "add", "pmax": "max", "pmin": "min", "reduce_scatter": "add"}
MOVES = ("all_gather", "all_to_all", "ppermute")
COLLECTIVES = frozenset({*REDUCTIONS, *MOVES})


def axes_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The axis names of a collective, in the order of the equation."""
    names = params.get("axes", params.get("axis_name"))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def groups_of(sizes: Mapping[str, int], params: Mapping[str, Any], where: Callable[[], str]) -> np.ndarray:
    """Positions of the members of each group, shape ``(groups, members)``.

    Args:
        sizes: the mesh's axes in order.
        params: of the equation.

    Raises:
        VerificationError: an unknown axis, or groups that do not part the devices equally.
    """
    names, axes = list(sizes), axes_of(params)
    if set(axes) - set(names) or len(set(axes)) < len(axes):
        raise VerificationError(f"{where()} runs along {list(axes)}; the mesh has {names}")
    rest = [a for a in range(len(names)) if names[a] not in axes]
    positions = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values()))
    lines = positions.transpose(rest + [names.index(a) for a in axes]).reshape(-1, int(np.prod([sizes[a] for a in axes])))
    explicit = params.get("axis_index_groups")
    if explicit is None:
        return lines
    counts = np.bincount([i for group in explicit for i in group], minlength=lines.shape[1])
    if len({len(group) for group in explicit}) != 1 or (counts != 1).any() or len(counts) != lines.shape[1]:
        listed = [list(map(int, group)) for group in explicit]
        raise VerificationError(f"{where()} has groups {listed}, which do not part {lines.shape[1]} devices equally")
    return lines[:, np.array(explicit)].reshape(-1, len(explicit[0]))


def take(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``array[index]`` along the device axis, without copies where that is one value."""
    if array.strides[0] == 0 or (len(index) and (index == index[0]).all()):
        first = int(index[0]) if array.strides[0] else 0
        return np.broadcast_to(array[first : first + 1], (len(index), *array.shape[1:]))
    return array[index]


def to_members(groups: np.ndarray, results: np.ndarray) -> np.ndarray:
    """Give each device its group's result; ``results`` has a row for each group."""
    group_of = np.empty(groups.size, int)
    group_of[groups] = np.arange(len(groups))[:, None]
    return take(results, group_of)


def place_of(groups: np.ndarray) -> np.ndarray:
    """Each device's place in its group."""
    place = np.empty(groups.size, int)
    place[groups] = np.arange(groups.shape[1])[None]
    return place


def all_gather(x: np.ndarray, groups: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """Members' parts one behind the other, or stacked."""
    dim = params["all_gather_dimension"] + 1
    parts = [take(x, groups[:, i]) for i in range(groups.shape[1])]
    joined = np.concatenate(parts, dim) if params["tiled"] else np.stack(parts, dim)
    return to_members(groups, joined)


def all_to_all(x: np.ndarray, groups: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """Block j of member i becomes block i of member j."""
    split, concat = params["split_axis"] + 1, params["concat_axis"] + 1
    count = groups.shape[1]
    out = None
    for j in range(count):
        blocks = [block(take(x, groups[:, i]), split, count, j) for i in range(count)]
        received = np.concatenate(blocks, concat)
        out = np.empty((len(x), *received.shape[1:]), x.dtype) if out is None else out
        out[groups[:, j]] = received
    assert out is not None
    return out


def block(x: np.ndarray, dim: int, count: int, index: int) -> np.ndarray:
    """Block ``index`` of ``count`` along ``dim``."""
    size = x.shape[dim] // count
    return x[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)]


def scatter(x: np.ndarray, groups: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """Deal each group's result (a row of ``x``) out to its members."""
    dim, count = params["scatter_dimension"] + 1, groups.shape[1]
    parts = [block(x, dim, count, i) for i in range(count)]
    if not params["tiled"]:
        parts = [p.squeeze(dim) for p in parts]
    out = np.empty((groups.size, *parts[0].shape[1:]), x.dtype)
    for i, part in enumerate(parts):
        out[groups[:, i]] = part
    return out


def check_order(sizes: Mapping[str, int], params: Mapping[str, Any], where: Callable[[], str]) -> None:
    """A ppermute must name its axes in the mesh's order: JAX 0.10 takes them so in any case, and later ones refuse.

    Raises:
        VerificationError: it does not.
    """
    axes = axes_of(params)
    if list(axes) != [name for name in sizes if name in axes]:
        raise VerificationError(f"{where()}: a ppermute must name its axes in the mesh's order, {list(sizes)}")


def sources_of(groups: np.ndarray, perm: Sequence[tuple[int, int]], where: Callable[[], str]) -> np.ndarray:
    """For each device the position it receives from, or -1.

    Raises:
        VerificationError: a device sends or receives twice.
    """
    for verb, ends in (("sends", [s for s, _ in perm]), ("receives", [t for _, t in perm])):
        twice = sorted({int(e) for e in ends if ends.count(e) > 1})
        if twice:
            raise VerificationError(f"{where()}: member {twice[0]} {verb} twice in {[tuple(map(int, p)) for p in perm]}")
        beyond = [int(e) for e in ends if not 0 <= e < groups.shape[1]]
        if beyond:
            raise VerificationError(f"{where()}: there is no member {beyond[0]} among {groups.shape[1]}")
    sources = np.full(groups.size, -1)
    for source, target in perm:
        sources[groups[:, target]] = groups[:, source]
    return sources


def ppermute(x: np.ndarray, sources: np.ndarray, nothing: np.ndarray) -> np.ndarray:
    """Each device gets its source's part; ``nothing`` (a row) where it has none."""
    received = take(x, np.maximum(sources, 0))
    if (sources >= 0).all():
        return received
    present = (sources >= 0).reshape(-1, *[1] * (x.ndim - 1))
    return np.where(present, received, nothing)


def reduced(member: Callable[[np.ndarray], Any], join: Callable[[Any, Any], Any], groups: np.ndarray) -> Any:
    """Each group's parts, joined; ``member`` takes the parts of a list of positions."""
    return functools.reduce(join, (member(groups[:, i]) for i in range(groups.shape[1])))
