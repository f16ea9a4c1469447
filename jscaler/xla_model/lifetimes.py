"""When buffers live: a sweep over the kernels of a block, and of the loops in it.

A buffer lives from the kernel that writes it to the last that reads it. A result may be written over an operand that
dies there: of an elementwise kernel one of its size, of a scatter or a collective the one that it changes. A loop holds
its carries and the stacks that it writes while it runs, and the most that one iteration needs beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jscaler.lower.flat_program import Item
from jscaler.xla_model.block import Aliases, Block, Inner, Kernel, Value
from jscaler.xla_model.kernel_order import ordered, siblings_together
from jscaler.xla_model.kernels import kernels_of

WORKSPACE = 4 << 20  # bytes that a matrix product of XLA on GPUs has beside its operands and its result
SCRATCH = "temporary"  # the kind of a workspace, and of a buffer of which nobody says more

KindOf = Callable[[Value], str]


@dataclass(frozen=True)
class Moment:
    """One kernel of the program's order.

    Attributes:
        name, op: its primitive, and the path of its op.
        nbytes: of all buffers that live while it runs; what the block was given is not counted.
        kinds: the same by the kind of buffer.
        item: of the flat program, that it comes from.
    """

    name: str
    op: str
    nbytes: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    item: Item | None = field(default=None, compare=False, repr=False)


class Span(NamedTuple):
    """A buffer from the first moment of the timeline at which it is held to the last."""

    value: Value
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Lifetimes:
    """The memory that a block needs beside its inputs.

    Attributes:
        peak: bytes at the worst moment.
        moment: its index in the timeline.
        live: the buffers that live then, largest first.
        timeline: bytes at each kernel; of a loop those of one iteration.
        spans: of all buffers, also of those in loops, which lie at the moments of one iteration.
    """

    peak: int
    moment: int
    live: tuple[Value, ...]
    timeline: tuple[Moment, ...]
    spans: tuple[Span, ...] = ()


def lifetimes(
    block: Block,
    over: Mapping[Value, Value] | None = None,
    kind_of: KindOf = lambda value: SCRATCH,
    as_written: bool = False,
) -> Lifetimes:
    """Follow the buffers of ``block``.

    Args:
        over: output -> the input whose buffer it may take, once nobody reads that any more (a donated argument).
        kind_of: the kind that a buffer is counted with in the timeline.
        as_written: whether kernels run in the order of the program, although XLA may have another.
    """
    fenced = as_written or any(step.is_fence for step in block.steps)
    order = ordered(kernels_of(block), _outputs(block), fenced)
    kernels = _slices_late(block, siblings_together(order, block.steps))
    last = last_reads(block, kernels)
    arguments = dict(over or {})
    live = _Live(kind_of)
    timeline: list[Moment] = []
    peak, moment, worst = 0, 0, dict[Value, int]()
    for position, kernel in enumerate(kernels):
        dying = {v for v in kernel.reads if last[v] == position}
        now = len(timeline)
        for value in kernel.writes:
            free = value in arguments and last.get(arguments[value], -1) <= position
            live.hold(value, 0 if free else value.nbytes, now)
        for value, operand in kernel.over:
            if operand in dying and live.bytes.get(operand) == live.bytes[value] == value.nbytes:
                live.drop(operand, now - 1)  # its buffer is the result's
        scratch = WORKSPACE if kernel.step.is_product else 0
        here, kinds = live.total + scratch, _added(live.kinds, {SCRATCH: scratch})
        inner = (_iteration(one, kind_of, as_written) for one in kernel.step.inner)
        inside = max(inner, key=lambda found: found.peak, default=None)
        reached, at, more = here, now, {}
        if inside is not None and inside.timeline:
            timeline += [Moment(m.name, m.op, here + m.nbytes, _added(kinds, m.kinds), m.item) for m in inside.timeline]
            reached, at = here + inside.peak, at + inside.moment
            more = {v: v.nbytes for v in inside.live}
            live.spans += [Span(s.value, s.nbytes, now + s.first, now + s.last) for s in inside.spans]
        else:
            timeline.append(Moment(kernel.step.name, kernel.step.op, here, kinds, kernel.step.item))
        if reached > peak:
            peak, moment, worst = reached, at, live.bytes | more
        for value in (*dying, *kernel.writes):
            if last.get(value, position) <= position:
                live.drop(value, len(timeline) - 1)
    for value in tuple(live.bytes):
        live.drop(value, len(timeline) - 1)
    held_longest = sorted((v for v, nbytes in worst.items() if nbytes), key=lambda v: -v.nbytes)
    return Lifetimes(peak, moment, tuple(held_longest), tuple(timeline), tuple(live.spans))


@dataclass
class _Live:
    """The buffers that are held, and their sum, which is kept up: a step has more buffers than change at a time."""

    kind_of: KindOf
    bytes: dict[Value, int] = field(default_factory=dict)
    begun: dict[Value, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def hold(self, value: Value, nbytes: int, now: int) -> None:
        """From the moment ``now`` on."""
        self._add(value, nbytes - self.bytes.get(value, 0))
        self.bytes[value], self.begun[value] = nbytes, now

    def drop(self, value: Value, now: int) -> None:
        """Behind the moment ``now``."""
        nbytes = self.bytes.pop(value, 0)
        self._add(value, -nbytes)
        if nbytes:
            self.spans.append(Span(value, nbytes, self.begun[value], now))

    def _add(self, value: Value, nbytes: int) -> None:
        if nbytes:
            kind = self.kind_of(value)
            self.kinds[kind] = self.kinds.get(kind, 0) + nbytes
            self.total += nbytes


def _added(some: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {kind: total for kind in {**some, **more} if (total := some.get(kind, 0) + more.get(kind, 0))}


def last_reads(block: Block, kernels: Sequence[Kernel]) -> dict[Value, int]:
    """The last kernel that reads each buffer; of an output, one past the end."""
    last: dict[Value, int] = {}
    for position, kernel in enumerate(kernels):
        last.update(dict.fromkeys(kernel.reads, position))
    last.update(dict.fromkeys(_outputs(block), len(kernels)))
    return last


def _outputs(block: Block) -> tuple[Value, ...]:
    aliases = Aliases()
    for step in block.steps:
        if step.kind == "alias":
            aliases.add(step)
    return aliases.all(block.outputs)


def _iteration(inner: Inner, kind_of: KindOf, as_written: bool) -> Lifetimes:
    """What an iteration needs beside the carries and the stacks: what a carry becomes may be written over what it was."""
    over = {out: inside for _, inside, out, _ in inner.carries if out is not None}
    return lifetimes(inner.block, over, kind_of, as_written)


def _slices_late(block: Block, kernels: Sequence[Kernel]) -> list[Kernel]:
    """``kernels`` with each slice of what the block was given in front of its first reader."""
    given = set(block.inputs)
    found: list[Kernel] = []
    waiting: dict[Value, Kernel] = {}
    for kernel in kernels:
        if kernel.step.name == "dynamic_slice" and given.issuperset(kernel.reads):
            waiting.update(dict.fromkeys(kernel.writes, kernel))
            continue
        for value in kernel.reads:
            if value in waiting:
                found.append(waiting.pop(value))
        found.append(kernel)
    return found + list({id(kernel): kernel for kernel in waiting.values()}.values())  # what nobody reads here
