"""Helpers of the irregular tests: random holdings, what they mean, what planned moves do in numpy, and what they send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from materialize.layouts import box_of

from jscaler.ir.mask import Mask, Share
from jscaler.materialize.boxes import Box, overlay, volume, without
from jscaler.materialize.holders import Holders
from jscaler.materialize.mask_boxes import fragment
from jscaler.materialize.point_to_point import BoxMove, Holding, PointToPoint, Write
from jscaler.verification.whole_against_parts import COMBINE

Shares = tuple[Share, ...]
DIMS = {1: [(1,)], 3: [(3,)], 6: [(6,), (2, 3), (3, 2)], 7: [(7,)], 12: [(12,), (3, 4), (4, 3), (2, 6), (2, 2, 3)]}
SHAPES = [(), (7,), (12,), (6, 7), (12, 3), (7, 12), (3, 1, 6), (6, 6, 3), (3, 3, 6, 1), (3, 6, 3, 3)]


@dataclass(frozen=True)
class Case:
    """What ``plan_regions`` is asked."""

    shape: tuple[int, ...]
    held: tuple[Holding, ...]
    wanted: tuple[tuple[Holding, ...], ...]
    num_devices: int


def box_mask(shape: Sequence[int], *box: tuple[int, int], shares: Shares = ()) -> Mask:
    """A box of an unrefined tensor."""
    return Mask(tuple((s,) for s in shape), tuple((interval,) for interval in box), shares)


def holdings(*masks: Mask | None, start: int = 0) -> tuple[Holding, ...]:
    """One mask per device, from position ``start`` on; None where a device has none."""
    return tuple(Holding(position, mask) for position, mask in enumerate(masks, start) if mask is not None)


# Random cases


@st.composite
def partitions(draw: Any, box: tuple[tuple[int, int], ...], parts: int) -> list[tuple[tuple[int, int], ...]]:
    """At most ``parts`` uneven boxes that make up ``box``: cut somewhere, then cut the halves."""
    dims = [d for d, (start, stop) in enumerate(box) if stop - start > 1]
    if parts == 1 or not dims:
        return [box]
    dim = draw(st.sampled_from(dims))
    start, stop = box[dim]
    at = draw(st.integers(start + 1, stop - 1))
    left = draw(st.integers(1, parts - 1))
    halves = [((start, at), left), ((at, stop), parts - left)]
    return [b for part, n in halves for b in draw(partitions((*box[:dim], part, *box[dim + 1 :]), n))]


@st.composite
def share_leaves(draw: Any, most: int) -> list[Shares]:
    """At most ``most`` leaves of a tree of shares with one combiner."""
    leaves: list[Shares] = [()]
    combiner = draw(st.sampled_from(["add", "max", "min"]))
    while draw(st.booleans()):
        count = draw(st.integers(2, 3))
        if len(leaves) + count - 1 > most:
            break
        path = leaves.pop(draw(st.integers(0, len(leaves) - 1)))
        leaves += [(*path, Share(p, count, combiner)) for p in range(count)]
    return leaves


def _mask(subdims: Sequence[tuple[int, ...]], box: Sequence[tuple[int, int]], shares: Shares) -> Mask:
    rest = iter(box)
    return Mask(tuple(subdims), tuple(tuple(next(rest) for _ in dim) for dim in subdims), shares)


@st.composite
def sides(draw: Any, shape: tuple[int, ...], num_devices: int, leaves: list[Shares]) -> list[Mask]:
    """A mask for each device: all leaves of all parts of an uneven partition, and replicas."""
    subdims = [draw(st.sampled_from(DIMS[size])) for size in shape]
    whole = tuple((0, size) for dim in subdims for size in dim)
    parts = draw(partitions(whole, draw(st.integers(1, num_devices // len(leaves)))))
    masks = [_mask(subdims, part, leaf) for part in parts for leaf in leaves]
    masks += [draw(st.sampled_from(masks)) for _ in range(num_devices - len(masks))]
    return draw(st.permutations(masks))


@st.composite
def wishes(draw: Any, shape: tuple[int, ...], num_devices: int, shares: list[Shares]) -> tuple[Holding, ...]:
    """What one consumer wants: a partition, its parts with a halo, or just any boxes; perhaps not on every device."""
    masks = draw(sides(shape, num_devices, [()]))
    halo = draw(st.integers(0, 2))
    masks = [_halo(mask, halo) for mask in masks]
    if draw(st.booleans()):
        masks = [Mask(m.subdims, m.box, draw(st.sampled_from(shares))) for m in masks]
    absent = draw(st.sets(st.integers(0, num_devices - 1), max_size=num_devices // 2))
    return holdings(*(None if p in absent else mask for p, mask in enumerate(masks)))


def _halo(mask: Mask, width: int) -> Mask:
    box = tuple(
        tuple((max(0, a - width), min(s, b + width)) for s, (a, b) in zip(sizes, dim, strict=True))
        for sizes, dim in zip(mask.subdims, mask.box, strict=True)
    )
    return Mask(mask.subdims, box, mask.shares)


@st.composite
def cases(draw: Any, num_devices: int | None = None) -> Case:
    """Any holdings: uneven, replicated, overlapping, shared, refined, in any order of the devices."""
    shape = draw(st.sampled_from(SHAPES))
    num_devices = num_devices or draw(st.integers(2, 8))
    leaves = draw(share_leaves(num_devices))
    combiner = next((s.combiner for leaf in leaves for s in leaf), "add")
    prefixes = list(dict.fromkeys(leaf[:i] for leaf in leaves for i in range(len(leaf) + 1)))
    deeper = [(*leaf, Share(p, 2, combiner)) for leaf in leaves[:2] for p in range(2)]
    held = draw(sides(shape, num_devices, leaves))
    if draw(st.booleans()):
        held = [_halo(mask, 1) for mask in held]
    wanted = [draw(wishes(shape, num_devices, prefixes + deeper)) for _ in range(draw(st.integers(1, 2)))]
    return Case(shape, holdings(*held), tuple(wanted), num_devices)


# What holdings mean


def index_of(mask: Mask, shape: Sequence[int]) -> np.ndarray:
    """The flat index of each element of ``mask``, in the shape of the part."""
    return box_of(mask, np.arange(int(np.prod(shape))).reshape(shape))


def padded(part: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """``part`` in the origin's corner of a buffer of zeros."""
    buffer = np.zeros(tuple(shape), part.dtype)
    buffer[(*map(slice, part.shape), ...)] = part
    return buffer


