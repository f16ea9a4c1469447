"""``Work``: what a device computes and moves through its memory, kernel by kernel, and how long that takes.

A kernel takes as long as its arithmetic, or as its bytes through memory, whichever is longer (Williams, Waterman,
Patterson: Roofline, 2009). What is fused into a kernel counts with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jax.extend import core

from jscaler.capture.jaxprs import make_jaxpr
from jscaler.clusters.device import DeviceKind
from jscaler.ir.walk import grouped
from jscaler.lower.flat_program import Item
from jscaler.xla_model.block import Block, BlockStep, Inner, Kernel, Value
from jscaler.xla_model.flops import NO_PRODUCTS, Flops
from jscaler.xla_model.kernels import kernels_of
from jscaler.xla_model.rows import in_rows
from jscaler.xla_model.to_block import Blocks

Moves = tuple[tuple[Value, int], ...]


@dataclass(frozen=True)
class KernelWork:
    """One kernel, and how often it runs.

    Attributes:
        op: path of the op whose result it leaves; "" for what belongs to none.
        flops: of its products one by one, and of all else by unit.
        read, written: bytes.
        row: elements of the rows that it holds as a whole; else 0.
        item: of the flat program, that it comes from.
        name: of the primitive, or the kind of collective, whose result it leaves.
        moves: buffers with the bytes of them that it reads, and with those that it leaves.
    """

    op: str
    flops: tuple[Flops, ...]
    read: int
    written: int
    times: int = 1
    row: int = 0
    item: Item | None = field(default=None, compare=False, repr=False)
    name: str = ""
    moves: tuple[Moves, Moves] = field(default=((), ()), compare=False, repr=False)

    def seconds(self, device: DeviceKind) -> float:
        """Once: as is reached of the device's peaks, or at these where nobody says what is."""
        return device.kernel_seconds(self.flops, self.read + self.written, self.row)


@dataclass(frozen=True)
class Work:
    """Kernels, one after the other."""

    kernels: tuple[KernelWork, ...] = ()

    @property
    def products(self) -> dict[str, float]:
        """Operations of products, by the dtype of their operands."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            for one in kernel.flops:
                if one.unit not in NO_PRODUCTS:
                    found[one.unit] = found.get(one.unit, 0.0) + kernel.times * one.count
        return found

    @property
    def flops(self) -> float:
        """Operations of products."""
        return sum(self.products.values())

    @property
    def launches(self) -> int:
        return sum(k.times for k in self.kernels)

    @property
    def read(self) -> int:
        return sum(k.times * k.read for k in self.kernels)

    @property
    def written(self) -> int:
        return sum(k.times * k.written for k in self.kernels)

    def seconds(self, device: DeviceKind) -> float:
        """One kernel after the other."""
        return sum(k.times * k.seconds(device) for k in self.kernels)


def work_of(jaxpr: core.Jaxpr, done: Sequence[bool] | None = None) -> Work:
    """The work of a local body by itself, nothing of it fused with what stands around it.

    Args:
        done: which of its equations are done here; what others make is at hand (a forward made it).
    """
    return work_of_block(Blocks().jaxpr(done_here(jaxpr, done)))


def done_here(jaxpr: core.Jaxpr, done: Sequence[bool] | None) -> core.Jaxpr:
    """What is left of a local body without the equations that others have done; these are its inputs."""
    if done is None or all(done):
        return jaxpr
    eqns = [eqn for eqn, here in zip(jaxpr.eqns, done, strict=True) if here]
    made = {v for eqn in eqns for v in eqn.outvars}
    at_hand = list(dict.fromkeys(v for e in eqns for v in e.invars if isinstance(v, core.Var) and v not in made))
    return make_jaxpr(eqns, at_hand, [v for v in jaxpr.outvars if v in made], jaxpr)


def work_of_block(block: Block, rows: bool = True) -> Work:
    """The work of a block, that of the loops in it as often as these run.

    Args:
        rows: whether a kernel may hold whole rows (`rows.in_rows`).
    """
    return Work(tuple(_kernels(block, 1, rows)))


def _kernels(block: Block, times: int, rows: bool) -> Iterator[KernelWork]:
    reduced: set[tuple[int, ...]] = set()  # what reductions have read: several of one tensor are one kernel
    kernels = kernels_of(block)
    for kernel in in_rows(block, kernels) if rows else kernels:
        step = kernel.step
        if step.inner:
            yield from _inside(kernel, times, rows)
            continue
        read, written = tuple(kernel.reads.items()), tuple((v, v.nbytes) for v in kernel.writes)
        if step.kind == "reduced":
            if not any(nbytes for _, nbytes in written):
                written = tuple((v, v.nbytes) for v in step.reads)  # into a stack
            else:
                own = tuple(id(v) for v in kernel.reads)
                read = () if own in reduced else read
                reduced.add(own)
        yield _work(step, read, written, times, _flops(kernel), kernel.row, step.name)


def _work(
    step: BlockStep, read: Moves, written: Moves, times: int, flops: tuple[Flops, ...] = (), row: int = 0, name: str = ""
) -> KernelWork:
    in_all, left = (sum(nbytes for _, nbytes in moves) for moves in (read, written))
    return KernelWork(step.op, flops, in_all, left, times, row, step.item, name, (read, written))


def _inside(kernel: Kernel, times: int, rows: bool) -> Iterator[KernelWork]:
    """A loop's iterations, and the stacks that it writes, which XLA fills with zeros before; of the branches of a ``cond``
    the one that moves most."""
    step = kernel.step
    stacks = step.writes[len(step.inner[0].carries) :]
    if stacks:
        yield _work(step, (), tuple((stack, stack.nbytes) for stack in stacks), times)

    def kernels(inner: Inner) -> list[KernelWork]:
        return list(_kernels(inner.block, times * inner.length, rows))

    def size(found: list[KernelWork]) -> float:
        return sum(k.times * (k.read + k.written + sum(one.count for one in k.flops)) for k in found)

    yield from max(map(kernels, step.inner), key=size)


def _flops(kernel: Kernel) -> tuple[Flops, ...]:
    every = [step.flops for step in (*kernel.fused, kernel.step) if step.flops.count]
    others = grouped((one.unit, one.count) for one in every if one.unit in NO_PRODUCTS)
    products = [one for one in every if one.unit not in NO_PRODUCTS]
    return (*products, *(Flops(sum(counts), unit) for unit, counts in others.items()))
