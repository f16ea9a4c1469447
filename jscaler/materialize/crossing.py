"""``Crossing``: the way of a tensor from the layout of one device group to that of another, of any size, apart or not.

    producers' group          between the groups            consumers' group
    source ─► leaving   ──    one round of equal blocks  ──►  arriving ─► target
            (adapter)         or a few, of pieces           (adapter)

Between groups links are slow. So value shares are joined before they leave, and replicas are made behind the hop: each
consumer receives a part of its own, and what all want is gathered among them. What a device holds that is in both groups
does not move. The hop is planned as regions over the union of both groups (`point_to_point`): of equal layouts that is one
round of whole blocks, between groups of other sizes a few rounds of pieces.

The search has, at either end, every way to let axes that replicate or carry value shares cut dims. Pairs of ends are tried
in the order of what they seem to cost, those that may still be better, up to a number that keeps large groups quick.
``tests/materialize/test_crossing.py`` tries all layouts.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from jscaler.clusters import BYTES, CostModel
from jscaler.clusters.cost_model import Bytes
from jscaler.errors import PlanError
from jscaler.materialize.adapter import Adapter, find_adapter
from jscaler.materialize.bounds import pieces_at_least
from jscaler.materialize.canonical import canonical, in_primes
from jscaler.materialize.layout import Layout, on_devices, without_values
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.materialize.notation import opened
from jscaler.materialize.point_to_point import BoxMove, PointToPoint
from jscaler.materialize.transitions import regions_between, union_of

SLOW = 10.0  # where no cluster says how slow: a byte between groups counts for this many inside of one
MOST_ALIKE = 8  # ends that the other group takes on, too
MOST_TRIED = 4096  # devices of both groups, times the pairs of ends whose hop is planned
MOST_MESSAGES = 8192  # of a hop, where there are others with fewer: more are gathered and joined within a group
MOST_PAIRS = 4096  # of ends that are looked at
MOST_ENDS = 256  # ways for the axes of one layout to cut its dims


@dataclass(frozen=True)
class Crossing:
    """The communication that brings a tensor from one device group to another.

    Attributes:
        leave: within the producers' group, up to what is sent.
        arrive: within the consumers' group, from what is received.
        cost: in the cost model's unit, of all three steps.
    """

    leave: Adapter
    arrive: Adapter
    cost: float

    @staticmethod
    def bare(leaving: Layout, arriving: Layout) -> "Crossing":
        """The hop alone, from one layout to the other."""
        return Crossing(Adapter(leaving, leaving, (), 0.0), Adapter(arriving, arriving, (), 0.0), 0.0)

    @property
    def source(self) -> Layout:
        return self.leave.source

    @property
    def target(self) -> Layout:
        return self.arrive.target

    @property
    def hop(self) -> PointToPoint:
        """The messages between the groups; positions are those of ``devices``."""
        return regions_between(self.leave.target, self.arrive.source)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The devices of both groups: the producers' in their order, then the others."""
        return union_of(self.leave.target, self.arrive.source)

    @property
    def moves(self) -> tuple[BoxMove, ...]:
        """What goes from the producers' group to the consumers': copies on devices of both, and rounds."""
        return tuple(move for move in (*self.hop.copies, *self.hop.rounds) if move.source == 0)

    @property
    def relays(self) -> tuple[BoxMove, ...]:
        """What consumers then hand on to one another."""
        return tuple(move for move in self.hop.rounds if move.source)

    @cached_property
    def sent(self) -> int:
        """Elements that go from device to device between the groups, in all messages."""
        return sum(move.size * len(move.pairs) for move in self.moves)

    @property
    def is_equal(self) -> bool:
        """Whether the hop is one round of whole blocks, one for each consumer: ``jax.device_put`` does it."""
        return _in_whole_parts(self.hop, len(self.target.mesh.devices))

    def __str__(self) -> str:
        hop = f"{len(self.hop.rounds)} round{'s' if len(self.hop.rounds) != 1 else ''} between the groups"
        return "; ".join([*map(str, self.leave.steps), hop, *map(str, self.arrive.steps)])


