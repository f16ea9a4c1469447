"""Irregular redistribution: any held masks to any wanted masks, as rounds of messages between the devices of a group.

Uneven parts, halos, parts of stacked parameters, sizes that do not divide, refinements that share no boundary, nested
value shares. Masks are intersected into messages (``messages``), messages of one shape are dealt to rounds (``rounds``):
in a round each device sends at most one piece and receives at most one, which is one ``lax.ppermute``.

    held 0:3 | 3:6 | 6:8, wanted with a halo of one on each side       shape (1,), two rounds
    wanted 0:4 | 2:7 | 5:8                                             d0 -> d1, d1 -> d2 | d1 -> d0, d2 -> d1
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.ir.mask import Combiner, Mask, SubDims
from jscaler.materialize.boxes import Box, extents
from jscaler.materialize.mask_boxes import Holding, Shares, fragment
from jscaler.materialize.messages import FilledPart, Join, Message, Target, plan_messages
from jscaler.materialize.rounds import color_rounds

__all__ = ["BoxMove", "Fill", "Holding", "PointToPoint", "Write", "plan_regions"]

Index = tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """Where the devices write a piece.

    Attributes:
        buffer: the output, from 1.
        join: "set", or the combiner that joins the piece to what stands there.
        starts: per device the index of the piece in the buffer's view.
        active: per device whether it writes at all.
    """

    buffer: int
    join: Join
    starts: tuple[Index, ...]
    active: tuple[bool, ...]


@dataclass(frozen=True)
class BoxMove:
    """A piece of one shape on every device: read, sent to another device unless ``pairs`` is empty, written.

    Attributes:
        shape: of the piece, over the view's sub-dims.
        source: the buffer that is read: 0 is what is held, from 1 on the outputs.
        starts: per device the index of the piece in the source's view.
        pairs: (sender, receiver); no device is sender twice or receiver twice.
        writes: at most one per output buffer and device.
    """

    shape: Index
    source: int
    starts: tuple[Index, ...]
    pairs: tuple[tuple[int, int], ...]
    writes: tuple[Write, ...]

    @property
    def size(self) -> int:
        """Number of elements of the piece."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fill:
    """A box that starts as the neutral element of ``combiner``."""

    shape: Index
    combiner: Combiner
    write: Write


@dataclass(frozen=True)
class PointToPoint:
    """What the devices do, in this order: fills, copies, rounds. Outputs start as zeros.

    Attributes:
        num_devices: the size of the group.
        shapes: the buffers' shapes, equal on all devices: what is held, then one output per consumer.
        views: the buffers' shapes over common sub-dims, in which pieces are counted.
    """

    num_devices: int
    shapes: tuple[Index, ...]
    views: tuple[Index, ...]
    fills: tuple[Fill, ...]
    copies: tuple[BoxMove, ...]
    rounds: tuple[BoxMove, ...]

    def __str__(self) -> str:
        lines = [
            f"{len(self.fills)} fills, {len(self.copies)} copies, {len(self.rounds)} rounds on {self.num_devices} devices"
        ]
        for r in self.rounds:
            source = "held" if r.source == 0 else f"output {r.source}"
            lines.append(f"{r.shape} of {source}: " + ", ".join(f"{a} -> {b}" for a, b in r.pairs))
        return "\n".join(lines)


def plan_regions(
    shape: tuple[int, ...], held: Sequence[Holding], wanted: Sequence[Sequence[Holding]], num_devices: int
) -> PointToPoint:
    """Plan the messages that turn what is held into what is wanted.

    Args:
        shape: the tensor's shape.
        held: at most one mask per device; a device that is not named holds nothing.
        wanted: per consumer (one output buffer each) at most one mask per device.
        num_devices: the size of the group; positions are below it.

    Returns:
        Data only. ``lower.emit_point_to_point.run_regions`` runs it.

    Raises:
        PlanError: nobody holds what a device wants, or it is held as shares with different combiners.

    Example:
        >>> half = [Mask(((4,),), (((0, 2),),)), Mask(((4,),), (((2, 4),),))]
        >>> regions = plan_regions((4,), [Holding(d, half[d]) for d in (0, 1)], [[Holding(0, Mask.whole((4,)))]], 2)
        >>> print(regions)
        0 fills, 1 copies, 1 rounds on 2 devices
        (2,) of held: 1 -> 0
    """
    for side in (held, *wanted):
        positions = [holding.position for holding in side]
        assert len(set(positions)) == len(positions), f"one mask per device: {positions}"
        assert all(0 <= position < num_devices for position in positions), f"{positions} of {num_devices} devices"
    subdims, sides = fragment(shape, [held, *wanted])
    fillings, messages = plan_messages(sides[0], sides[1:], functools.partial(_show, subdims))
    copies, rounds = _moves(messages, num_devices)
    return PointToPoint(
        num_devices,
        tuple(side.shape for side in sides),
        tuple(side.view for side in sides),
        _fills(fillings, num_devices),
        copies,
        rounds,
    )


