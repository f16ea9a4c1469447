"""``Loop``: a ``lax.scan`` opened into ops, and the tree that ops and loops form.

The ops of a loop's body stand once in the graph, next to each other; each says by ``op.loop`` where it belongs. What they
compute is done ``length`` times. A body reads tensors from outside as they are, and has these PTensors of its own:

    init ──► inside ─┐                 ┌─► out ──► final          a carry: ``inside`` is the last iteration's ``out``
    stack ─► slice ──┴──► body ops ────┴─► slice ─► stack         stacks have one dim more, in front
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jscaler.ir.op import Op
from jscaler.ir.overview import clipped
from jscaler.ir.tensor import PTensor


@dataclass(frozen=True)
class Carry:
    """A value that each iteration takes from the one before.

    Attributes:
        init, final: before the first and after the last iteration.
        inside, out: what an iteration takes, and what it leaves.
        is_sum: whether it only adds up a gradient, so that its value shares may stay apart until the loop has ended.
    """

    init: PTensor
    inside: PTensor
    out: PTensor
    final: PTensor
    is_sum: bool = False

    @property
    def tensors(self) -> tuple[PTensor, ...]:
        return self.init, self.inside, self.out, self.final


@dataclass(frozen=True)
class Stacked:
    """A tensor with a dim of iterations in front, and the slice of it that one iteration reads or writes.

    Attributes:
        saved: whether it is written for a backward loop alone.
    """

    stack: PTensor
    slice: PTensor
    saved: bool = False


@dataclass(frozen=True)
class Loop:
    """A loop over the ops that name it.

    Attributes:
        name: unique in its graph.
        length: number of iterations.
        reverse: whether the last slices come first.
        carries: values handed from iteration to iteration.
        xs, ys: the stacks it reads and those it writes.
        parent: the name of the loop that this one stands in.
        unroll: how many iterations ``lax.scan`` writes out.
        forward: on a backward loop, the loop that it differentiates.
        again: whether it computes a loop again, for a backward pass.
        time: on a loop over parts of ops, the name of the time axis.
        turns: how many of these parts an iteration runs, one after another.
    """

    name: str
    length: int
    reverse: bool = False
    carries: tuple[Carry, ...] = ()
    xs: tuple[Stacked, ...] = ()
    ys: tuple[Stacked, ...] = ()
    parent: str | None = None
    unroll: int | bool = 1
    forward: str | None = None
    again: bool = False
    time: str = ""
    turns: int = 1

    @property
    def parts(self) -> int:
        """How many parts of ops a loop over these runs."""
        return self.length * self.turns

    @property
    def inner(self) -> tuple[PTensor, ...]:
        """The tensors that only its body sees, other than its ops' results."""
        return (*(c.inside for c in self.carries), *(x.slice for x in self.xs))

    @property
    def results(self) -> tuple[PTensor, ...]:
        """What the loop leaves behind."""
        return (*(c.final for c in self.carries), *(y.stack for y in self.ys))

    @property
    def operands(self) -> tuple[PTensor, ...]:
        """What it takes from outside, beside what its ops read there."""
        return (*(c.init for c in self.carries), *(x.stack for x in self.xs))

    @property
    def returned(self) -> tuple[PTensor, ...]:
        """What an iteration leaves."""
        return (*(c.out for c in self.carries), *(y.slice for y in self.ys))

    def mapped(self, new: Callable[[PTensor], PTensor]) -> "Loop":
        """It has other tensors throughout."""
        carries = tuple(Carry(new(c.init), new(c.inside), new(c.out), new(c.final), is_sum=c.is_sum) for c in self.carries)
        xs, ys = (
            tuple(dataclasses.replace(s, stack=new(s.stack), slice=new(s.slice)) for s in found)
            for found in (self.xs, self.ys)
        )
        return dataclasses.replace(self, carries=carries, xs=xs, ys=ys)

    def renamed(self, outside: Mapping[PTensor, PTensor], inside: Mapping[PTensor, PTensor]) -> "Loop":
        """It takes other tensors ``outside``, and its iterations leave other tensors of those ``inside``."""
        carries = tuple(
            dataclasses.replace(c, init=outside.get(c.init, c.init), out=inside.get(c.out, c.out)) for c in self.carries
        )
        xs = tuple(dataclasses.replace(x, stack=outside.get(x.stack, x.stack)) for x in self.xs)
        ys = tuple(dataclasses.replace(y, slice=inside.get(y.slice, y.slice)) for y in self.ys)
        return dataclasses.replace(self, carries=carries, xs=xs, ys=ys)

    def __repr__(self) -> str:
        return clipped(f"Loop({self})")

    def __str__(self) -> str:
        order = " from the last" if self.reverse else ""
        return f"{self.name}: {self.length} times{order}, {len(self.carries)} carries"


