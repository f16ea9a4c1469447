"""The transitions between layouts on one device group. Their costs are those of a `clusters.CostModel`.

    D -> R   all_gather      V -> R   all_reduce       R -> D   slice        D -> D   all_to_all
                             V -> D   reduce_scatter   R -> V   value_mask   any -> any of equal parts   permute

Only a suffix of a dim's axes can be gathered or exchanged, and new axes go last: blocks stay contiguous. A permute
sends whole blocks from device to device: it relabels axes, and carries a layout to another device order, in one hop.
A point-to-point exchange (``regions``) sends pieces of blocks; it connects any two layouts.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jscaler.clusters.cost_model import CostModel, Line
from jscaler.clusters.transition_kinds import COLLECTIVES, Kind, TransitionKind
from jscaler.ir.mask import Combiner, Mask
from jscaler.materialize.layout import Layout, Values, on_devices
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.materialize.point_to_point import Holding, PointToPoint, plan_regions

MOST_JOINED = 3  # value axes up to which every order of a joint reduce-scatter is tried


class State(NamedTuple):
    """What of a layout a transition changes; the search walks over these."""

    cuts: tuple[Axes, ...]
    values: Values


class Transition(NamedTuple):
    """One step of an adapter.

    Attributes:
        kind: the collective or local step.
        axes: the mesh axes it runs along, major first; none for a permute and a point-to-point exchange.
        source: the sub-dim that loses the axes, where there is one.
        target: the sub-dim that gains them, where there is one.
        combiner: how value shares are joined or made.
        to: the layout after a permute or a point-to-point exchange.
    """

    kind: Kind
    axes: Axes = ()
    source: int | None = None
    target: int | None = None
    combiner: Combiner = "add"
    to: Layout | None = None

    def bytes(self, layout: Layout, itemsize: int) -> float:
        """Bytes that each device sends (in the mean) when this is applied to ``layout``."""
        if self.to is not None:
            return sum(len(r.pairs) * r.size for r in rounds_of(layout, self)) * itemsize / len(layout.mesh.devices)
        return self.line.sent(layout.mesh.size(self.axes)) * (math.prod(layout.local_sizes) * itemsize)

    def apply(self, layout: Layout) -> Layout:
        """The layout after this transition."""
        if self.to is not None:
            return self.to
        after = advance(layout.mesh.names, State(layout.cuts, layout.values), self)
        return dataclasses.replace(layout, cuts=after.cuts, values=after.values)

    @property
    def line(self) -> TransitionKind:
        """What is known of its kind."""
        return COLLECTIVES[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} to {self.to}" if self.to is not None else f"{self.kind} over {'·'.join(self.axes)}"


def advance(names: Axes, state: State, step: Transition) -> State:
    """``state`` after a collective or local step."""
    cuts, values = state
    if step.source is not None:
        keep = len(cuts[step.source]) - len(step.axes)
        assert cuts[step.source][keep:] == step.axes, f"{step} takes more than a suffix of {cuts[step.source]}"
        cuts = (*cuts[: step.source], cuts[step.source][:keep], *cuts[step.source + 1 :])
    if step.target is not None:
        cuts = (*cuts[: step.target], cuts[step.target] + step.axes, *cuts[step.target + 1 :])
    if step.line.shares == "joined":
        values = tuple(v for v in values if v[0] not in step.axes)
    if step.line.shares == "made":
        for axis in step.axes:
            depth = _depth(names, values, axis)
            made: Values = ((axis, step.combiner),)
            values = values[:depth] + made + values[depth:]
    return State(cuts, values)


def price_of(layout: Layout, step: Transition, itemsize: int, cost: CostModel) -> float:
    """What ``step`` costs in the model's unit when it is applied to ``layout``."""
    if step.to is None:
        return line_of(layout.mesh, step, cost).at(math.prod(layout.local_sizes) * itemsize)
    prices = (cost.messages(r.pairs, r.size * itemsize, len(layout.mesh.devices)) for r in rounds_of(layout, step))
    return sum(prices, 0.0 if step.kind == "permute" else cost.local_step)


def line_of(mesh: DeviceMesh, step: Transition, cost: CostModel) -> Line:
    """The cost of a collective or local step against the bytes of the local part before it."""
    sent = step.line.sent(mesh.size(step.axes))
    line = cost.collective(step.kind, mesh.groups(step.axes)) if sent else Line(cost.local_step, 0.0)
    return Line(line.fixed, line.per_byte * sent)


