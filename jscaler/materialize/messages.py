"""Which device sends which box to which: masks intersected, replicas sharing the load.

Three kinds of value reach a consumer:
- a value that somebody holds comes from the holder that has sent the least so far, or from the device itself;
- shares that one device wants joined come to it one by one;
- shares that several devices want joined are cut among them: each joins its slab and sends it on to the others
  (a reduce-scatter and an all-gather), so that the sum is made once and equal everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jscaler.errors import PlanError
from jscaler.ir.mask import Combiner
from jscaler.materialize.boxes import Box, cut, intersect, merge, overlay, volume, without
from jscaler.materialize.holders import Holders, Owners
from jscaler.materialize.mask_boxes import BoxSide, MaskBox, Shares

Offset = tuple[int, ...]
Join = Literal["set", "add", "max", "min"]


class Target(NamedTuple):
    """Where a device writes a box: output ``buffer`` (1, 2, ...; 0 is what is held), at index + ``offset``."""

    buffer: int
    offset: Offset
    join: Join = "set"


class Message(NamedTuple):
    """A box that goes from a device's buffer ``source`` to one or more buffers of a device, perhaps the same.

    ``step`` 0 reads what is held, 1 what step 0 has joined or spread. ``shares`` says which value of the box it is.
    """

    step: int
    sender: int
    receiver: int
    box: Box
    shares: Shares
    source: int
    offset: Offset
    targets: tuple[Target, ...]


class FilledPart(NamedTuple):
    """A box that starts as what leaves ``combiner`` unchanged."""

    device: int
    box: Box
    combiner: Combiner
    target: Target


Show = Callable[[Box, Shares], str]
MOST_RELAYS = 4096  # messages between receivers: more take longer to start, one after another, than they save


def plan_messages(held: BoxSide, wanted: Sequence[BoxSide], show: Show) -> tuple[list[FilledPart], list[Message]]:
    """Everything that has to be filled, copied and sent. Outputs start as zeros.

    Args:
        held: at most one mask per device.
        wanted: the consumers; buffers are numbered from 1 in their order.
        show: how to write a box in an error.

    Raises:
        PlanError: nobody holds what a device wants, or it is held as shares with different combiners.
    """
    planner = _Planner(Holders(held.fragments), show)
    for buffer, side in enumerate(wanted, 1):
        for want in side.fragments:
            planner.want(want, buffer)
    planner.join()
    messages = planner.fetch()
    sent, received = busiest(messages + planner.relayed)
    if sent > received and _relays_of(messages) <= MOST_RELAYS:  # few hold what many want
        spread = _spread(messages)
        if max(busiest(spread + planner.relayed)) <= 0.75 * sent:
            messages = spread
    return planner.fillings, messages + planner.relayed


def busiest(messages: Sequence[Message]) -> tuple[int, int]:
    """The most elements that one device sends, and that one device receives."""
    load: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for m in messages:
        if m.sender != m.receiver:
            for side, device in zip(load, (m.sender, m.receiver), strict=True):
                side[device] = side.get(device, 0) + volume(m.box)
    return max(load[0].values(), default=0), max(load[1].values(), default=0)


class _Planner:
    """Collects what is wanted, then decides who sends it."""

    def __init__(self, holders: Holders, show: Show):
        self.holders = holders
        self.show = show
        self.fillings: list[FilledPart] = []
        self.relayed: list[Message] = []
        self._joins: dict[Shares, list[tuple[Box, tuple[int, Target]]]] = {}  # values that no single device holds
        self._fetches: dict[tuple[int, Shares], list[tuple[Box, Target]]] = {}  # by receiver and held value
        self._sent: dict[int, int] = dict.fromkeys(sorted(holders.path), 0)

    def want(self, want: MaskBox, buffer: int) -> None:
        """Note one box that a consumer wants."""
        for box, path in self.holders.source(want.shares, want.box):
            others = [share for share in want.shares[len(path) :] if share.position]
            if others:  # another position of these shares takes the value
                self._fill(want.position, box, Target(buffer, want.offset), others[-1].combiner)
                continue
            parts = self.holders.leaves(path, box)
            self._check(want, box, path, parts)
            for piece, leaves in parts:
                if len(leaves) == 1:
                    self._fetch(want.position, leaves, piece, Target(buffer, want.offset))
                else:
                    target = Target(buffer, want.offset, self._combiner(want, piece, path, leaves))
                    self._joins.setdefault(path, []).append((piece, (want.position, target)))

    def _fill(self, device: int, box: Box, target: Target, combiner: Combiner) -> None:
        if combiner != "add":
            self.fillings.append(FilledPart(device, box, combiner, target))

    def _fetch(self, device: int, leaves: Sequence[Shares], box: Box, target: Target) -> None:
        for leaf in leaves:
            self._fetches.setdefault((device, leaf), []).append((box, target))

    def _check(self, want: MaskBox, box: Box, path: Shares, parts: Sequence[tuple[Box, tuple[Shares, ...]]]) -> None:
        if sum(volume(piece) for piece, _ in parts) == volume(box):
            return
        missing = merge(without([box], [piece for piece, _ in parts]))
        raise PlanError(
            f"device {want.position} wants {self.show(want.box, want.shares)}, but nobody holds "
            + ", ".join(self.show(piece, path) for piece in missing[:4])
            + (f" and {len(missing) - 4} boxes more" if len(missing) > 4 else "")
            + " (whole or as all of its shares). Assign an op that produces it to a device of the group, or want less"
        )

    def _combiner(self, want: MaskBox, box: Box, path: Shares, leaves: Sequence[Shares]) -> Combiner:
        combiners: dict[Combiner, None] = {share.combiner: None for leaf in leaves for share in leaf[len(path) :]}
        if len(combiners) > 1:
            raise PlanError(
                f"device {want.position} wants {self.show(box, path)}, which is held as {len(leaves)} nested shares with "
                f"different combiners ({', '.join(combiners)}). Reduce the inner shares first: {' of '.join(combiners)} "
                "does not commute"
            )
        return next(iter(combiners))

    def join(self) -> None:
        """Decide on which devices shares meet."""
        for path, items in self._joins.items():
            for box, takers in overlay(items):
                targets: dict[int, list[Target]] = {}
                for device, target in takers:
                    targets.setdefault(device, []).append(target)
                for piece, leaves in self.holders.leaves(path, box):
                    self._join_box(piece, path, leaves, targets)

    def _join_box(self, box: Box, path: Shares, leaves: tuple[Shares, ...], targets: dict[int, list[Target]]) -> None:
        takers = sorted(targets)
        holding = [device for device in takers if self.holders.path.get(device) in leaves]
        if len(leaves) == 2 and 2 * len(takers) - len(holding) <= len(takers) + (not holding):
            jobs = [(device, box, False) for device in takers]  # a + b = b + a: equal on all, and no more is sent
        else:
            owners = holding or takers
            jobs = [(d, slab, True) for d, slab in zip(owners, cut(box, len(owners)), strict=False)]
        for owner, slab, relay in jobs:
            for target in targets[owner]:
                if target.join != "set":
                    self._fill(owner, slab, target, target.join)
                self._fetch(owner, leaves, slab, target)
            if relay:
                self.relayed += _relays(slab, path, owner, targets)

    def fetch(self) -> list[Message]:
        """Decide who sends, receiver by receiver. What the receiver holds itself becomes a message to itself."""
        found: list[Message] = []
        for (device, path), items in sorted(self._fetches.items(), key=lambda item: item[0][0]):
            for box, targets in overlay(items):
                for sender, offset, piece in self._pieces(device, path, box):
                    found.append(Message(0, sender, device, piece, path, 0, offset, targets))
        return found

    def _pieces(self, device: int, path: Shares, box: Box) -> list[tuple[int, Offset, Box]]:
        """``box`` in pieces that one device holds: (device, offset in its buffer, piece)."""
        hits = self.holders.at(path, box)
        if self.holders.disjoint(path, box):
            return [(*self._sender(device, owners, piece), piece) for piece, owners in hits]
        own = [(owners[device], piece) for piece, owners in hits if device in owners]
        found = [(device, offset, piece) for offset, piece in own]
        return found + self._carve(device, without([box], [piece for _, piece in own]), hits)

    def _carve(self, device: int, rest: list[Box], hits: Sequence[tuple[Box, Owners]]) -> list[tuple[int, Offset, Box]]:
        """Overlapping boxes: the least busy holder gives all it can, then the next one."""
        taken: dict[tuple[int, Offset], list[Box]] = {}
        left = list(hits)
        while rest:
            gifts = [[common for r in rest if (common := intersect(r, box))] for box, _ in left]
            loads = [min(self._sent[holder] for holder in owners) for _, owners in left]
            sizes = [sum(map(volume, gift)) for gift in gifts]
            i = min((i for i, size in enumerate(sizes) if size), key=lambda i: (loads[i], -sizes[i], i))
            pieces, (_, owners) = merge(gifts[i]), left.pop(i)
            for piece in pieces:
                taken.setdefault(self._sender(device, owners, piece), []).append(piece)
            rest = without(rest, pieces)
        return [(*sender, piece) for sender, pieces in taken.items() for piece in merge(pieces)]

    def _sender(self, device: int, owners: Owners, piece: Box) -> tuple[int, Offset]:
        """The device itself, or the holder that has sent the least."""
        if device in owners:
            return device, owners[device]
        sender = min(owners, key=lambda holder: (self._sent[holder], holder))
        self._sent[sender] += volume(piece)
        return sender, owners[sender]


def _relays(box: Box, shares: Shares, owner: int, targets: dict[int, list[Target]]) -> list[Message]:
    """``owner`` sends what it has in its first output to the other devices."""
    source = targets[owner][0]
    return [
        Message(1, owner, device, box, shares, source.buffer, source.offset, tuple(map(_set, found)))
        for device, found in targets.items()
        if device != owner
    ]


def _set(target: Target) -> Target:
    return target if target.join == "set" else target._replace(join="set")


def _by_box(messages: Sequence[Message]) -> dict[tuple[Box, Shares], list[Message]]:
    """What is sent as it is, by what it is."""
    groups: dict[tuple[Box, Shares], list[Message]] = {}
    for m in messages:
        if m.sender != m.receiver and all(target.join == "set" for target in m.targets):
            groups.setdefault((m.box, m.shares), []).append(m)
    return groups


def _relays_of(messages: Sequence[Message]) -> int:
    """How many messages it takes if receivers hand on to one another."""
    return sum(len(group) ** 2 for group in _by_box(messages).values())


def _spread(messages: Sequence[Message]) -> list[Message]:
    """Where few devices hold what many want: each receiver gets a slab and sends it on to the other receivers."""
    groups = _by_box(messages)
    relayed: list[Message] = []
    result = [m for m in messages if m.sender == m.receiver or any(target.join != "set" for target in m.targets)]
    for (box, shares), group in groups.items():
        if len({m.sender for m in group}) == len(group):
            result += group
            continue
        targets = {m.receiver: list(m.targets) for m in group}
        for m, slab in zip(group, cut(box, len(group)), strict=False):
            result.append(m._replace(box=slab))
            relayed += _relays(slab, shares, m.receiver, targets)
    return result + relayed