def buffers_of(side: Sequence[Holding], num_devices: int, values: Callable[[Holding], np.ndarray]) -> list[np.ndarray]:
    """Each device's buffer, with ``values`` (of the part) of its mask."""
    parts = {holding.position: values(holding) for holding in side}
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts.values()), strict=True)]
    dtype = next(iter(parts.values())).dtype
    return [padded(parts[p], shape) if p in parts else np.zeros(shape, dtype) for p in range(num_devices)]


def draw_values(case: Case, whole: np.ndarray, rng: np.random.Generator) -> dict[Shares, np.ndarray]:
    """The value of every path of shares that is held or on the way to one; children join to their parent."""
    values: dict[Shares, np.ndarray] = {(): whole}
    for path in dict.fromkeys(h.mask.shares[:i] for h in case.held for i in range(1, len(h.mask.shares) + 1)):
        if path not in values:
            share = path[-1]
            for position, value in enumerate(_break(values[path[:-1]], share, rng)):
                values[(*path[:-1], Share(position, share.count, share.combiner))] = value
    return values


def _break(value: np.ndarray, share: Share, rng: np.random.Generator) -> np.ndarray:
    """Random shares that join to ``value``."""
    drawn = rng.integers(-2, 3, (share.count, *value.shape)).astype(value.dtype)
    if share.combiner == "add":
        if value.dtype == bool:  # a sum of booleans is "or"
            return value & (drawn | (np.arange(share.count).reshape(-1, *[1] * value.ndim) == 0))
        drawn[0] = value - drawn[1:].sum(0)
        return drawn
    further = COMBINE["min" if share.combiner == "max" else "max"](value, drawn)
    holder = rng.integers(0, share.count, value.shape)
    return np.where(np.arange(share.count).reshape(-1, *[1] * value.ndim) == holder, value, further)


def source_of(want: Shares, paths: set[Shares]) -> Shares:
    """The value a consumer of one element takes, where ``paths`` of that element are held."""
    path: Shares = ()
    for share in want:
        siblings = {(p[len(path)].count, p[len(path)].combiner) for p in paths if p[: len(path)] == path != p}
        if path in paths or (share.count, share.combiner) not in siblings:
            break
        path = (*path, share)
    return path


def paths_of(case: Case) -> list[set[Shares]]:
    """Per element, flat: which values are held."""
    found: list[set[Shares]] = [set() for _ in range(int(np.prod(case.shape)))]
    for holding in case.held:
        for i in index_of(holding.mask, case.shape).flat:
            found[i].add(holding.mask.shares)
    return found