def steps_from(mesh: DeviceMesh, sizes: tuple[int, ...], state: State) -> Iterator[Transition]:
    """Every collective and local step from ``state``, of a tensor whose sub-dims are ``sizes``.

    All-reduces run over any set of value axes, gathers and exchanges over any suffix, since one collective over several
    axes sends less (or the same in one step). So do reduce-scatters, in every order of up to ``MOST_JOINED`` axes; of
    more, over each one and over all in their order.
    """
    table = dict(mesh.axes)
    local = [size // math.prod(table[a] for a in axes) for size, axes in zip(sizes, state.cuts, strict=True)]
    yield from _reductions(table, local, state)
    for source, axes in enumerate(state.cuts):
        for start in range(len(axes)):
            suffix = axes[start:]
            parts = math.prod(table[a] for a in suffix)
            yield Transition("all_gather", suffix, source)
            for target, size in enumerate(local):
                if target != source and size % parts == 0:
                    yield Transition("all_to_all", suffix, source, target)
    used = {a for axes in state.cuts for a in axes} | {a for a, _ in state.values}
    for axis in mesh.names:
        if axis in used:
            continue
        for target, size in enumerate(local):
            if size % table[axis] == 0:
                yield Transition("slice", (axis,), target=target)
        inside = {combiner for _, combiner in state.values[_depth(mesh.names, state.values, axis) :]}
        for combiner in ("add", "max", "min"):
            if inside <= {combiner}:  # shares of another combiner that lie inside are made after it
                yield Transition("value_mask", (axis,), combiner=combiner)


def _depth(names: Axes, values: Values, axis: str) -> int:
    """Where shares along ``axis`` nest among ``values``: outside of those along more minor axes."""
    depth = len(values)
    while depth and names.index(values[depth - 1][0]) > names.index(axis):
        depth -= 1
    return depth


def _reductions(table: dict[str, int], local: list[int], state: State) -> Iterator[Transition]:
    if not state.values:
        return
    combiner = state.values[-1][1]  # shares of shares are joined from the inside
    inner = tuple(a for a, _ in itertools.takewhile(lambda v: v[1] == combiner, reversed(state.values)))[::-1]
    for count in range(1, len(inner) + 1):
        for some in itertools.combinations(inner, count):
            yield Transition("all_reduce", some, combiner=combiner)
    for count in range(1, len(inner) + 1 if len(inner) <= MOST_JOINED else 2):
        for some in itertools.permutations(inner, count):
            parts = math.prod(table[a] for a in some)
            for target, size in enumerate(local):
                if size % parts == 0:
                    yield Transition("reduce_scatter", some, target=target, combiner=combiner)
    if len(inner) > MOST_JOINED:
        parts = math.prod(table[a] for a in inner)
        for target, size in enumerate(local):
            if size % parts == 0:
                yield Transition("reduce_scatter", inner, target=target, combiner=combiner)


class Round(NamedTuple):
    """Messages that are sent at once: (messages, 2) device numbers of sender and receiver, and the elements of each."""

    pairs: np.ndarray
    size: int


def rounds_of(layout: Layout, step: Transition) -> list[Round]:
    """The messages of a permute, which is one round, or of a point-to-point exchange."""
    assert step.to is not None
    if step.kind == "permute":
        return [Round(moves(layout, step.to), math.prod(layout.local_sizes))]
    numbers = layout.mesh.numbers
    return [Round(numbers[np.array(r.pairs)], r.size) for r in regions_between(layout, step.to).rounds]


def moves(before: Layout, after: Layout) -> np.ndarray:
    """The messages of a permute: (messages, 2) device numbers of sender and receiver.

    Devices that hold what they will need keep it; the others are paired in the order of their device numbers.
    """
    held, wanted = (layout.blocks()[layout.mesh.positions] for layout in (before, after))
    numbers = before.mesh.numbers[before.mesh.positions]
    moving = np.flatnonzero(held != wanted)
    senders = moving[np.argsort(held[moving], kind="stable")]
    receivers = moving[np.argsort(wanted[moving], kind="stable")]
    assert (held[senders] == wanted[receivers]).all(), f"{before} and {after} do not have the same parts"
    return np.stack([numbers[senders], numbers[receivers]], axis=1)


def union_of(before: Layout, after: Layout) -> tuple[int, ...]:
    """The devices of both layouts: those of ``before`` in its order, then the others."""
    return tuple(dict.fromkeys((*before.mesh.devices, *after.mesh.devices)))


@lru_cache(maxsize=1024)
def regions_between(before: Layout, after: Layout) -> PointToPoint:
    """The messages of a point-to-point exchange between two layouts; positions are those of ``union_of`` both.

    Layouts over the same sub-dims are exchanged sub-dim by sub-dim, so that each may be padded for itself. What a device of
    both holds, no device of ``before`` alone sends.
    """
    numbers = {device: position for position, device in enumerate(union_of(before, after))}
    return _regions(on_devices(before, numbers), on_devices(after, numbers))


@lru_cache(maxsize=1024)
def _regions(before: Layout, after: Layout) -> PointToPoint:
    """`regions_between` layouts whose devices are called by their positions."""
    flat = before.subdims == after.subdims
    held = [Holding(i, _flat(before.mask(i), flat)) for i in range(len(before.mesh.devices))]
    inside = set(after.mesh.devices)
    if 0 < len(inside.intersection(before.mesh.devices)) < len(held):
        near = {h.mask for h in held if h.position in inside}
        held = [h for h in held if h.mask not in near or h.position in inside]
    wanted = [Holding(d, _flat(after.mask(i), flat)) for i, d in enumerate(after.mesh.devices)]
    return plan_regions(before.sizes if flat else before.shape, held, [wanted], len(union_of(before, after)))


def _flat(mask: Mask, flat: bool) -> Mask:
    """``mask`` with every sub-dim as a dim."""
    if not flat:
        return mask
    sizes = tuple((size,) for dim in mask.subdims for size in dim)
    return Mask(sizes, tuple((interval,) for dim in mask.box for interval in dim), mask.shares)