def _show(subdims: SubDims, box: Box, shares: Shares) -> str:
    rest = iter(box)
    return str(Mask(subdims, tuple(tuple(next(rest) for _ in dim) for dim in subdims), shares))


def _moves(messages: Sequence[Message], num_devices: int) -> tuple[tuple[BoxMove, ...], tuple[BoxMove, ...]]:
    """Copies on the devices, and rounds: one shape and one source buffer each, by step."""
    groups: dict[tuple[bool, int, int, Index], list[Message]] = {}
    for m in messages:
        groups.setdefault((m.sender != m.receiver, m.step, m.source, extents(m.box)), []).append(m)
    copies: list[BoxMove] = []
    rounds: list[BoxMove] = []
    for (sent, _, source, shape), group in sorted(groups.items(), key=lambda item: item[0][:2]):
        for chosen in color_rounds([(m.sender, m.receiver) for m in group]):
            move = _move(shape, source, [group[i] for i in chosen], sent, num_devices)
            (rounds if sent else copies).append(move)
    return tuple(copies), tuple(rounds)


def _move(shape: Index, source: int, messages: Sequence[Message], sent: bool, num_devices: int) -> BoxMove:
    found: dict[tuple[int, Join], list[tuple[int, Box, Target]]] = {}
    for m in messages:
        for target in m.targets:  # the device's own share comes first: it is set, and the others are joined to it
            found.setdefault((target.buffer, target.join if sent else "set"), []).append((m.receiver, m.box, target))
    starts = {m.sender: _start(m.box, m.offset) for m in messages}
    pairs = tuple((m.sender, m.receiver) for m in messages) if sent else ()
    writes = tuple(_write(buffer, join, places, num_devices) for (buffer, join), places in found.items())
    return BoxMove(shape, source, _table(starts, num_devices), pairs, writes)


def _write(buffer: int, join: Join, places: Sequence[tuple[int, Box, Target]], num_devices: int) -> Write:
    starts = {device: _start(box, target.offset) for device, box, target in places}
    assert len(starts) == len(places), f"a device writes twice at once: {places}"
    return Write(buffer, join, _table(starts, num_devices), tuple(device in starts for device in range(num_devices)))


def _fills(fillings: Sequence[FilledPart], num_devices: int) -> tuple[Fill, ...]:
    groups: dict[tuple[Index, Combiner, int, int], list[tuple[int, Box, Target]]] = {}
    repeat: dict[tuple[Index, Combiner, int, int], int] = {}
    for f in fillings:
        key = (extents(f.box), f.combiner, f.target.buffer, f.device)
        repeat[key] = repeat.get(key, -1) + 1
        groups.setdefault((*key[:3], repeat[key]), []).append((f.device, f.box, f.target))
    return tuple(
        Fill(shape, combiner, _write(buffer, "set", places, num_devices))
        for (shape, combiner, buffer, _), places in groups.items()
    )


def _start(box: Box, offset: Index) -> Index:
    return tuple([start + o for (start, _), o in zip(box, offset, strict=True)])


def _table(starts: dict[int, Index], num_devices: int) -> tuple[Index, ...]:
    """One row per device. Devices without a part in it repeat another's row, so that often all rows are equal."""
    spare = next(iter(starts.values()))
    return tuple([starts.get(device, spare) for device in range(num_devices)])