def expected(
    case: Case, consumer: int, values: dict[Shares, np.ndarray], neutral: Callable[[str], Any]
) -> list[np.ndarray]:
    """What each device must end with, element by element."""
    held = paths_of(case)

    def value(want: Shares, index: int) -> Any:
        path = source_of(want, held[index])
        others = [share for share in want[len(path) :] if share.position]
        return neutral(others[-1].combiner) if others else values[path].flat[index]

    def part(holding: Holding) -> np.ndarray:
        index = index_of(holding.mask, case.shape)
        found = np.empty(index.shape, values[()].dtype)
        found.flat = [value(holding.mask.shares, i) for i in index.flat]
        return found

    return buffers_of(case.wanted[consumer], case.num_devices, part)


# What moves do


def run_in_numpy(
    regions: PointToPoint, held: Sequence[np.ndarray], neutral: Callable[[str], Any], join: Callable[[str], Any]
) -> list[list[np.ndarray]]:
    """Run the moves device by device; per consumer each device's buffer."""
    empty = held[0].dtype.type(0) if held[0].dtype != object else neutral("add")
    buffers = [
        [part.reshape(regions.views[0]), *(np.full(view, empty, part.dtype) for view in regions.views[1:])] for part in held
    ]
    for fill in regions.fills:
        _write(buffers, fill.write, [np.full(fill.shape, neutral(fill.combiner), held[0].dtype)] * len(held), join)
    for move in (*regions.copies, *regions.rounds):
        _write_all(buffers, move, pieces_of(buffers, move), join)
    shapes = regions.shapes[1:]
    return [[device[i].reshape(shape) for device in buffers] for i, shape in enumerate(shapes, 1)]


def pieces_of(buffers: Sequence[Sequence[np.ndarray]], move: BoxMove) -> dict[int, np.ndarray]:
    """What each device has in hand after a move, before it writes."""
    read = [device[move.source][_at(start, move.shape)].copy() for device, start in zip(buffers, move.starts, strict=True)]
    return {receiver: read[sender] for sender, receiver in move.pairs} if move.pairs else dict(enumerate(read))


def _write_all(buffers: Any, move: BoxMove, pieces: dict[int, np.ndarray], join: Callable[[str], Any]) -> None:
    for write in move.writes:
        assert not move.pairs or {p for p, active in enumerate(write.active) if active} <= set(pieces)
        _write(buffers, write, pieces, join)


def _write(buffers: Any, write: Write, pieces: Any, join: Callable[[str], Any]) -> None:
    for position in (p for p, active in enumerate(write.active) if active):
        at = _at(write.starts[position], pieces[position].shape)
        target = buffers[position][write.buffer]
        target[at] = pieces[position] if write.join == "set" else join(write.join)(target[at], pieces[position])


def _at(start: Sequence[int], shape: Sequence[int]) -> Any:
    return (*(slice(a, a + size) for a, size in zip(start, shape, strict=True)), ...)  # a view, also of a scalar


# What moves send


def bytes_sent(regions: PointToPoint, itemsize: int) -> float:
    """Mean bytes that a device sends."""
    return sum(r.size * len(r.pairs) for r in regions.rounds) * itemsize / regions.num_devices


def busiest(regions: PointToPoint, itemsize: int) -> int:
    """The largest number of bytes that one device sends, or that one receives."""
    load = np.zeros((regions.num_devices, 2), int)
    for r in regions.rounds:
        for sender, receiver in r.pairs:
            load[sender, 0] += r.size
            load[receiver, 1] += r.size
    return int(load.max()) * itemsize


def lower_bound(
    shape: tuple[int, ...], held: Sequence[Holding], wanted: Sequence[Sequence[Holding]], num_devices: int, itemsize: int
) -> float:
    """Mean bytes that a device wants and does not hold: whatever is sent, less cannot do.

    Shares that have to be joined count once, as if they were joined on the way; see ``plan_regions`` for the arguments.
    """
    _, (first, *consumers) = fragment(shape, [held, *wanted])
    holders = Holders(first.fragments)
    own: dict[tuple[int, Shares], list[Box]] = {}
    for f in first.fragments:
        own.setdefault((f.position, f.shares), []).append(f.box)
    needs: dict[int, dict[Box, None]] = {}
    for want in (f for side in consumers for f in side.fragments):
        for box, path in holders.source(want.shares, want.box):
            if not any(share.position for share in want.shares[len(path) :]):
                missing = without([box], own.get((want.position, path), ()))
                needs.setdefault(want.position, {}).update(dict.fromkeys(missing))
    count = sum(volume(box) for boxes in needs.values() for box, _ in overlay((box, None) for box in boxes))
    return count * itemsize / num_devices