@lru_cache(maxsize=4096)
def find_crossing(source: Layout, target: Layout, itemsize: int, cost: CostModel = BYTES) -> Crossing:
    """The cheapest crossing from ``source`` to ``target``, which lie on any two device groups. There always is one.

    Raises:
        PlanError: the layouts are of different shapes.
    """
    numbers = _renumbered(source, target, cost)
    first, second = on_devices(source, numbers), on_devices(target, numbers)
    if (first, second) == (source, target):
        return cheapest_crossings(source, target, itemsize, cost, 1)[0]
    alike = find_crossing(first, second, itemsize, cost)  # between any two stages that lie alike on hosts it is the same
    devices = {number: device for device, number in numbers.items()}
    leaving, arriving = on_devices(alike.leave.target, devices), on_devices(alike.arrive.source, devices)
    leave, arrive = find_adapter(source, leaving, itemsize, cost), find_adapter(arriving, target, itemsize, cost)
    return Crossing(leave, arrive, alike.cost)


def _renumbered(source: Layout, target: Layout, cost: CostModel) -> dict[int, int]:
    """By device its number among the first devices that stand to one another alike, in the same order."""
    union = sorted(union_of(source, target))
    return dict(zip(union, cost.renumbered(union), strict=True))


def cheapest_crossings(
    source: Layout, target: Layout, itemsize: int, cost: CostModel = BYTES, count: int = 1
) -> list[Crossing]:
    """Up to ``count`` crossings that were found, cheapest first; raises as ``find_crossing``."""
    if source.shape != target.shape:
        raise PlanError(
            f"'{source}' is of shape {source.shape} and '{target}' of shape {target.shape}; a layout changes no shape"
        )
    leaving, arriving = _leaving(source, itemsize, cost), _arriving(target, itemsize, cost)
    if len(source.mesh.devices) == len(target.mesh.devices) and source.subdims == target.subdims:
        alike = [_as_wanted(source, adapter.source, itemsize, cost) for adapter in arriving[:MOST_ALIKE]]
        arriving = _sorted([*arriving, *(_as_held(a.target, target, itemsize, cost) for a in leaving[:MOST_ALIKE])])
        leaving = _sorted([*leaving, *alike])
    best: list[Crossing] = []
    hops = [_hop_about(source, adapter.source, itemsize, cost) for adapter in arriving]
    left = max(1, MOST_TRIED // (len(source.mesh.devices) + len(target.mesh.devices)))
    pairs = [*itertools.islice(_cheapest_pairs(leaving, arriving, hops), MOST_PAIRS)]
    receivers = len(target.mesh.devices)
    few = [ends for ends in pairs if receivers * pieces_at_least(ends[0].target, ends[1].source) <= MOST_MESSAGES]
    for leave, arrive in few or pairs:
        ends = leave.cost + arrive.cost
        if not _go_together(leave.target, arrive.source):
            continue
        if left and (len(best) < count or ends < best[-1].cost):
            total = ends + hop_price(leave.target, arrive.source, itemsize, cost)
            best = sorted([*best, Crossing(leave, arrive, total)], key=lambda crossing: crossing.cost)[:count]
            left -= 1
    return best


def _go_together(leaving: Layout, arriving: Layout) -> bool:
    """Whether pieces of one can be put into the other: over other sub-dims a dim must be padded at its end alone."""
    return leaving.subdims == arriving.subdims or (_is_padded_behind(leaving) and _is_padded_behind(arriving))


def _is_padded_behind(layout: Layout) -> bool:
    """Whether a device's elements of a dim stand together: a sub-dim in unequal parts is repeated by none before it."""
    uneven, number = dict(layout.uneven), 0
    for dim in layout.subdims:
        repeats = 1
        for size in dim:
            if number in uneven and repeats > 1:
                return False
            repeats *= -(-size // layout.mesh.size(layout.cuts[number]))
            number += 1
    return True


def hop_price(leaving: Layout, arriving: Layout, itemsize: int, cost: CostModel) -> float:
    """What the messages between the groups cost: inside of one device nothing; to cut and join pieces a bit."""
    numbers = _renumbered(leaving, arriving, cost)
    return _price_of_hop(*(_in_few_axes(on_devices(end, numbers)) for end in (leaving, arriving)), itemsize, cost)


@lru_cache(maxsize=65536)
def _price_of_hop(leaving: Layout, arriving: Layout, itemsize: int, cost: CostModel) -> float:
    numbers, senders = np.array(union_of(leaving, arriving)), len(leaving.mesh.devices)
    hop = regions_between(leaving, arriving)
    rounds = [(numbers[np.array(r.pairs)], r.size * itemsize) for r in hop.rounds]
    total = 0.0 if _in_whole_parts(hop, len(arriving.mesh.devices)) else 2 * cost.local_step
    total += sum(cost.messages(pairs, nbytes, senders) for pairs, nbytes in rounds)
    if isinstance(cost, Bytes):  # it knows no links
        ends = arriving.mesh.numbers, leaving.mesh.numbers
        slow = sum(nbytes * int((~np.isin(p[:, 0], ends[0]) & ~np.isin(p[:, 1], ends[1])).sum()) for p, nbytes in rounds)
        total += (SLOW - 1) * slow / senders
    return float(total)


def _in_few_axes(layout: Layout) -> Layout:
    """``layout`` in canonical form, if that leaves the order of its devices, in which messages are dealt."""
    merged = canonical(layout)
    return merged if merged.mesh.devices == layout.mesh.devices else layout


def _in_whole_parts(hop: PointToPoint, receivers: int) -> bool:
    """Whether every consumer gets the whole part of one producer, in one round."""
    moves = (*hop.copies, *hop.rounds)
    served = [p for m in moves for write in m.writes for p, on in enumerate(write.active) if on]
    once = len(served) == len(set(served)) == receivers  # shares may be zeros, made there
    whole = all(m.source == 0 and m.shape == hop.views[0] == hop.views[1] for m in moves)
    return whole and once and len(hop.rounds) <= 1 and not hop.fills


def _hop_about(source: Layout, arriving: Layout, itemsize: int, cost: CostModel) -> float:
    """What the hop to ``arriving`` costs if all producers take an equal share in it, and shares are sent but once."""
    here = source.mesh.numbers
    there = arriving.mesh.numbers[:: arriving.mesh.size(tuple(axis for axis, _ in arriving.values))]
    there = there[~np.isin(there, here)]
    pairs = np.stack([here[np.arange(len(there)) * len(here) // max(1, len(there))], there], axis=1)
    price = cost.messages(pairs, math.prod(arriving.local_shape) * itemsize, len(here))
    return price * (SLOW if isinstance(cost, Bytes) else 1)


def _cheapest_pairs(
    leaving: Sequence[Adapter], arriving: Sequence[Adapter], hops: Sequence[float]
) -> Iterator[tuple[Adapter, Adapter]]:
    """All pairs, in the order of what they come to with ``hops``, which each of ``arriving`` adds."""
    there = sorted(zip((a.cost + hop for a, hop in zip(arriving, hops, strict=True)), range(len(arriving)), strict=True))
    heap = [(leaving[0].cost + there[0][0], 0, 0)]
    seen = {(0, 0)}
    while heap:
        _, i, j = heapq.heappop(heap)
        yield leaving[i], arriving[there[j][1]]
        for a, b in ((i + 1, j), (i, j + 1)):
            if a < len(leaving) and b < len(there) and (a, b) not in seen:
                seen.add((a, b))
                heapq.heappush(heap, (leaving[a].cost + there[b][0], a, b))


def _sorted(adapters: Iterable[Adapter]) -> list[Adapter]:
    """Without those between the same layouts, cheapest first."""
    return sorted({(a.source, a.target): a for a in adapters}.values(), key=lambda a: a.cost)


def _as_wanted(source: Layout, wanted: Layout, itemsize: int, cost: CostModel) -> Adapter:
    """To the layout of the other group's devices, in the order that is cheapest here: the hop is one of equal blocks."""
    return find_adapter(source, opened(wanted), itemsize, cost)


def _as_held(held: Layout, target: Layout, itemsize: int, cost: CostModel) -> Adapter:
    """From the layout of the other group's devices."""
    mesh = DeviceMesh(target.mesh.devices, held.mesh.axes)
    return find_adapter(dataclasses.replace(held, mesh=mesh), target, itemsize, cost)


def _leaving(source: Layout, itemsize: int, cost: CostModel) -> list[Adapter]:
    """Ways to what may be sent: as it lies; with shares joined, each device with a part of its own; gathered, if small."""
    view = _divisible(canonical(source))
    bare = without_values(view)
    shared = tuple(a for a, _ in view.values)
    ends = (source, *_gathered(bare), *_cut_by(bare, shared), *_cut_by(bare, (*shared, *view.free)))
    return _sorted(find_adapter(source, end, itemsize, cost) for end in _distinct(ends))


def _arriving(target: Layout, itemsize: int, cost: CostModel) -> list[Adapter]:
    """Ways from what may be received: as it is wanted; in parts for those who want the same, or by one of them."""
    view = _divisible(canonical(target))
    bare = without_values(view)
    ends = (target, *_cut_by(bare, bare.free), *_cut_by(view, view.free))
    if not _is_padded_behind(target):
        ends = (*ends, *_gathered(bare))
    if not target.values:
        ends = (*ends, dataclasses.replace(view, values=tuple((axis, "add") for axis in view.free)))
    return _sorted(find_adapter(end, target, itemsize, cost) for end in _distinct(ends))


def _distinct(layouts: Iterable[Layout]) -> list[Layout]:
    """The first of each way to lie, however its mesh is written."""
    found: dict[Layout, Layout] = {}
    for layout in layouts:
        found.setdefault(canonical(layout), layout)
    return list(found.values())


def _divisible(layout: Layout) -> Layout:
    """``layout``, over axes of prime size where one that does not cut yet is too large to cut any sub-dim."""
    size = layout.mesh.size
    room = [n // size(axes) for n, axes in zip(layout.sizes, layout.cuts, strict=True)]
    apart = (*layout.free, *(axis for axis, _ in layout.values))
    return layout if all(size((axis,)) <= max(room, default=0) for axis in apart) else in_primes(layout)


def _gathered(layout: Layout) -> Iterator[Layout]:
    """``layout`` with some of its cut sub-dims whole."""
    cut = [i for i, axes in enumerate(layout.cuts) if axes]
    for count in range(1, len(cut) + 1):
        for some in itertools.combinations(cut, count):
            cuts = tuple(() if i in some else axes for i, axes in enumerate(layout.cuts))
            yield dataclasses.replace(layout, cuts=cuts, uneven=tuple(u for u in layout.uneven if u[0] not in some))


def _cut_by(layout: Layout, axes: Axes) -> Iterator[Layout]:
    """``layout`` with each of ``axes`` cutting a sub-dim besides, or none; where blocks are too few for it, not so.

    Of very many such ways those are left out in which an axis cuts an earlier sub-dim than the axis before it.
    """
    own = dict(layout.uneven)
    dims = [*(i for i in range(len(layout.cuts)) if i not in own), None]
    every = len(dims) ** len(axes) <= MOST_ENDS
    ways = itertools.product(dims, repeat=len(axes)) if every else itertools.combinations_with_replacement(dims, len(axes))
    for choice in itertools.islice(ways, MOST_ENDS):
        cuts = list(layout.cuts)
        for axis, dim in zip(axes, choice, strict=True):
            if dim is not None:
                cuts[dim] = (*cuts[dim], axis)
        if all(layout.mesh.size(c) <= size for c, size in zip(cuts, layout.sizes, strict=True)):
            yield dataclasses.replace(layout, cuts=tuple(cuts))