@dataclass(frozen=True)
class Nest:
    """A loop, and what stands in it, in order."""

    loop: Loop
    items: "tuple[Op | Nest, ...]" = field(default=())

    def tensors(self) -> Iterator[PTensor]:
        """All that is defined inside."""
        yield from self.loop.inner
        for item in self.items:
            yield from made_by(item)

    def ops(self) -> Iterator[Op]:
        """The ops inside, at any depth."""
        for item in self.items:
            if isinstance(item, Op):
                yield item
            else:
                yield from item.ops()

    def reads(self) -> Iterator[PTensor]:
        """All that is read by it or inside it, wherever it comes from."""
        yield from self.loop.operands
        yield from self.loop.returned
        for item in self.items:
            yield from reads_of(item)


Item = Op | Nest


def reads_of(item: Item) -> Iterable[PTensor]:
    """All that an item reads, inside of it too."""
    return item.inputs if isinstance(item, Op) else item.reads()


def made_by(item: Item) -> Iterable[PTensor]:
    """All that an item defines, inside of it too."""
    return item.outputs if isinstance(item, Op) else (*item.tensors(), *item.loop.results)


def item_name(item: Item) -> str:
    """An op's path, or a loop's name."""
    return item.path if isinstance(item, Op) else item.loop.name


def nested(ops: Iterable[Op], loops: Mapping[str, Loop]) -> tuple[Item, ...]:
    """Ops in execution order as a tree; the ops of a loop stand next to each other."""
    top: list[Item] = []
    open_loops: list[tuple[str, list[Item]]] = []  # outermost first

    def close(depth: int) -> None:
        while len(open_loops) > depth:
            name, items = open_loops.pop()
            (open_loops[-1][1] if open_loops else top).append(Nest(loops[name], tuple(items)))

    closed: set[str] = set()
    for op in ops:
        chain = chain_of(op.loop, loops)
        common = 0
        while common < min(len(chain), len(open_loops)) and open_loops[common][0] == chain[common]:
            common += 1
        closed.update(name for name, _ in open_loops[common:])
        close(common)
        for name in chain[common:]:
            assert name not in closed, f"the ops of loop '{name}' are torn apart by '{op.path}'"
            open_loops.append((name, []))
        (open_loops[-1][1] if open_loops else top).append(op)
    close(0)
    return tuple(top)


def chain_of(name: str | None, loops: Mapping[str, Loop]) -> tuple[str, ...]:
    """The loops around a place, outermost first."""
    chain: list[str] = []
    while name is not None:
        chain.append(name)
        name = loops[name].parent
    return tuple(chain[::-1])


def in_time(op: Op, loops: Mapping[str, Loop]) -> str:
    """The time axes whose parts an op runs for, outermost first: ``microbatch:8 co_shard:4``."""
    around = (loops[name] for name in chain_of(op.loop, loops))
    return " ".join(f"{loop.time}:{loop.parts}" for loop in around if loop.time)


def inside(items: tuple[Item, ...], chain: Iterable[str]) -> tuple[Item, ...]:
    """The items in the innermost of the loops ``chain``, outermost first."""
    for name in chain:
        items = next(item.items for item in items if isinstance(item, Nest) and item.loop.name == name)
    return items


def flat(items: Iterable[Item]) -> Iterator[Op]:
    """The ops of a tree in order."""
    for item in items:
        if isinstance(item, Op):
            yield item
        else:
            yield from item.ops()


def nests(items: Iterable[Item]) -> Iterator[Nest]:
    """The loops of a tree, each in front of those in it."""
    for item in items:
        if isinstance(item, Nest):
            yield item
            yield from nests(item.items)
