"""How few bytes can do: what the devices need and do not hold, and what joining value shares takes at the least."""

import math
from collections.abc import Sequence

import numpy as np

from jscaler.materialize.canonical import primes
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh

Digit = tuple[str, int]


class HeldPart:
    """How much of a wanted block a device holds already, in the mean over the devices of ``mesh``.

    Two blocks meet where the digits of their numbers agree, dim by dim from the major end. Digits of one axis always do;
    digits of two axes of p devices do on one device in p, and of a cycle of such equalities one comes for free. Where
    digits of different primes stand side by side, the whole rest is taken to be held: the result is an upper bound.
    """

    def __init__(self, mesh: DeviceMesh, wanted: Sequence[Axes]):
        self.digits = {name: [((name, i), p) for i, p in enumerate(primes(size))] for name, size in mesh.axes}
        self.wanted = [[d for a in axes for d in self.digits[a]] for axes in wanted]
        self.known: dict[tuple[int, Axes], tuple[float, tuple[tuple[Digit, Digit, int], ...]]] = {}

    def fraction(self, held: Sequence[Axes]) -> float:
        """The part of the wanted blocks that lies in blocks cut by ``held``, the axes per sub-dim."""
        result = 1.0
        parent: dict[Digit, Digit] = {}
        for dim, axes in enumerate(held):
            fraction, equal = self.known.get((dim, axes)) or self._compare(dim, axes)
            result *= fraction
            for a, b, p in equal:
                while a in parent:
                    a = parent[a]
                while b in parent:
                    b = parent[b]
                if a != b:
                    parent[a] = b
                    result /= p
        return result

    def _compare(self, dim: int, axes: Axes) -> tuple[float, tuple[tuple[Digit, Digit, int], ...]]:
        """What of the dim is held where all of the digit pairs returned are equal."""
        left, right = [d for a in axes for d in self.digits[a]], self.wanted[dim]
        equal = []
        fraction = 1.0 / math.prod(p for _, p in left[len(right) :])
        for i, ((a, p), (b, q)) in enumerate(zip(left, right, strict=False)):
            if p != q:
                fraction = min(1.0, math.prod(p for _, p in right[i:]) / math.prod(p for _, p in left[i:]))
                break
            if a != b:
                equal.append((a, b, p))
        self.known[dim, axes] = fraction, tuple(equal)
        return self.known[dim, axes]


def bytes_at_least(source: Layout, target: Layout, itemsize: int) -> float:
    """Bytes that no way from ``source`` to ``target`` can save, mean per device: elements to bring, shares to join.

    Without value shares it is what devices want and do not hold, for any two device orders, refinements and sizes.
    Devices whose value shares are one value in ``target`` want each element once, together: the others may hold zeros.
    So shares may also be joined to one, and not to as many as ``target`` has.
    """
    devices = len(source.mesh.devices)
    sizes, held = _wanted_and_held(source, target)
    shares, left = (math.prod(n for n, _ in layout.shares) for layout in (source, target))
    sharers = target.mesh.coordinates((*target.free, *(a for axes in target.cuts for a in axes)))
    missing = np.maximum(0, np.bincount(sharers, sizes) / left - np.bincount(sharers, held)).sum()
    copies = devices // math.prod(target.mesh.size(axes) for axes in target.cuts)
    sends = min(sends_to_join(shares, copies, left), sends_to_join(shares, copies // left, 1))
    return max(float(missing), math.prod(source.shape) * sends) * itemsize / devices


def pieces_at_least(source: Layout, target: Layout) -> int:
    """In how many pieces a device gets what it wants from those who hold it: all shares of each block that its own
    overlaps."""
    if source.subdims != target.subdims:
        return 1
    parts = [[layout.mesh.size(axes) for axes in layout.cuts] for layout in (source, target)]
    blocks = math.prod(max(1, have // want) for have, want in zip(*parts, strict=True))
    shares, left = (math.prod(n for n, _ in layout.shares) for layout in (source, target))
    return blocks * max(1, shares // left)


def _wanted_and_held(source: Layout, target: Layout) -> tuple[np.ndarray, np.ndarray]:
    """For each position of ``target`` the elements of its block, and how many of them its device holds in ``source``."""
    wanted = _blocks(target)
    sizes = np.prod([stop - start for start, stop in wanted], axis=0) if wanted else np.ones(len(target.mesh.devices))
    place = {d: i for i, d in enumerate(source.mesh.devices)}
    order = [place[d] for d in target.mesh.devices]
    overlap = np.ones(len(order))
    if source.subdims == target.subdims:
        for (start, stop), (low, high) in zip(_blocks(source), wanted, strict=True):
            overlap *= np.maximum(0, np.minimum(stop[order], high) - np.maximum(start[order], low))
    else:
        for ours, theirs in zip(_indices(source), _indices(target), strict=True):
            overlap *= (ours[order] & theirs).sum(1)
    return sizes, overlap


def _indices(layout: Layout) -> list[np.ndarray]:
    """Per dim which of its indices lie in every position's block: (positions, size)."""
    found, blocks = [], iter(_blocks(layout))
    for dim in layout.subdims:
        inside = np.ones((len(layout.mesh.devices), 1), bool)
        for size, (start, stop) in zip(dim, blocks, strict=False):
            index = np.arange(size)
            here = (start[:, None] <= index) & (index < stop[:, None])
            inside = (inside[:, :, None] & here[:, None, :]).reshape(len(inside), -1)
        found.append(inside)
    return found


def _blocks(layout: Layout) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per sub-dim the start and the stop of every position's block."""
    return [layout.bounds(index) for index in range(len(layout.cuts))]


def sends_to_join(shares: int, copies: float, left: int) -> float:
    """Messages that each element needs at the least so that its ``shares`` summands become ``left``.

    One device knows a sum of v summands after v - 1 messages, and each further copy takes one more (gossip with one-way
    calls). So each of the ``left`` sums takes shares / left - 1 messages, and copies / left - 1 more.

    Args:
        copies: the devices that hold the element in the end, as any of the ``left`` sums.
    """
    return shares + copies - 2 * left if shares > left else 0
